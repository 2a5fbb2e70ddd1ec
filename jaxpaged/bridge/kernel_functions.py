"""JAX functions that consist of our kernels alone, for `launch.py`: what XLA would compute around them is an argument.

Arguments are arrays, or pytrees of them; options are keywords. Where one says "written in place", the result shares its
memory.
"""

import dataclasses
from typing import Any

import jax

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas import block_copy, cache_write
from jaxpaged.pallas import decode as decoding
from jaxpaged.pallas import merge as merging
from jaxpaged.pallas import prefill as prefilling
from jaxpaged.pallas.block_pairs import BlockPairs
from jaxpaged.pallas.config import decode_config, prefill_config
from jaxpaged.pallas.decode_plan import DecodePlan
from jaxpaged.pallas.decode_plan_kernel import DecodeCut, plan_decode_by_kernel
from jaxpaged.pallas.decode_shape import DecodeShape
from jaxpaged.pallas.prefill_merge import merge_parts
from jaxpaged.pallas.prefill_plan import PrefillPlan, PrefillTiling
from jaxpaged.pallas.prefill_plan_kernel import plan_prefill_by_kernel
from jaxpaged.pallas.prefill_shape import PrefillShape
from jaxpaged.pallas.tuning import Gpu
from jaxpaged.reference.attention import AttentionOptions


def write_rows(cache: KVCache, key: Any, value: Any, slots: Any) -> KVCache:
    """`cache_write.write_rows`: the cache, written in place. Of slots given twice the result is either's, or a mixture.

    Args:
      slots: [n] int32, or [n, 2] int32, the words of int64.
    """
    return cache_write.write_rows(cache, key, value, slots)


def copy_blocks(cache: KVCache, pairs: BlockPairs) -> KVCache:
    """`block_copy.copy_blocks` within a cache, which is written in place."""
    return block_copy.copy_blocks(None, cache, pairs)


def swap_blocks(source: KVCache, target: KVCache, pairs: BlockPairs) -> KVCache:
    """`block_copy.copy_blocks` from a cache into another one, which is written in place."""
    return block_copy.copy_blocks(source, target, pairs)


def plan_decode(
    cache: KVCache, block_table: Any, seq_lens: Any, query_start_loc: Any, num_tokens: Any = None, *, cut: DecodeCut
) -> DecodePlan:
    """`decode_plan_kernel.plan_decode_by_kernel`."""
    batch = PagedBatch(block_table, seq_lens, query_start_loc, None, cut.max_query_len)
    return plan_decode_by_kernel(cache, batch, cut, interpret=None, num_tokens=num_tokens)


def decode(
    query: Any,
    cache: KVCache,
    block_table: Any,
    plan: DecodePlan,
    slopes: Any,
    sinks: Any,
    out: Any,
    lse: Any = None,
    *,
    options: AttentionOptions,
    shape: DecodeShape,
) -> Any:
    """Attention to requests of a plan: the output and lses, written in place.

    Args:
      query: [num_tokens, heads, head_size], of which the first `num_heads` heads count.
      block_table: [num_reqs, columns] int32.
      slopes, sinks: `decode_shape.per_column` of ALiBi's slopes and of sinks, or None.
      options: without arrays.
      out: [num_tokens, num_heads, v_head_size].
      lse: [num_tokens, num_heads] float32 for natural lses, or None.
    """
    num_reqs = plan.requests.shape[0] - 1
    lens = jax.ShapeDtypeStruct(
        (num_reqs,), block_table.dtype
    )  # the plan knows them: nothing reads more than its shape
    batch = PagedBatch(block_table, lens, None, None, shape.max_query_len)
    options = dataclasses.replace(options, alibi_slopes=slopes, sinks=sinks)
    written = jax.new_ref(out)
    lses = None if lse is None else jax.new_ref(lse)
    decoding.decode(query, cache, batch, plan, options, shape, written, None, lse=lses)
    return jax.freeze(written), None if lses is None else jax.freeze(lses)


