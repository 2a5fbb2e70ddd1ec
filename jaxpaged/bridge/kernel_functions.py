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
from jaxpaged.pallas import combine as combining
from jaxpaged.pallas import decode as decoding
from jaxpaged.pallas.block_pairs import BlockPairs
from jaxpaged.pallas.config import decode_config
from jaxpaged.pallas.decode import DecodeShape
from jaxpaged.pallas.decode_plan import DecodePlan
from jaxpaged.pallas.decode_plan_kernel import DecodeCut, plan_decode_by_kernel
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


def plan_decode(cache: KVCache, block_table: Any, seq_lens: Any, query_start_loc: Any, *, cut: DecodeCut) -> DecodePlan:
    """`decode_plan_kernel.plan_decode_by_kernel`."""
    batch = PagedBatch(block_table, seq_lens, query_start_loc, None, cut.max_query_len)
    return plan_decode_by_kernel(cache, batch, cut, interpret=None)


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
      slopes, sinks: `decode.per_column` of ALiBi's slopes and of sinks, or None.
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
    part_out, part_lse, whole_lse = decoding.decode(query, cache, batch, plan, options, shape, written, None)
    combining.combine(plan, part_out, part_lse, sinks, shape, written, None, whole_lse=whole_lse, lse=lses)
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
