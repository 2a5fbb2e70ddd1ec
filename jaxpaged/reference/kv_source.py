"""Where attention reads keys and values from, a chunk of consecutive positions of one request at a time."""

import dataclasses
from typing import Any, Protocol, Self

import jax.numpy as jnp
from jax import lax

from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.metadata.layout import Which
from jaxpaged.reference.rows import blocks_by_head, dequantize


class KVSource(Protocol):
    """Keys and values of every request. A chunk is `chunk_size` positions, numbered from the request's start."""

    @property
    def kv_lens(self) -> Any:
        """[num_reqs] int32, positions that each request has."""

    @property
    def arrays(self) -> Any:
        """A pytree of all arrays that it reads."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def v_head_size(self) -> int: ...

    def with_chunk_size(self, chunk_size: int) -> Self:
        """The same keys and values in chunks of about this size."""

    def chunk_of(self, position: Any) -> Any:
        """The chunk that holds a position."""

    def positions(self, request: Any, chunk: Any) -> tuple[Any, Any]:
        """Positions [chunk_size] int32 of a chunk's rows, and whether each row belongs to the chunk and may be read."""

    def load(self, request: Any, chunk: Any, valid: Any) -> tuple[Any, Any]:
        """K [num_kv_heads, chunk_size, head_size] and V [.., v_head_size] in float32; V is 0 where not `valid`."""


