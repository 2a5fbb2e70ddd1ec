"""What a decode kernel is compiled for, and the sizes that follow from it."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.metadata.kv_cache import QUANTIZED_DTYPES
from jaxpaged.metadata.layout import CacheDims, KVLayout
from jaxpaged.pallas.flags import FLAG
from jaxpaged.pallas.paged_tiles import CHUNK, PagedTiles, swizzled


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """What a decode kernel is compiled for.

    Attributes:
      query_dtype, dtype: of the queries, and of the products.
      cache_dtype, buffer_dtype: of the numbers in the cache, and of the buffers that hold them.
      heads: kv heads that share a tile.
      group: query heads of these.
      max_query_len: new tokens a request.
      tile, stages: positions a tile, and tiles in the ring.
      warpgroups: that compute; their number divides that of stages.
      fewest_tiles: in a share.
      overlaps: whether to begin while the kernel before is still running, and not to end before it: it must write
        nothing that this one reads or writes, and all before it must have ended when its CTAs let this one start.
      by_request: whether the output is [num_reqs, num_kv_heads, padded v_head_size, columns] float32, no sinks, for
        a merge with another state.
    """

    layout: KVLayout
    dims: CacheDims
    query_dtype: Any
    dtype: Any
    cache_dtype: Any
    buffer_dtype: Any
    out_dtype: Any
    num_tokens: int
    heads: int
    group: int
    max_query_len: int
    num_shares: int
    tile: int
    stages: int
    warpgroups: int
    fewest_tiles: int
    overlaps: bool = False
    by_request: bool = False

    @property
    def rows(self) -> int:
        """Rows of a request: for each kv head that shares a tile, token by token, the query heads of its own."""
        return self.group * self.max_query_len

    @property
    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Rows that lie side by side in queries and output: their token, their first query head and row, how many.

        Of padded heads few at a time: eight rows would be sent by tiles, which the end of such a head does not fill.
        """
        heads, own = (1, self.group) if self.max_query_len == 1 else (self.heads, self.group // self.heads)
        most = own if self.dims.v_head_size % CHUNK == 0 else 4
        for token, h, i in itertools.product(range(self.max_query_len), range(heads), range(0, own, most)):
            yield token, h * own + i, (h * self.max_query_len + token) * own + i, min(most, own - i)

    def place(self, row: Any) -> tuple[Any, Any]:
        """The token of a row, and its query head among the group's."""
        own = self.group // self.heads
        kv_head, rest = divided(row, own * self.max_query_len)
        token, head = divided(rest, own)
        return token, kv_head * own + head

    def row(self, token: Any, head: Any) -> Any:
        """The row of a token and one of the group's query heads; anything for a token that there is no row for."""
        if self.max_query_len == 1:
            return head
        own = self.group // self.heads
        kv_head, member = divided(head, own)
        return (kv_head * self.max_query_len + token) * own + member

    @property
    def columns(self) -> int:
        """Rows to a multiple of 8, the narrow side of the products."""
        return -(-self.rows // 8) * 8

    @property
    def head_groups(self) -> int:
        """How many times as many kv heads there are as share a tile."""
        return self.dims.num_kv_heads // self.heads

    @property
    def scores(self) -> tuple[int, int]:
        """The shape of a tile's scores."""
        return self.tile * self.heads, self.columns

    def tiles(self, which: Any) -> PagedTiles:
        return PagedTiles(which, self.layout, self.dims, self.buffer_dtype, self.tile, self.stages, self.heads)

    @property
    def quantized(self) -> bool:
        return self.cache_dtype in QUANTIZED_DTYPES

    @property
    def query_copies(self) -> int:
        """Copies that bring a request's queries."""
        return len(list(self.runs)) * (1 if self.quantized else self.tiles("key").chunks)

    @property
    def swizzled(self) -> tuple[Any, ...]:
        """How rows of operands of the products lie in shared memory."""
        return swizzled(self.dtype)

    @property
    def padded_v_size(self) -> int:
        return self.tiles("value").chunks * CHUNK

    @property
    def value_rows(self) -> list[Any]:
        """Rows of the output, transposed, in the pieces that it lies in registers in."""
        return [pl.ds(c * CHUNK, size) for c, size in enumerate(self.tiles("value").part_sizes)]

    @property
    def part_rows(self) -> int:
        """Rows of what a share leaves of a request: the output, transposed, and the lses; by eights, as TMA goes."""
        return self.padded_v_size + 8


def divided(x: Any, y: int) -> tuple[Any, Any]:
    """Quotient and remainder of numbers of 0 or more, vectors or not."""
    by = jnp.full(jnp.shape(x), y, jnp.int32) if jnp.ndim(x) else jnp.int32(y)
    return lax.div(x, by), lax.rem(x, by)


def reduction_numbers(columns: int) -> int:
    """Numbers of 32 bits that a warpgroup finds a maximum of each column with."""
    return max(512, 32 * columns)


def reduction_bytes(shape: DecodeShape) -> int:
    """Shared memory for a number of each row and thread, so that all maxima are found in one meeting of threads."""
    return 4 * reduction_numbers(shape.columns) if shape.warpgroups == 1 else 0


def workspace_types(shape: DecodeShape, num_reqs: int) -> tuple[Any, Any, Any]:
    """Of the parts that shares leave, of their flags, and of requests' lses; see `decode_parts.py`."""
    each = (shape.num_shares, shape.head_groups)
    return (
        jax.ShapeDtypeStruct((*each, shape.part_rows, shape.columns), jnp.float32),
        jax.ShapeDtypeStruct((*reversed(each), FLAG), jnp.int32),
        jax.ShapeDtypeStruct((num_reqs, shape.head_groups, shape.columns), jnp.float32),
    )


def per_column(x: Any, shape: DecodeShape) -> Any:
    """Values per query head [.., num_heads] as [.., 2, columns_length] float32; as they are where they have three axes.

    They are rows of all heads; and again from the second row on, since registers load pairs of numbers, at multiples
    of 8 bytes, and a CTA's first row may be an odd one.
    """
    if x is None or x.ndim == 3:
        return x
    by_kv_head = x.astype(jnp.float32).reshape(-1, shape.dims.num_kv_heads, shape.group // shape.heads)
    rows = jnp.tile(by_kv_head, shape.max_query_len).reshape(len(by_kv_head), -1)
    more = columns_length(rows.shape[1]) - rows.shape[1]
    return jnp.stack([jnp.pad(rows[:, i:], [(0, 0), (0, more + i)]) for i in range(2)], axis=1)


def columns_length(rows: int) -> int:
    """Of the last axis of `per_column`: eight more than there are rows, so that a CTA may read on, and even."""
    return rows + rows % 2 + 8


def column_place(head: Any, shape: DecodeShape) -> tuple[Any, Any]:
    """Where a CTA's rows begin in the last two axes of `per_column`."""
    start = head * shape.rows
    odd = lax.rem(start, jnp.int32(2)) if shape.rows % 2 else 0
    return odd, start - odd
