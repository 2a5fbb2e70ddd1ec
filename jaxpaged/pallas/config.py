"""The kernels' shapes: the tiles that were found best for a GPU, and as much of them as shared memory has room for."""

from typing import Any, NamedTuple

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.decode_shape import DecodeShape, reduction_numbers
from jaxpaged.pallas.eight_bits import has_row_scales, product_dtype
from jaxpaged.pallas.prefill_plan import PrefillTiling
from jaxpaged.pallas.prefill_shape import WG_ROWS, PrefillShape
from jaxpaged.pallas.scores import changes_scores
from jaxpaged.pallas.tuning import CallShape, Gpu
from jaxpaged.reference.attention import AttentionOptions

TILE_ROWS = 2 * WG_ROWS
SMEM_BYTES = 232_448
"""Shared memory that a CTA may have."""
LEAST_TILE = 64
MOST_DECODED_ROWS = 64
MOST_SHARED_ROWS = 16
"""Of all heads that share a tile: with more, threads have too many registers for two CTAs of a multiprocessor."""
SMEM_BYTES_OF_TWO = 115_712
"""Shared memory that each of two CTAs of a multiprocessor may have."""
ALIGNMENT = 1024
"""Bytes; where a buffer of shared memory may begin."""
_BARRIER_BYTES = 512
_REGISTERS_OF_FOUR = (208, 32, 64)
"""Of a thread of prefill that computes, loads and widens: 65,536 are shared out among 128 threads each."""
_MANY = 2**30


def decode_call(query: Any, cache: KVCache, batch: PagedBatch, batch_invariant: bool, max_query_len: int) -> CallShape:
    rows = query.shape[1] // cache.num_kv_heads * max_query_len
    return _call(cache, rows, _MANY if batch_invariant else batch.num_reqs)


