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
from jaxpaged.pallas.prefill import prefill
from jaxpaged.pallas.prefill_plan import plan_prefill
from jaxpaged.pallas.prefill_rows import merged_parts, row_requests, rows_of_tiles
from jaxpaged.pallas.scores import LN2
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
    lse = prefilled = None
    if not all_decoded:
        tiles = prefill_config(query, cache, batch, options, out_dtype, return_lse, batch_invariant)
        prefill_plan = plan_prefill(
            cache, batch, options, tiles.tiling, num_tokens=num_tokens, num_heads=num_heads, shortest=longest + 1
        )
        tile_lse, part_out = prefill(query, cache, batch, prefill_plan, options, tiles, out, interpret)
        if tiles.in_parts:
            prefilled, lse = merged_parts(prefill_plan, part_out, tile_lse, options.sinks, tiles, batch)
        elif return_lse:
            lse = rows_of_tiles(prefill_plan, tile_lse, tiles, batch)[:, 0].T * LN2
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
    result = jax.freeze(out)
    if prefilled is not None:
        decoded = jnp.zeros((), jnp.bool_) if longest == 0 else plan.requests[row_requests(batch, num_tokens)[0], field.Q_LEN] >= 0
        result = jnp.where(decoded.reshape(-1, 1, 1), result, prefilled.astype(out_dtype))
    return result, lse


def _decoded(query: Any, cache: KVCache, batch: PagedBatch, batch_invariant: bool) -> int:
    """Requests with up to so many new tokens are decoded; 0 where prefill takes all."""
    hint, group = batch.max_query_len, query.shape[1] // cache.num_kv_heads
    if group > MOST_ROWS:
        return 0
    if hint is not None and hint <= MOST_DECODED and hint * group <= MOST_ROWS and not batch_invariant:
        return hint
    # Which kernel takes a request may depend on nothing else in the batch if its bits may not.
    return 1 if batch_invariant or batch.num_reqs >= FEWEST_DECODED or hint == 1 else 0


def _decode_lse(plan: DecodePlan, part_lse: Any, whole_lse: Any, shape: DecodeShape, batch: PagedBatch, others: Any) -> Any:
    """The lse [num_heads, num_tokens] from what decode left, and from `others` for rows that it didn't take."""
    request, index = row_requests(batch, shape.num_tokens)
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
