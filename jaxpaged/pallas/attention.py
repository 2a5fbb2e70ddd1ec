"""Paged attention by the Pallas kernels: what they take, which of them a batch needs, and the calls."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.combine import combine
from jaxpaged.pallas.config import decode_config, prefill_config
from jaxpaged.pallas.decode import DecodeShape, decode
from jaxpaged.pallas.mosaic import Interpreter
from jaxpaged.pallas.decode_plan import DecodePlan, plan_decode
from jaxpaged.pallas import decode_plan as field
from jaxpaged.pallas.prefill import WG_ROWS, PrefillShape, prefill
from jaxpaged.pallas.prefill_plan import PrefillPlan, plan_prefill
from jaxpaged.pallas.scores import LN2, changes_scores
from jaxpaged.reference.attention import AttentionOptions

MOST_DECODED, MOST_ROWS = 8, 64
"""Most new tokens, and rows, of a request that decode is compiled for."""
FEWEST_DECODED = 8
"""With fewer requests in a batch with long ones, prefill takes short ones, too: another kernel would take longer."""
DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16))


def refusal(query: Any, cache: KVCache, batch: PagedBatch, options: AttentionOptions, out_dtype: Any) -> str | None:
    """Why the kernels can't take a call that `paged_attention` found right, or None."""
    if query.dtype not in DTYPES:
        return f"the kernels take queries of bfloat16 and float16, not {jnp.dtype(query.dtype).name}"
    if out_dtype not in DTYPES:
        return f"the kernels write outputs of bfloat16 and float16, not {out_dtype.name}"
    if cache.dtype != query.dtype:
        return f"the kernels take caches of the query's dtype, {jnp.dtype(query.dtype).name}, not {cache.dtype.name}"
    if "x" in cache.layout.axes("key") or any(cache.layout.axes(w)[-1] == "s" for w in ("key", "value")):
        return f"the kernels need the elements of a head side by side, which layout {cache.layout.name} does not have"
    if math.gcd(cache.block_size, 64) < 8:
        return f"the kernels take blocks of a multiple of 8 tokens, not {cache.block_size}"
    sizes = (cache.head_size, cache.v_head_size)
    if max(sizes) > 256 or any(size * cache.dtype.itemsize % 16 for size in sizes):
        return f"the kernels take heads of up to 256 elements and a multiple of 16 bytes, not {sizes}"
    if 0 in (query.shape[0], batch.num_reqs, batch.max_blocks_per_req, cache.num_blocks):
        return "there is nothing to compute"
    return None


def paged_attention(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    *,
    out_dtype: Any,
    batch_invariant: bool,
    return_lse: bool,
    interpret: Interpreter | None,
) -> tuple[Any, Any]:
    """`jaxpaged.paged_attention` on arguments that nothing refuses; the lse is None unless asked for."""
    num_tokens, num_heads, _ = query.shape
    longest = _decoded(query, cache, batch, batch_invariant)
    all_decoded = batch.max_query_len is not None and batch.max_query_len <= longest
    out = jax.new_ref(lax.empty((num_tokens, num_heads, cache.v_head_size), out_dtype))
    lse = None
    if not all_decoded:
        plain = not changes_scores(options) and options.mask_mod is None
        tiles = prefill_config(query, cache, batch, out_dtype, return_lse, plain)
        prefill_plan = plan_prefill(
            cache, batch, options, tiles.tiling, num_tokens=num_tokens, num_heads=num_heads, shortest=longest + 1
        )
        tile_lse = prefill(query, cache, batch, prefill_plan, options, tiles, out, interpret)
        lse = _prefill_lse(prefill_plan, tile_lse, tiles, batch) if return_lse else None
    if longest > 0:
        shape = decode_config(query, cache, batch, out_dtype, batch_invariant, longest)
        plan = plan_decode(
            cache,
            batch,
            options,
            num_tokens=num_tokens,
            max_query_len=longest,
            tile=shape.tile,
            num_shares=shape.num_shares,
            min_tiles=4,
            others_elsewhere=not all_decoded,
            batch_invariant=batch_invariant,
        )
        part_out, part_lse, whole_lse = decode(query, cache, batch, plan, options, shape, out, interpret)
        combine(plan, part_out, part_lse, options.sinks, shape, out, interpret)
        if return_lse:
            lse = _decode_lse(plan, part_lse, whole_lse, shape, batch, lse)
    return jax.freeze(out), lse


