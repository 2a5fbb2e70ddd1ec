"""Paged attention by the Pallas kernels: what they take, which of them a batch needs, and the calls."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas import decode_plan as field
from jaxpaged.pallas.cascade import (
    attend_to_prefix,
    merged_with_prefix,
    prefix_shape,
    sees_all_of_a_prefix,
    shared_prefix,
)
from jaxpaged.pallas.chunks import chunk_refusal, in_chunks
from jaxpaged.pallas.config import decode_config, most_decoded_rows, prefill_config, prefill_fits
from jaxpaged.pallas.decode import decode
from jaxpaged.pallas.decode_plan import DecodePlan
from jaxpaged.pallas.decode_rows import attending_rows, decoded_lse, rows_of_requests
from jaxpaged.pallas.decode_shape import DecodeShape, per_column, workspace_types
from jaxpaged.pallas.eight_bits import has_row_scales, scale_refusal
from jaxpaged.pallas.functions import function_refusal
from jaxpaged.pallas.mosaic import Interpreter
from jaxpaged.pallas.plans import plan_decode, plan_prefill
from jaxpaged.pallas.prefill import prefill
from jaxpaged.pallas.prefill_merge import merge_parts
from jaxpaged.pallas.prefill_plan import PrefillPlan
from jaxpaged.pallas.prefill_rows import row_requests, rows_of_tiles
from jaxpaged.pallas.prefill_shape import PrefillShape
from jaxpaged.pallas.scores import LN2
from jaxpaged.pallas.tuning import Gpu, gpu_of
from jaxpaged.reference.attention import AttentionOptions

MOST_DECODED = 8
"""Most new tokens of a request that decode is compiled for."""
FEWEST_DECODED = 8
"""With fewer requests in a batch with long ones, prefill takes short ones, too: another kernel would take longer."""
DTYPES = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16))


def refusal(query: Any, cache: KVCache, batch: PagedBatch, options: AttentionOptions, out_dtype: Any) -> str | None:
    """Why the kernels can't take a call that `paged_attention` found right, or None."""
    if query.dtype not in DTYPES:
        return f"the kernels take queries of bfloat16 and float16, not {jnp.dtype(query.dtype).name}"
    if out_dtype not in DTYPES:
        return f"the kernels write outputs of bfloat16 and float16, not {out_dtype.name}"
    if cache.quantized:
        reason = _quantized_refusal(query, cache, batch, options, out_dtype)
        if reason is not None:
            return reason
    elif cache.dtype != query.dtype:
        return (
            f"the kernels take 8-bit caches and ones of the query's dtype, {query.dtype.name}, not {cache.dtype.name}"
        )
    if "x" in cache.layout.axes("key") or any(cache.layout.axes(w)[-1] == "s" for w in ("key", "value")):
        return f"the kernels need the elements of a head side by side, which layout {cache.layout.name} does not have"
    if math.gcd(cache.block_size, 64) < 8:
        return f"the kernels take blocks of a multiple of 8 tokens, not {cache.block_size}"
    sizes = (cache.head_size, cache.v_head_size)
    if max(sizes) > 256 or any(size * cache.dtype.itemsize % 16 for size in sizes):
        return f"the kernels take heads of up to 256 elements and a multiple of 16 bytes, not {sizes}"
    reason = function_refusal(options)
    if reason is not None:
        return reason
    if 0 in (query.shape[0], batch.num_reqs, batch.max_blocks_per_req, cache.num_blocks):
        return "there is nothing to compute"
    return None


def prefill_takes(query: Any, cache: KVCache, out_dtype: Any) -> bool:
    """Whether prefill takes the cache; decode takes long queries in chunks otherwise."""
    return cache_refusal(query.dtype, cache, out_dtype) is None


def cache_refusal(query_dtype: Any, cache: KVCache, out_dtype: Any) -> str | None:
    """Why prefill can't take a cache that the kernels take, or None."""
    if not cache.quantized:
        return None
    if has_row_scales(cache):
        return (
            "k_scale, v_scale: scales per token and head are taken by decode alone, in batches known to have few new "
            "tokens a request; prefill takes scales per tensor or kv head"
        )
    if not prefill_fits(query_dtype, cache, out_dtype):
        return (
            f"head_size: prefill has no room in shared memory for 8-bit heads of {cache.head_size} and "
            f"{cache.v_head_size}, which decode alone takes, in batches known to have few new tokens a request"
        )
    return None