def prefill_call(query: Any, cache: KVCache, batch: PagedBatch, batch_invariant: bool) -> CallShape:
    if batch_invariant:  # the step decides a result's bits
        return _call(cache, _MANY, _MANY)
    num_tokens, num_heads, _ = query.shape
    return _call(cache, num_heads // cache.num_kv_heads * num_tokens // batch.num_reqs, batch.num_reqs)


def _call(cache: KVCache, rows: int, num_reqs: int) -> CallShape:
    return CallShape(8 * cache.dtype.itemsize, max(_padded_sizes(cache)), rows, num_reqs)


def decode_config(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    out_dtype: Any,
    batch_invariant: bool,
    max_query_len: int,
    gpu: Gpu,
) -> DecodeShape:
    """The shape of decode for requests of up to `max_query_len` new tokens."""
    group = query.shape[1] // cache.num_kv_heads
    tiles = gpu.decode_tiles(decode_call(query, cache, batch, batch_invariant, max_query_len))
    heads = _heads_of_a_tile(cache, group * max_query_len, tiles.heads)
    rows = heads * group * max_query_len
    tile = tiles.tile if _stages_that_fit(cache, rows, tiles.tile) >= 2 else LEAST_TILE
    of_two = _stages_that_fit(cache, rows, tile, room=SMEM_BYTES_OF_TWO)
    ctas_per_sm = tiles.ctas_per_sm if of_two >= 3 else 1
    stages = min(tiles.most_stages, of_two if ctas_per_sm == 2 else _stages_that_fit(cache, rows, tile))
    warpgroups = 1
    for n in range(tiles.warpgroups, 1, -1):
        places = min(tiles.most_stages, _stages_that_fit(cache, rows, tile, n)) // n * n
        if warpgroups == 1 and places >= max(n, 3):
            warpgroups, stages = n, places
    num_shares = max(1, ctas_per_sm * gpu.num_sms * heads // cache.num_kv_heads)
    return DecodeShape(
        layout=cache.layout,
        dims=cache.dims,
        query_dtype=query.dtype,
        dtype=product_dtype(query.dtype, cache),
        cache_dtype=cache.dtype,
        buffer_dtype=cache.key.dtype,
        out_dtype=out_dtype,
        num_tokens=query.shape[0],
        heads=heads,
        group=group * heads,
        max_query_len=max_query_len,
        num_shares=batch.num_reqs if batch_invariant else num_shares,
        tile=tile // heads,
        stages=stages,
        warpgroups=warpgroups,
        fewest_tiles=tiles.fewest_tiles * heads,
    )


def _heads_of_a_tile(cache: KVCache, rows: int, wanted: int) -> int:
    """As many kv heads as are wanted, or fewer, that share a tile, of `rows` rows each."""
    if any(scale is not None and scale.ndim == 1 for scale in (cache.k_scale, cache.v_scale)):
        return 1  # of scales per head a CTA has one
    return next(
        n
        for n in (8, 4, 2, 1)
        if n <= wanted and (n == 1 or n * rows <= MOST_SHARED_ROWS) and cache.num_kv_heads % n == 0
    )


def most_decoded_rows(cache: KVCache) -> int:
    """Rows that a request may have for decode, so that shared memory has room for two tiles besides."""
    columns = range(MOST_DECODED_ROWS, 0, -8)
    return next((rows for rows in columns if _stages_that_fit(cache, rows, LEAST_TILE) >= 2), 0)


def _stages_that_fit(cache: KVCache, rows: int, tile: int, warpgroups: int = 1, room: int = SMEM_BYTES) -> int:
    """Tiles of decode's ring for which shared memory has room, beside queries, weights, output and widened values."""
    columns = -(-rows // 8) * 8
    k_size, v_size = _padded_sizes(cache)
    query, out = 2 * columns * k_size * 2, columns * v_size * 4
    others = [query, out]
    others += [warpgroups * n for n in (columns * tile * 2, 2 * columns * 4, 4 * reduction_numbers(columns))]
    if cache.quantized:
        others += [warpgroups * query, warpgroups * tile * v_size * 2]
    if warpgroups > 1:
        others += [(warpgroups - 1) * n for n in (out, 2 * columns * 4)]
    row_scales = tile * cache.num_kv_heads * 4 if has_row_scales(cache) else 0
    ring = tile * (k_size + v_size) * cache.dtype.itemsize + 2 * row_scales
    aligned = sum(-(-n // ALIGNMENT) * ALIGNMENT for n in others) + (2 * ALIGNMENT if row_scales % ALIGNMENT else 0)
    return (room - _BARRIER_BYTES - aligned) // ring


def _padded_sizes(cache: KVCache) -> tuple[int, int]:
    """Sizes of heads of keys and of values as they lie in shared memory."""
    return -(-cache.head_size // 64) * 64, -(-cache.v_head_size // 64) * 64


def prefill_config(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    out_dtype: Any,
    return_lse: bool,
    batch_invariant: bool,
    gpu: Gpu,
) -> PrefillShape:
    """The shape of prefill."""
    num_tokens, num_heads, _ = query.shape
    group = num_heads // cache.num_kv_heads
    tiles = gpu.prefill_tiles(prefill_call(query, cache, batch, batch_invariant))
    # A tile of one head holds 128 tokens: with fewer a request, tiles of all heads of a group waste less.
    packed = can_be_packed(group) and num_tokens < tiles.packed_below * batch.num_reqs
    tokens = packed_tokens(group) if packed else TILE_ROWS
    heads = num_heads // (group if packed else 1)
    most_parts = 1
    if not batch_invariant and (num_tokens // tokens + batch.num_reqs) * heads < gpu.num_sms:  # perhaps some lie idle
        most_parts = min(tiles.most_parts, -(-gpu.num_sms // heads))
    memory = _prefill_memory(query.dtype, cache, out_dtype, tiles.step)
    if memory is None:
        raise ValueError(f"head sizes {cache.head_size} and {cache.v_head_size} don't fit in shared memory")
    step = memory.step
    return PrefillShape(
        layout=cache.layout,
        dims=cache.dims,
        dtype=query.dtype,
        cache_dtype=cache.dtype,
        buffer_dtype=cache.key.dtype,
        out_dtype=out_dtype,
        num_tokens=num_tokens,
        group=group,
        tiling=PrefillTiling(tokens, packed, step, gpu.num_sms, most_parts, tiles.l2_bytes),
        stages=min(tiles.most_stages, memory.stages),
        q_stages=memory.q_stages,
        narrow_stages=memory.narrow_stages,
        o_slots=memory.o_slots,
        # A third loop costs registers, which options of the scores need, too.
        half_steps=step == 128 and not packed and not changes_scores(options) and options.mask_mod is None,
        registers=_REGISTERS_OF_FOUR if cache.quantized else tiles.registers,
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


class _PrefillMemory(NamedTuple):
    """Slots for queries, for chunks of a warpgroup's output, and of the rings."""

    step: int
    q_stages: int
    o_slots: int
    stages: int
    narrow_stages: int


def prefill_fits(query_dtype: Any, cache: KVCache, out_dtype: Any) -> bool:
    """Whether prefill has the shared memory that it needs at least."""
    return _prefill_memory(query_dtype, cache, out_dtype, LEAST_TILE) is not None


def _prefill_memory(query_dtype: Any, cache: KVCache, out_dtype: Any, step: int) -> _PrefillMemory | None:
    """What fits, best first; None if nothing does."""
    room, itemsize = SMEM_BYTES - ALIGNMENT, query_dtype.itemsize
    k_size, v_size = _padded_sizes(cache)
    all_chunks = v_size * out_dtype.itemsize // 128
    narrow = k_size + v_size if cache.quantized else 0  # bytes of a position
    for smaller in (step, LEAST_TILE):
        least = smaller * (2 * (k_size + v_size) * itemsize + narrow)
        for q_stages, o_slots in ((2, all_chunks), (2, 2), (1, all_chunks), (1, 2), (1, 1)):
            left = room - TILE_ROWS * (q_stages * k_size * itemsize + o_slots * 128)
            if o_slots > all_chunks or left < least:
                continue
            if narrow:
                return _PrefillMemory(smaller, q_stages, o_slots, 2, min(2, 1 + (left - least) // (smaller * narrow)))
            return _PrefillMemory(smaller, q_stages, o_slots, left // (least // 2), 0)
    return None
