"""Copies of whole blocks within a paged KV cache or from one to another, in place, on Hopper.

A block is one piece of memory in every layout, or two. A CTA moves a chunk of it through shared memory, by one TMA in
and one out, keys and values at once. Blocks that are source and target at once are set aside first, by another kernel:
whether there are any may be known on the device only, so it runs always then, and ends at once when there are none.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.block_pairs import BlockPairs
from jaxpaged.pallas.mosaic import Interpreter, kernel
from jaxpaged.pallas.row_tiles import TMA_BOX, TMA_BYTES


@dataclasses.dataclass(frozen=True)
class CopyTiles:
    """How copies are cut into CTAs.

    Attributes:
      chunk_bytes: of keys that a CTA moves at most, and as much of values.
      aside_ctas: CTAs that set blocks aside.
    """

    chunk_bytes: int = 16 * 1024
    aside_ctas: int = 132


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A buffer of a cache seen as [halves * num_blocks, rows, columns], blocks in a shape for TMA.

    Attributes:
      name: of the cache's attribute.
      halves: 2 where all keys come before all values, else 1.
      chunk_rows: rows that a CTA moves.
    """

    name: str
    dtype: Any
    halves: int
    rows: int
    columns: int
    chunk_rows: int

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.rows, self.chunk_rows)

    def when_rows(self, chunk: Any, move: Callable[[int], None]) -> None:
        """Call `move` with the number of a chunk's rows, if there is such a chunk.

        The last one's may be fewer, and what moves must end with them: Mosaic copies adjoining rows as plain bytes,
        which go on in the next block.
        """
        whole, rest = divmod(self.rows, self.chunk_rows)
        pl.when(chunk < whole)(functools.partial(move, self.chunk_rows))
        if rest:
            pl.when(chunk == whole)(functools.partial(move, rest))

    def view(self, cache: KVCache) -> Any:
        return getattr(cache, self.name).reshape(-1, self.rows, self.columns)


def refusal(cache: KVCache) -> str | None:
    """Why the kernel can't copy a cache's blocks, or None."""
    for name, size in _block_sizes(cache).items():
        if _columns(size, getattr(cache, name).dtype) is None:
            return f"block_size: the kernel moves blocks of a multiple of {TMA_BYTES} bytes, not {size} of {name}"
    return None


def copy_blocks(
    source: KVCache | None,
    target: KVCache,
    pairs: BlockPairs,
    *,
    interpret: Interpreter | None = None,
    config: CopyTiles | None = None,
) -> KVCache:
    """`target` with blocks of `source`, or of its own when that is None, in it, their scales included."""
    num_pairs = pairs.target.shape[0]
    if num_pairs == 0:
        return target
    config = config or CopyTiles()
    blocks = _blocks(target, config)
    read = {"sources": pairs.source, "targets": pairs.target}
    if source is not None:
        read |= {f"{b.name}_source": b.view(source) for b in blocks}
    elif pairs.overwritten is not None:
        read["overwritten"] = pairs.overwritten
        read |= _set_aside(target, blocks, pairs, config, interpret)
    refs = {b.name: jax.new_ref(b.view(target)) for b in blocks}
    names = [*read, *refs]
    sizes = ((source or target).num_blocks, target.num_blocks, num_pairs)

    def copy_cache_blocks(*operands: Any, **scratch: Any) -> None:
        _copy_chunk(blocks, sizes, dict(zip(names, operands, strict=True)) | scratch)

    kernel(
        copy_cache_blocks,
        grid=(num_pairs, max(b.chunks for b in blocks)),
        grid_names=("pair", "chunk"),
        scratch_types=_scratch(blocks),
        interpret=interpret,
    )(*read.values(), *refs.values())
    copied: dict[str, Any] = {name: jax.freeze(ref).reshape(getattr(target, name).shape) for name, ref in refs.items()}
    return dataclasses.replace(target, **copied)