def _quantized_refusal(
    query: Any, cache: KVCache, batch: PagedBatch, options: AttentionOptions, out_dtype: Any
) -> str | None:
    if any(size % 64 for size in (cache.head_size, cache.v_head_size)):
        return f"the kernels take 8-bit heads of a multiple of 64 elements, not {cache.head_size}, {cache.v_head_size}"
    most_rows = most_decoded_rows(cache)
    if query.shape[1] // cache.num_kv_heads > most_rows:
        return f"the kernels take 8-bit caches like this one with up to {most_rows} query heads a kv head"
    longest = decoded_lens(query, cache, batch, batch_invariant=False)
    long = batch.max_query_len is None or batch.max_query_len > longest
    if long and not prefill_takes(query, cache, out_dtype):
        reason = chunk_refusal(options)
        if reason is not None:
            return f"the kernels don't take {reason}"
    return scale_refusal(query.dtype, cache)


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
    gpu: Gpu | None = None,
    plan_by_kernel: bool = False,
) -> tuple[Any, Any]:
    """`jaxpaged.paged_attention` on arguments that nothing refuses; the lse is None unless asked for.

    Args:
      gpu: what it is compiled for; the default one when None.
      plan_by_kernel: whether plans are made by kernels, as far as these can, and not by XLA; see `plans.py`.
    """
    gpu = gpu or gpu_of()
    planner: dict[str, Any] = {"by_kernel": plan_by_kernel, "interpret": interpret}
    num_tokens, num_heads, _ = query.shape
    longest = decoded_lens(query, cache, batch, batch_invariant)
    all_decoded = batch.max_query_len is not None and batch.max_query_len <= longest
    if not all_decoded and not prefill_takes(query, cache, out_dtype):
        group = num_heads // cache.num_kv_heads
        most_rows = most_decoded_rows(cache)
        chunk = 1 if batch_invariant else next(n for n in (MOST_DECODED, 4, 2, 1) if n * group <= most_rows)
        chunks = in_chunks(cache, batch, chunk, num_tokens=num_tokens, causal=options.causal)
        how = {"out_dtype": out_dtype, "batch_invariant": batch_invariant, "return_lse": return_lse, "gpu": gpu}
        how["plan_by_kernel"] = plan_by_kernel
        return paged_attention(query, cache, chunks, options, interpret=interpret, **how)
    cascades = all_decoded and not batch_invariant and cache.dtype == query.dtype and sees_all_of_a_prefix(options)
    if batch.shares_prefix and cascades:
        return _cascade(query, cache, batch, options, longest, out_dtype, interpret, gpu)
    plan: Any = None
    shape: Any = None
    tiles: Any = None
    prefill_plan: Any = None
    if longest > 0:
        shape = decode_config(query, cache, batch, out_dtype, batch_invariant, longest, gpu)
        shape = dataclasses.replace(shape, overlaps=not all_decoded)
        kind = {"others_elsewhere": not all_decoded, "batch_invariant": batch_invariant}
        plan = _plan_decode(cache, batch, options, shape, **kind, **planner)
    if not all_decoded:
        tiles = prefill_config(query, cache, batch, options, out_dtype, return_lse, batch_invariant, gpu)
        sizes = {"num_tokens": num_tokens, "num_heads": num_heads, "shortest": longest + 1}
        prefill_plan = plan_prefill(cache, batch, options, tiles.tiling, **sizes, **planner)
    out = jax.new_ref(lax.empty((num_tokens, num_heads, cache.v_head_size), out_dtype))
    if prefill_plan is None:
        lse = _decode(query, cache, batch, plan, options, shape, out, return_lse, interpret)
        return jax.freeze(out), lse.T * LN2 if return_lse else None
    return _prefill_and_decode(
        query, cache, batch, options, (plan, prefill_plan), (shape, tiles), out, return_lse, interpret
    )