def _decoded(query: Any, cache: KVCache, batch: PagedBatch, batch_invariant: bool) -> int:
    """Requests with up to so many new tokens are decoded; 0 where prefill takes all."""
    hint, group = batch.max_query_len, query.shape[1] // cache.num_kv_heads
    if group > MOST_ROWS:
        return 0
    if hint is not None and hint <= MOST_DECODED and hint * group <= MOST_ROWS and not batch_invariant:
        return hint
    # Which kernel takes a request may depend on nothing else in the batch if its bits may not.
    return 1 if batch_invariant or batch.num_reqs >= FEWEST_DECODED or hint == 1 else 0


def _row_requests(batch: PagedBatch, num_tokens: int) -> tuple[Any, Any]:
    """[num_tokens] int32 each: every row's request, the number of requests for rows of none, and its index in it."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    request = jnp.sum(batch.query_start_loc[1:] <= token[:, None], axis=1, dtype=jnp.int32)
    request = jnp.minimum(request, batch.num_reqs)
    return request, token - batch.query_start_loc[request]


def _prefill_lse(plan: PrefillPlan, tile_lse: Any, shape: PrefillShape, batch: PagedBatch) -> Any:
    """The lse [num_heads, num_tokens] from what prefill left for each tile; anything for rows of no tile."""
    request, index = _row_requests(batch, shape.num_tokens)
    tiling, group = shape.tiling, shape.group
    tile = plan.tile_starts[request] + index // tiling.tokens
    token = index % tiling.tokens
    if not tiling.packed or shape.splits_tokens:
        rows = tile_lse[tile, :, token]  # [num_tokens, heads]
        return rows.T * LN2
    head = jnp.arange(group)
    slot = (head // shape.heads_per_wg) * WG_ROWS + (head % shape.heads_per_wg) * shape.wg_tokens
    rows = tile_lse[tile[:, None], :, slot + token[:, None]]  # [num_tokens, group, num_kv_heads]
    return rows.transpose(2, 1, 0).reshape(-1, shape.num_tokens) * LN2


def _decode_lse(plan: DecodePlan, part_lse: Any, whole_lse: Any, shape: DecodeShape, batch: PagedBatch, others: Any) -> Any:
    """The lse [num_heads, num_tokens] from what decode left, and from `others` for rows that it didn't take."""
    request, index = _row_requests(batch, shape.num_tokens)
    fields = plan.requests[request]
    rows = jnp.clip(index, 0, shape.max_query_len - 1)[:, None] * shape.group + jnp.arange(shape.group)
    first, last = fields[:, field.FIRST_SHARE], fields[:, field.LAST_SHARE]

    def of_rows(by_column: Any) -> Any:
        """[num_tokens, num_kv_heads, columns] to [num_tokens, num_kv_heads, group]."""
        return jnp.take_along_axis(by_column, rows[:, None, :], axis=2)

    share = jnp.arange(shape.num_shares)
    parts = part_lse.reshape(shape.num_shares, 2, shape.dims.num_kv_heads, shape.columns)
    starts, goes_on = parts[:, 0], parts[:, 1]
    inside = (share > first[:, None]) & (share <= last[:, None])
    later = jnp.where(inside[:, :, None, None], goes_on, -jnp.inf)
    peak = jnp.maximum(later.max(1), starts[first])
    shift = jnp.where(peak == -jnp.inf, 0.0, peak)
    total = jnp.exp2(later - shift[:, None]).sum(1) + jnp.exp2(starts[first] - shift)
    merged = jnp.where(total > 0, shift + jnp.log2(total), -jnp.inf)
    whole = whole_lse[jnp.minimum(request, batch.num_reqs - 1)]
    lse = jnp.where((first == last)[:, None, None], whole, merged)
    attends = (fields[:, field.TILES] > 0) & (request < batch.num_reqs)
    lse = jnp.where(attends[:, None, None], of_rows(lse), -jnp.inf)
    lse = lse.reshape(shape.num_tokens, -1).T * LN2
    return lse if others is None else jnp.where(fields[:, field.Q_LEN] < 0, others, lse)
