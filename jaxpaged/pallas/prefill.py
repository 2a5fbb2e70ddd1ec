"""Attention of many new tokens a request to a paged cache, at the rate of the tensor cores.

Persistent CTAs walk through the items of a plan: 128 rows of queries, the tokens of one query head or fewer tokens of
all heads of a kv head. Two warpgroups compute 64 rows each and take turns on the tensor cores, one multiplying while
the other does its softmax (FlashAttention-3, Shah et al., 2024); a third brings queries, keys and values by TMA, each
from a warp of its own, and runs ahead into the next item. For 8-bit caches a fourth stands between it and the others,
and widens what comes (`prefill_widen.py`).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas import prefill_plan as field
from jaxpaged.pallas.mosaic import Interpreter, kernel, let_next_kernel_start
from jaxpaged.pallas.paged_tiles import CHUNK, split_views, two_views
from jaxpaged.pallas.prefill_items import Visit, for_each_item
from jaxpaged.pallas.prefill_load import load_all
from jaxpaged.pallas.prefill_plan import PrefillPlan
from jaxpaged.pallas.prefill_shape import WG_ROWS, PrefillShape
from jaxpaged.pallas.prefill_state import Memory, Operands
from jaxpaged.pallas.prefill_step import empty_state, loops_of, one_step, take_turn
from jaxpaged.pallas.prefill_store import store_rows
from jaxpaged.pallas.prefill_widen import positive_scale, scale_of_item, scale_operands, scratch, widen
from jaxpaged.reference.attention import AttentionOptions


def prefill(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    plan: PrefillPlan,
    options: AttentionOptions,
    shape: PrefillShape,
    out: Any,
    interpret: Interpreter | None,
    reserve: Sequence[Any] = (),
) -> tuple[Any, Any, list[Any]]:
    """Write the rows of the plan's requests to `out`, a reference to [num_tokens, num_heads, v_head_size].

    Args:
      reserve: types of arrays for a kernel that starts before this one has ended: XLA gives such a kernel's own results
        memory that this one may still use, but not what it takes for results of this one.

    Returns:
      The lses in units of log 2 [most tiles * most parts, heads of the plan, 2 * WG_ROWS] float32, and the outputs
      [most tiles * most parts, heads of the plan, 2 * WG_ROWS, v_head_size] float32 of a plan in parts, which leaves
      `out` alone; each None unless asked for; and what is reserved, in which nothing is written.
    """
    heads = shape.dims.num_kv_heads * (1 if shape.tiling.packed else shape.group)
    most = field.most_tiles(shape.num_tokens, batch.num_reqs, shape.tiling) * shape.tiling.most_parts
    slopes, sinks = (None if x is None else x.astype(jnp.float32) for x in (options.alibi_slopes, options.sinks))
    slopes = None if slopes is None else slopes.reshape(-1, slopes.shape[-1])
    sinks = None if shape.in_parts else sinks  # they take part once, in the merged state
    given = Operands(
        plan.work,
        plan.counts,
        plan.kept_steps,
        batch.block_table,
        query,
        cache.key,
        cache.value,
        **(scale_operands(cache) if shape.quantized else {}),
        slopes=slopes,
        sinks=sinks,
        out=out,
    )
    out_type = {}
    if shape.return_lse:
        out_type["lse"] = jax.ShapeDtypeStruct((most, heads, 2 * WG_ROWS), jnp.float32)
    if shape.in_parts:
        parts = (most, heads, 2 * WG_ROWS, shape.padded_v_size)
        out_type["part_out"] = jax.ShapeDtypeStruct(parts, jnp.float32)
    names = [name for name, x in given._asdict().items() if x is not None]
    results = kernel(
        functools.partial(_allocate, shape, options, interpret, names + list(out_type)),
        out_type=[*out_type.values(), *reserve],
        grid=(shape.tiling.num_ctas,),
        grid_names=("cta",),
        num_threads=4 if shape.quantized else 3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="paged_prefill",
    )(*(x for x in given if x is not None))
    by_name = dict(zip(out_type, results, strict=False))
    return by_name.get("lse"), by_name.get("part_out"), list(results[len(out_type) :])


def _allocate(
    shape: PrefillShape, options: AttentionOptions, interpret: Interpreter | None, names: Sequence[str], *refs: Any
) -> None:
    """Allocate shared memory and barriers, and start the warpgroups."""
    operands = Operands(**dict(zip(names, refs, strict=False)))  # what is reserved comes last
    keys, values = shape.tiles("key"), shape.tiles("value")

    def run(**refs: Any) -> None:
        let_next_kernel_start(interpret)
        memory = Memory(**refs)
        memory = memory._replace(
            q=split_views(memory.q, interpret),
            o=split_views(memory.o, interpret),
            k=keys.views(memory.k, interpret),
            v=values.views(memory.v, interpret),
        )
        wg = lax.axis_index("wg")
        pl.when(wg < 2)(lambda: _compute(shape, options, operands, memory, interpret))
        pl.when(wg == 2)(lambda: load_all(shape, operands, memory, interpret))
        if shape.quantized:
            pl.when(wg == 3)(lambda: widen(shape, operands, memory, interpret))

    # A copy fills a slot of heads of one chunk.
    q_copies = keys.chunks * sum(len(shape.head_slots(wg)) for wg in range(2))
    barriers = functools.partial(plgpu.Barrier, num_arrivals=2)
    optional: dict[str, Any] = {"lse": [plgpu.SMEM((WG_ROWS,), jnp.float32)] * 2} if shape.return_lse else {}
    widened = plgpu.Barrier(num_barriers=shape.stages)
    if shape.quantized:
        optional |= scratch(shape, interpret)
    pl.run_scoped(
        run,
        q=two_views((shape.q_stages * 2 * keys.chunks, WG_ROWS, CHUNK), shape.dtype, interpret),
        o=two_views((2 * shape.o_slots, WG_ROWS, shape.o_chunk), shape.out_dtype, interpret),
        k=keys.smem(interpret),
        v=values.smem(interpret),
        q_full=plgpu.Barrier(num_arrivals=q_copies, num_barriers=shape.q_stages),
        q_empty=barriers(num_barriers=shape.q_stages),
        k_full=widened if shape.quantized else keys.barrier(),
        k_empty=barriers(num_barriers=shape.stages),
        v_full=widened if shape.quantized else values.barrier(),
        v_empty=barriers(num_barriers=shape.stages),
        turns=barriers(),
        **optional,
        collective_axes="wg",
    )


def _compute(
    shape: PrefillShape, options: AttentionOptions, operands: Operands, memory: Memory, interpret: Interpreter | None
) -> None:
    plgpu.set_max_registers(shape.registers[0], action="increase")
    wg = lax.axis_index("wg")
    pl.when(wg == 1)(lambda: take_turn(memory))  # the second warpgroup lets the first go ahead

    def attend(visit: Visit) -> None:
        item = visit.item
        q_slot, slot = lax.rem(visit.queries, jnp.int32(shape.q_stages)), lax.rem(visit.steps, jnp.int32(shape.stages))
        pl.when(item.steps > 0)(lambda: plgpu.barrier_wait(memory.q_full.at[q_slot]))
        pl.when(item.steps > 0)(lambda: plgpu.barrier_wait(memory.k_full.at[slot]))
        # Mosaic asks the hardware for the warpgroup's number wherever it is used: in a step, that delays the products.
        q_first = (q_slot * 2 + wg) * shape.tiles("key").chunks
        k_scale = None if operands.k_scale is None else positive_scale(scale_of_item(shape, operands.k_scale, item))
        given = (item, q_slot, q_first, k_scale)
        step = functools.partial(one_step, shape, options, operands, memory, interpret, *given)
        carry = (empty_state(shape), slot)
        for first, end, how in loops_of(shape, options, item):
            carry = lax.fori_loop(first, end, functools.partial(step, **how), carry)
        state, _ = carry
        store_rows(shape, operands, memory, item, visit.index, state)

    for_each_item(shape, operands, attend)
    pl.when(wg == 0)(lambda: take_turn(memory))
    plgpu.wait_smem_to_gmem(0)