def _block_sizes(cache: KVCache) -> dict[str, int]:
    """Elements of one block, or of one of its halves, of each buffer that holds blocks."""
    buffers = {"key": cache.key, "value": cache.value, "k_scale": cache.k_scale, "v_scale": cache.v_scale}
    kept = {name: x for name, x in buffers.items() if x is not None and (x.ndim == 3 or name in ("key", "value"))}
    return {name: math.prod(x.shape) // (_halves(cache, name) * cache.num_blocks) for name, x in kept.items()}


def _halves(cache: KVCache, name: str) -> int:
    return 2 if name == "key" and cache.layout.axes("key")[0] == "2" else 1


def _columns(size: int, dtype: Any) -> int | None:
    """The widest rows that a block of `size` elements consists of and TMA takes."""
    fits = [n for n in range(1, TMA_BOX + 1) if size % n == 0 and n * jnp.dtype(dtype).itemsize % TMA_BYTES == 0]
    return max(fits, default=None)


def _blocks(cache: KVCache, config: CopyTiles) -> list[Blocks]:
    found = []
    for name, size in _block_sizes(cache).items():
        dtype = jnp.dtype(getattr(cache, name).dtype)
        columns = _columns(size, dtype)
        assert columns is not None, f"{name} was to be refused"
        rows = size // columns
        chunk_rows = max(1, min(rows, TMA_BOX, config.chunk_bytes // (columns * dtype.itemsize)))
        found.append(Blocks(name, dtype, _halves(cache, name), rows, columns, chunk_rows))
    return found


def _scratch(blocks: list[Blocks]) -> dict[str, Any]:
    """A chunk of each half of each buffer, and a barrier that it has come."""
    return {f"{b.name}_chunks": [plgpu.SMEM((b.chunk_rows, b.columns), b.dtype)] * b.halves for b in blocks} | {
        f"{b.name}_barriers": plgpu.Barrier(num_barriers=b.halves) for b in blocks
    }


def _copy_chunk(blocks: list[Blocks], sizes: tuple[int, int, int], refs: dict[str, Any]) -> None:
    """The kernel: one chunk of all buffers for one pair.

    Args:
      sizes: number of blocks of the source and of the target, and of pairs.
    """
    num_source, num_target, num_pairs = sizes
    pair, chunk = lax.axis_index("pair"), lax.axis_index("chunk")
    source, target = refs["sources"][pair], refs["targets"][pair]

    @pl.when(target >= 0)
    def _() -> None:
        if "overwritten" not in refs:
            _load(blocks, "_source" if f"{blocks[0].name}_source" in refs else "", source, num_source, chunk, refs)
        else:
            aside = refs["overwritten"][pair] != 0
            pl.when(aside)(lambda: _load(blocks, "_aside", pair, num_pairs, chunk, refs))
            pl.when(jnp.logical_not(aside))(lambda: _load(blocks, "", source, num_source, chunk, refs))
        _store(blocks, "", target, num_target, chunk, refs)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _load(blocks: list[Blocks], suffix: str, block: Any, num_blocks: int, chunk: Any, refs: dict[str, Any]) -> None:
    """A block's chunk into shared memory."""
    for b in blocks:

        def load(rows: int, b: Blocks = b) -> None:
            for half, smem in enumerate(refs[f"{b.name}_chunks"]):
                source = refs[b.name + suffix].at[half * num_blocks + block, pl.ds(chunk * b.chunk_rows, rows)]
                plgpu.copy_gmem_to_smem(source, smem.at[pl.ds(0, rows)], refs[f"{b.name}_barriers"].at[half])

        b.when_rows(chunk, load)


def _store(blocks: list[Blocks], suffix: str, block: Any, num_blocks: int, chunk: Any, refs: dict[str, Any]) -> None:
    """The chunk out of shared memory as soon as it has come."""
    for b in blocks:

        def send(rows: int, b: Blocks = b) -> None:
            for half, smem in enumerate(refs[f"{b.name}_chunks"]):
                plgpu.barrier_wait(refs[f"{b.name}_barriers"].at[half])
                target = refs[b.name + suffix].at[half * num_blocks + block, pl.ds(chunk * b.chunk_rows, rows)]
                plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, rows)], target)

        b.when_rows(chunk, send)


def _set_aside(
    cache: KVCache, blocks: list[Blocks], pairs: BlockPairs, config: CopyTiles, interpret: Interpreter | None
) -> dict[str, Any]:
    """Copies of the blocks that the copy will overwrite; the rest of these arrays is never looked at."""
    num_pairs = pairs.target.shape[0]
    ctas = min(config.aside_ctas, num_pairs)
    names = [
        "any_overwritten",
        "overwritten",
        "sources",
        *(b.name for b in blocks),
        *(f"{b.name}_aside" for b in blocks),
    ]

    def set_blocks_aside(*operands: Any, **scratch: Any) -> None:
        refs = dict(zip(names, operands, strict=True)) | scratch

        def step(pair: Any, chunk: Any) -> None:
            _load(blocks, "", refs["sources"][pair], cache.num_blocks, chunk, refs)
            _store(blocks, "_aside", pair, num_pairs, chunk, refs)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def all_chunks(pair: Any) -> None:
            lax.fori_loop(0, max(b.chunks for b in blocks), lambda chunk, _: step(pair, chunk), None)

        def pair_of_cta(i: Any, _: None) -> None:
            pair = lax.axis_index("cta") + i * ctas
            overwritten = refs["overwritten"][jnp.minimum(pair, num_pairs - 1)] != 0
            pl.when(overwritten & (pair < num_pairs))(functools.partial(all_chunks, pair))

        lax.fori_loop(0, refs["any_overwritten"][0] * pl.cdiv(num_pairs, ctas), pair_of_cta, None)

    shapes = [jax.ShapeDtypeStruct((b.halves * num_pairs, b.rows, b.columns), b.dtype) for b in blocks]
    aside = kernel(
        set_blocks_aside,
        out_type=shapes,
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types=_scratch(blocks),
        interpret=interpret,
    )(pairs.any_overwritten.reshape(1), pairs.overwritten, pairs.source, *(b.view(cache) for b in blocks))
    return {f"{b.name}_aside": x for b, x in zip(blocks, aside, strict=True)}