@dataclasses.dataclass(frozen=True)
class PagedKV:
    """A paged cache seen through a block table."""

    cache: KVCache
    block_table: Any  # [num_reqs, max_blocks_per_req] int32
    kv_lens: Any
    fixed_chunk: bool  # the chunk's size must not depend on the table's width
    chunk_size: int = 256

    def with_chunk_size(self, chunk_size: int) -> Self:
        return dataclasses.replace(self, chunk_size=chunk_size)

    @property
    def arrays(self) -> Any:
        return self.cache, self.block_table, self.kv_lens

    @property
    def num_kv_heads(self) -> int:
        return self.cache.num_kv_heads

    @property
    def v_head_size(self) -> int:
        return self.cache.v_head_size

    @property
    def _blocks_per_chunk(self) -> int:
        blocks = max(1, self.chunk_size // self.cache.block_size)
        return blocks if self.fixed_chunk else min(blocks, self.block_table.shape[1])

    @property
    def _chunks_per_block(self) -> int:
        """More than 1 where a block is larger than a chunk."""
        return -(-self.cache.block_size // self.chunk_size)

    def chunk_of(self, position: Any) -> Any:
        block_size = self.cache.block_size
        if self._chunks_per_block == 1:
            return position // (self._blocks_per_chunk * block_size)
        return position // block_size * self._chunks_per_block + position % block_size // self.chunk_size

    def _columns(self, chunk: Any) -> Any:
        """The block table's columns that a chunk reads, [blocks]."""
        if self._chunks_per_block > 1:
            return (chunk // self._chunks_per_block)[None]
        return chunk * self._blocks_per_chunk + jnp.arange(self._blocks_per_chunk)

    def _part(self, chunk: Any) -> tuple[Any, Any]:
        """Of a chunk within a block: where its own rows start, and where it is read from so as to stay in the block."""
        start = chunk % self._chunks_per_block * self.chunk_size
        return start, jnp.minimum(start, self.cache.block_size - self.chunk_size)

    def _blocks(self, request: Any, chunk: Any) -> tuple[Any, Any]:
        """Physical blocks of a chunk, made safe to read, and whether each is a real one."""
        columns = self._columns(chunk)
        width = self.block_table.shape[1]
        ids = self.block_table[request, jnp.minimum(columns, width - 1)]
        real = (columns < width) & (ids >= 0) & (ids < self.cache.num_blocks)
        return jnp.where(real, ids, 0), real

    def positions(self, request: Any, chunk: Any) -> tuple[Any, Any]:
        _, real = self._blocks(request, chunk)
        block_size = self.cache.block_size
        if self._chunks_per_block == 1:
            offset = jnp.arange(block_size)
            own = jnp.ones((block_size,), bool)
        else:
            start, read_from = self._part(chunk)
            offset = read_from + jnp.arange(self.chunk_size)
            own = offset >= start
        position = (self._columns(chunk)[:, None] * block_size + offset).reshape(-1)
        valid = (real[:, None] & own).reshape(-1)
        return position, valid & (position < self.kv_lens[request])

    def load(self, request: Any, chunk: Any, valid: Any) -> tuple[Any, Any]:
        blocks = lax.optimization_barrier(self._blocks(request, chunk)[0])
        # XLA on the CPU converts float8 arrays to read them. The barrier keeps it from converting all of the cache
        # ahead of the loop over chunks, instead of the rows that are read.
        cache, chunk = lax.optimization_barrier((self.cache, chunk)) if self.cache.quantized else (self.cache, chunk)
        keys = self._load(cache, "key", blocks, chunk)
        values = self._load(cache, "value", blocks, chunk)
        return keys, jnp.where(valid[:, None], values, 0.0)

    def _load(self, cache: KVCache, which: Which, blocks: Any, chunk: Any) -> Any:
        scale = cache.scale(which)
        token_scale = None
        if self._chunks_per_block == 1:
            selected = cache.buffer(which)[cache.layout.index(which, cache.dims, blocks)]
            if scale is not None and scale.ndim == 3:
                token_scale = scale[blocks].reshape(-1, self.num_kv_heads).T
        else:
            _, read_from = self._part(chunk)
            selected = _slice_of_block(cache, which, blocks[0], read_from, self.chunk_size)
            if scale is not None and scale.ndim == 3:
                token_scale = lax.dynamic_slice(
                    scale, (blocks[0], read_from, 0), (1, self.chunk_size, self.num_kv_heads)
                )[0].T
        rows = blocks_by_head(selected, cache, which)
        rows = rows.reshape(self.num_kv_heads, -1, rows.shape[-1])
        return dequantize(rows, cache, which, token_scale)


def _slice_of_block(cache: KVCache, which: Which, block: Any, slot: Any, length: int) -> Any:
    """`length` slots of one block from `slot` on, with the axes that a selection of one block has."""
    axes = cache.layout.axes(which)
    starts: list[Any] = [0] * len(axes)
    sizes = list(cache.buffer(which).shape)
    for i, axis in enumerate(axes):
        if axis == "n":
            starts[i], sizes[i] = block, 1
        elif axis == "s":
            starts[i], sizes[i] = slot, length
        elif axis == "2":
            starts[i], sizes[i] = int(which == "value"), 1
        elif axis == "(2d)":
            starts[i] = cache.head_size if which == "value" else 0
            sizes[i] = cache.v_head_size if which == "value" else cache.head_size
    part = lax.dynamic_slice(cache.buffer(which), [jnp.int32(s) for s in starts], sizes)
    part = jnp.moveaxis(part, axes.index("n"), 0)
    return part.reshape(1, *(size for axis, size in zip(axes, sizes, strict=True) if axis not in ("n", "2")))


@dataclasses.dataclass(frozen=True)
class DenseKV:
    """Packed keys and values, the requests' one after the other."""

    key: Any  # [total_kv, num_kv_heads, head_size]
    value: Any  # [total_kv, num_kv_heads, v_head_size]
    start_loc: Any  # [num_reqs + 1] int32
    chunk_size: int = 256

    def with_chunk_size(self, chunk_size: int) -> Self:
        return dataclasses.replace(self, chunk_size=chunk_size)

    @property
    def kv_lens(self) -> Any:
        return self.start_loc[1:] - self.start_loc[:-1]

    @property
    def arrays(self) -> Any:
        return self.key, self.value, self.start_loc

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def v_head_size(self) -> int:
        return self.value.shape[2]

    @property
    def _chunk_size(self) -> int:
        return min(self.chunk_size, self.key.shape[0])

    def chunk_of(self, position: Any) -> Any:
        return position // self._chunk_size

    def _base(self, request: Any, chunk: Any) -> Any:
        """First row of a chunk, moved back where the chunk would run past the end."""
        return jnp.minimum(self.start_loc[request] + chunk * self._chunk_size, self.key.shape[0] - self._chunk_size)

    def positions(self, request: Any, chunk: Any) -> tuple[Any, Any]:
        first = self._base(request, chunk) - self.start_loc[request]
        position = first + jnp.arange(self._chunk_size)
        return position, (position >= chunk * self._chunk_size) & (position < self.kv_lens[request])

    def load(self, request: Any, chunk: Any, valid: Any) -> tuple[Any, Any]:
        base, size = self._base(request, chunk), self._chunk_size
        keys, values = (
            lax.dynamic_slice_in_dim(x, base, size).swapaxes(0, 1).astype(jnp.float32) for x in (self.key, self.value)
        )
        return keys, jnp.where(valid[:, None], values, 0.0)
