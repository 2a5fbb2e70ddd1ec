"""How large tiles are and how many CTAs share the work, by GPU and shape."""

from typing import Any

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.decode import DecodeShape
from jaxpaged.pallas.dequantize import product_dtype
from jaxpaged.pallas.prefill import WG_ROWS, PrefillShape
from jaxpaged.pallas.prefill_plan import PrefillTiling
from jaxpaged.pallas.scores import changes_scores
from jaxpaged.reference.attention import AttentionOptions

SM_COUNT = 132
"""Streaming multiprocessors of an H100 or H200 (SXM)."""
TILE_ROWS = 2 * WG_ROWS
SMEM_BYTES = 232_448
"""Shared memory that a CTA may have."""
_SMEM_OF_TWO = 96 * 1024
_SMEM_OF_ONE = 200 * 1024
"""Bytes of shared memory for the ring of a CTA where two fit on a multiprocessor, and where one does."""


def decode_config(
    query: Any, cache: KVCache, batch: PagedBatch, out_dtype: Any, batch_invariant: bool, max_query_len: int
) -> DecodeShape:
    tile = 64
    padded = sum(-(-size // 64) * 64 for size in (cache.head_size, cache.v_head_size))
    per_tile = tile * padded * cache.dtype.itemsize
    widened = tile * cache.v_head_size * 2 if cache.quantized else 0
    ctas_per_sm = 2 if (_SMEM_OF_TWO - widened) // per_tile >= 3 else 1
    stages = max(2, min(6, ((_SMEM_OF_TWO if ctas_per_sm == 2 else _SMEM_OF_ONE) - widened) // per_tile))
    num_shares = max(1, ctas_per_sm * SM_COUNT // cache.num_kv_heads)
    return DecodeShape(
        layout=cache.layout,
        dims=cache.dims,
        dtype=product_dtype(query.dtype, cache),
        cache_dtype=cache.dtype,
        buffer_dtype=cache.key.dtype,
        out_dtype=out_dtype,
        num_tokens=query.shape[0],
        group=query.shape[1] // cache.num_kv_heads,
        max_query_len=max_query_len,
        num_shares=batch.num_reqs if batch_invariant else num_shares,
        tile=tile,
        stages=stages,
    )


def prefill_config(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    out_dtype: Any,
    return_lse: bool,
    batch_invariant: bool,
) -> PrefillShape:
    """The tiles of prefill."""
    num_tokens, num_heads, _ = query.shape
    group = num_heads // cache.num_kv_heads
    # A tile of one head holds 128 tokens: with fewer a request, tiles of all heads of a group waste less.
    packed = can_be_packed(group) and num_tokens < 96 * batch.num_reqs
    tokens = packed_tokens(group) if packed else TILE_ROWS
    most_parts = (
        1
        if batch_invariant
        else _most_parts(num_tokens // tokens + batch.num_reqs, num_heads // (group if packed else 1))
    )
    k_size, v_size = (-(-size // 64) * 64 for size in (cache.head_size, cache.v_head_size))
    step = 128 if max(k_size, v_size) <= 128 else 64
    q_stages, o_slots, stages = _prefill_memory(step, k_size, v_size, query.dtype.itemsize, out_dtype.itemsize)
    return PrefillShape(
        layout=cache.layout,
        dims=cache.dims,
        dtype=query.dtype,
        out_dtype=out_dtype,
        num_tokens=num_tokens,
        group=group,
        tiling=PrefillTiling(tokens, packed, step, SM_COUNT, most_parts),
        stages=stages,
        q_stages=q_stages,
        o_slots=o_slots,
        # A third loop costs registers, which options of the scores need, too.
        half_steps=step == 128 and not packed and not changes_scores(options) and options.mask_mod is None,
        registers=(240, 24),
        windowed=options.window[0] is not None or most_parts > 1,
        return_lse=return_lse or most_parts > 1,
        in_parts=most_parts > 1,
    )


def can_be_packed(group: int) -> bool:
    """Whether tiles may hold all heads of a group, of 8 tokens at least."""
    return 1 < group <= 16


def packed_tokens(group: int) -> int:
    """Tokens of a tile that holds all of a group's heads, up to 16: a power of two, and as many as its rows allow."""
    return 1 << ((TILE_ROWS // group).bit_length() - 1)


def _most_parts(most_tiles: int, heads: int) -> int:
    """Into how many parts tiles may be split: into any where there might be too few for all CTAs."""
    return min(16, -(-SM_COUNT // heads)) if most_tiles * heads < SM_COUNT else 1


def _prefill_memory(step: int, k_size: int, v_size: int, itemsize: int, out_itemsize: int) -> tuple[int, int, int]:
    """Slots for queries, for chunks of the output of a warpgroup, and of the ring: what fits, best first."""
    room = SMEM_BYTES - 1024
    all_chunks = v_size * out_itemsize // 128
    per_stage = step * (k_size + v_size) * itemsize
    for q_stages, o_slots in ((2, all_chunks), (2, 2), (1, all_chunks), (1, 2), (1, 1)):
        left = room - TILE_ROWS * (q_stages * k_size * itemsize + o_slots * 128)
        if o_slots <= all_chunks and left >= 2 * per_stage:
            return q_stages, o_slots, min(4, left // per_stage)
    raise ValueError(f"head sizes {k_size} and {v_size} don't fit in shared memory")