def decode_shape(
    cache: KVCache,
    *,
    query_dtype: Any,
    num_tokens: int,
    num_heads: int,
    num_reqs: int,
    columns: int,
    max_query_len: int,
    batch_invariant: bool,
    gpu: Gpu,
) -> DecodeShape:
    """What `decode` is compiled for; a cache's shapes are enough."""
    query = jax.ShapeDtypeStruct((num_tokens, num_heads, cache.head_size), query_dtype)
    table, lens = (jax.ShapeDtypeStruct(s, "int32") for s in ((num_reqs, columns), (num_reqs,)))
    batch = PagedBatch(table, lens, None, None, max_query_len)
    return decode_config(query, cache, batch, query.dtype, batch_invariant, max_query_len, gpu)


@dataclasses.dataclass(frozen=True)
class PrefillCut:
    """How a plan of prefill is made: the arguments of `plan_prefill_by_kernel` of the same names."""

    options: AttentionOptions
    tiling: PrefillTiling
    num_tokens: int
    num_heads: int
    shortest: int


def plan_prefill(
    cache: KVCache,
    block_table: Any,
    seq_lens: Any,
    query_start_loc: Any,
    num_reqs: Any,
    num_tokens: Any,
    *,
    cut: PrefillCut,
) -> PrefillPlan:
    """`prefill_plan_kernel.plan_prefill_by_kernel`, of the batch's first requests.

    Args:
      num_reqs, num_tokens: [1] int32, how many there are.
    """
    batch = PagedBatch(block_table, seq_lens, query_start_loc, None, None)
    sizes = {"num_tokens": cut.num_tokens, "num_heads": cut.num_heads, "shortest": cut.shortest}
    there = (num_reqs, num_tokens)
    return plan_prefill_by_kernel(cache, batch, cut.options, cut.tiling, **sizes, interpret=None, there=there)


def prefill(
    query: Any,
    cache: KVCache,
    block_table: Any,
    plan: PrefillPlan,
    slopes: Any,
    sinks: Any,
    out: Any,
    *,
    options: AttentionOptions,
    shape: PrefillShape,
    return_lse: bool,
) -> tuple[Any, Any]:
    """Attention to requests of a plan: the output, written in place, and the lses that `prefill` leaves, or None.

    Args:
      query: [num_tokens, heads, head_size], of which the first `num_heads` heads count.
      block_table: [num_reqs, columns] int32.
      slopes, sinks: [1 or num_reqs, num_heads] and [num_heads] float32, or None.
      options: without arrays.
      out: [num_tokens, num_heads, v_head_size].
    """
    lens = jax.ShapeDtypeStruct(block_table.shape[:1], block_table.dtype)  # the plan knows them
    batch = PagedBatch(block_table, lens, None, None, None)
    options = dataclasses.replace(options, alibi_slopes=slopes, sinks=sinks)
    written = jax.new_ref(out)
    lse, part_out, _ = prefilling.prefill(query, cache, batch, plan, options, shape, written, None)
    if shape.in_parts:
        lse = merge_parts(plan, part_out, lse, sinks, shape, written, None, return_lse=return_lse)
    return jax.freeze(written), lse


def prefill_shape(
    cache: KVCache,
    options: AttentionOptions,
    *,
    query_dtype: Any,
    num_tokens: int,
    num_heads: int,
    num_reqs: int,
    return_lse: bool,
    batch_invariant: bool,
    gpu: Gpu,
) -> PrefillShape:
    """What `prefill` is compiled for; shapes are enough, of a cache and of the arrays of the options."""
    query = jax.ShapeDtypeStruct((num_tokens, num_heads, cache.head_size), query_dtype)
    lens = jax.ShapeDtypeStruct((num_reqs,), "int32")
    batch = PagedBatch(None, lens, None, None, None)
    return prefill_config(query, cache, batch, options, query.dtype, return_lse, batch_invariant, gpu)


def merge_states(outputs: Any, lses: Any) -> tuple[Any, Any]:
    """`merge.merge_attention_states` of states [n, num_tokens, num_heads, width] with lses [n, num_heads, num_tokens]
    float32."""
    return merging.merge_attention_states(outputs, lses)