def _prefill_and_decode(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    plans: tuple[DecodePlan | None, PrefillPlan],
    shapes: tuple[DecodeShape | None, PrefillShape],
    out: Any,
    return_lse: bool,
    interpret: Interpreter | None,
) -> tuple[Any, Any]:
    """A batch with requests of many new tokens, and perhaps some of few that decode takes."""
    shape, tiles = shapes
    by_head = (options.alibi_slopes, options.sinks)
    by_column = [None if x is None or shape is None else per_column(x, shape) for x in by_head]
    # What decode takes is there before prefill. So it follows at once: its first CTAs start where prefill's last ones
    # have ended, and wait for nothing.
    (plan, prefill_plan), (slopes, sinks) = lax.optimization_barrier((plans, by_column))
    reserve = () if shape is None else workspace_types(shape, batch.num_reqs)
    tile_lse, part_out, workspace = prefill(query, cache, batch, prefill_plan, options, tiles, out, interpret, reserve)
    short_lse: Any = None
    if shape is not None:
        given = dataclasses.replace(options, alibi_slopes=slopes, sinks=sinks)
        short_lse = _decode(query, cache, batch, plan, given, shape, out, return_lse, interpret, workspace)
    if tiles.in_parts:
        parts = (prefill_plan, part_out, tile_lse, options.sinks, tiles, out, interpret)
        tile_lse = merge_parts(*parts, return_lse=return_lse)
    lse: Any = rows_of_tiles(prefill_plan, tile_lse, tiles, batch).T * LN2 if return_lse else None
    if return_lse and shape is not None:
        decoded = plan.requests[row_requests(batch, query.shape[0])[0], field.Q_LEN] >= 0
        lse = jnp.where(decoded, short_lse.T * LN2, lse)
    return jax.freeze(out), lse


def _plan_decode(
    cache: KVCache, batch: PagedBatch, options: AttentionOptions, shape: DecodeShape, **how: Any
) -> DecodePlan:
    return plan_decode(
        cache,
        batch,
        options,
        num_tokens=shape.num_tokens,
        num_heads=shape.group * shape.head_groups,
        max_query_len=shape.max_query_len,
        tile=shape.tile,
        num_shares=shape.num_shares,
        min_tiles=shape.fewest_tiles,
        **how,
    )


def _decode(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    plan: DecodePlan,
    options: AttentionOptions,
    shape: DecodeShape,
    out: Any,
    return_lse: bool,
    interpret: Interpreter | None,
    workspace: Any = None,
) -> Any:
    """Write what decode is to do to `out`; return the lses [num_tokens, num_heads] in units of log 2 if asked for."""
    lse_by_request = decode(query, cache, batch, plan, options, shape, out, interpret, workspace)
    return decoded_lse(plan, lse_by_request, shape, batch) if return_lse else None


def _cascade(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    max_query_len: int,
    out_dtype: Any,
    interpret: Interpreter | None,
    gpu: Gpu,
) -> tuple[Any, Any]:
    """Attention to the prefix that all requests share, to the rest of each, and the merge of both; see `cascade.py`."""
    # Rounded before the merge, too, results would be wrong in their last bit more often: decode leaves float32.
    shape = decode_config(query, cache, batch, out_dtype, False, max_query_len, gpu)
    shape = dataclasses.replace(shape, by_request=True)
    tiles = prefix_shape(query, cache, options, gpu)
    prefix = shared_prefix(cache, batch, math.lcm(shape.tile, tiles.tiling.step))
    by_request = (batch.num_reqs, shape.head_groups, shape.padded_v_size, shape.columns)
    out = jax.new_ref(lax.empty(by_request, jnp.float32))
    part_lse, part_out = attend_to_prefix(query, cache, prefix, options, tiles, interpret)
    kind = {"others_elsewhere": False, "batch_invariant": False, "skip": prefix.tokens}
    plan = _plan_decode(cache, batch, options, shape, by_kernel=False, interpret=interpret, **kind)
    without_sinks = dataclasses.replace(options, sinks=None)
    lse = _decode(query, cache, batch, plan, without_sinks, shape, out, True, interpret)
    rest = rows_of_requests(jax.freeze(out)[:, :, : cache.v_head_size], shape, batch).swapaxes(2, 3)
    rest = rest.reshape(*query.shape[:2], cache.v_head_size)
    attends = attending_rows(plan, shape, batch)
    result, lse = merged_with_prefix(part_lse, part_out, tiles, lse, rest, attends, options.sinks)
    return result.astype(out_dtype), lse


def most_decoded_lens(cache: KVCache, num_heads: int) -> int:
    """The most new tokens a request that decode takes, if no request has more; 0 for none."""
    return min(MOST_DECODED, most_decoded_rows(cache) // (num_heads // cache.num_kv_heads))


def decoded_lens(query: Any, cache: KVCache, batch: PagedBatch, batch_invariant: bool) -> int:
    """Requests with up to so many new tokens are decoded; 0 where prefill takes all."""
    hint, group = batch.max_query_len, query.shape[1] // cache.num_kv_heads
    most_rows = most_decoded_rows(cache)
    if group > most_rows:
        return 0
    if hint is not None and hint <= MOST_DECODED and hint * group <= most_rows and not batch_invariant:
        return hint
    # Which kernel takes a request may depend on nothing else in the batch if its bits may not.
    return 1 if batch_invariant or batch.num_reqs >= FEWEST_DECODED or hint == 1 else 0
