"""What a prefill kernel is compiled for."""

import dataclasses
from typing import Any

from jaxpaged.metadata.kv_cache import QUANTIZED_DTYPES
from jaxpaged.metadata.layout import CacheDims, KVLayout
from jaxpaged.pallas.paged_tiles import CHUNK, PagedTiles, chunk_columns
from jaxpaged.pallas.prefill_plan import PrefillTiling

WG_ROWS = 64
"""Rows of a warpgroup: what one wgmma computes."""


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """What a prefill kernel is compiled for.

    Attributes:
      dtype: of the queries, and of the products.
      cache_dtype, buffer_dtype: of the numbers in the cache, and of the buffers that hold them.
      group: query heads a kv head.
      stages, q_stages: slots of the ring of keys and values, and of queries.
      narrow_stages: slots of the ring of 8-bit keys and values.
      o_slots: chunks of a warpgroup's output that leave shared memory together.
      half_steps: whether the last step is a half where a warpgroup's rows need no more.
      registers: of a thread that computes, of one that loads, and of one that widens if there are such.
      windowed: whether an item may begin past its request's first step, for a window or for a part.
      in_parts: whether results go to a workspace, in float32, since tiles are split among CTAs.
    """

    layout: KVLayout
    dims: CacheDims
    dtype: Any
    cache_dtype: Any
    buffer_dtype: Any
    out_dtype: Any
    num_tokens: int
    group: int
    tiling: PrefillTiling
    stages: int
    q_stages: int
    narrow_stages: int
    o_slots: int
    half_steps: bool
    registers: tuple[int, ...]
    windowed: bool
    return_lse: bool
    in_parts: bool

    def tiles(self, which: Any) -> PagedTiles:
        return PagedTiles(which, self.layout, self.dims, self.dtype, self.tiling.step, self.stages)

    def narrow_tiles(self, which: Any) -> PagedTiles:
        """Tiles of 8-bit numbers, as they come."""
        return PagedTiles(which, self.layout, self.dims, self.buffer_dtype, self.tiling.step, self.narrow_stages)

    @property
    def quantized(self) -> bool:
        return self.cache_dtype in QUANTIZED_DTYPES

    @property
    def padded_v_size(self) -> int:
        return self.tiles("value").chunks * CHUNK

    @property
    def o_chunk(self) -> int:
        """Columns of a chunk of the output."""
        return chunk_columns(self.out_dtype)

    @property
    def o_chunks(self) -> int:
        return -(-self.dims.v_head_size // self.o_chunk)

    @property
    def wg_tokens(self) -> int:
        """Tokens of a warpgroup's rows."""
        return min(self.tiling.tokens, WG_ROWS)

    @property
    def heads_per_wg(self) -> int:
        """Query heads of a warpgroup's rows: head by head, the tokens of each."""
        return WG_ROWS // self.wg_tokens

    @property
    def splits_tokens(self) -> bool:
        """Whether the second warpgroup has the tile's later tokens, or else its other heads."""
        return self.tiling.tokens == 2 * WG_ROWS

    def head_slots(self, wg: int) -> list[int]:
        """Index in the group of the query head of each of a warpgroup's slots; some slots may stay empty."""
        if not self.tiling.packed or self.splits_tokens:
            return [0]
        heads = [wg * self.heads_per_wg + slot for slot in range(self.heads_per_wg)]
        return [head for head in heads if head < self.group]
