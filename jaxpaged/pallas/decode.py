"""Attention of few new tokens a request to a paged cache: one pass over the cache at the speed of memory.

A CTA works for one kv head on a share of the plan: a run of kv tiles that may span several requests. One warpgroup
brings blocks to shared memory by TMA, into a ring of tiles; the other computes. The rows of a request, its new tokens
times the query heads of the kv head's group, are few, so they are the narrow side of the products: S^T = K Q^T and
O^T = V^T P^T, which take 64 positions by as many rows as there are, to a multiple of 8.

Where several kv heads share a tile, each has its part of the 64: fewer positions of more heads, whose numbers lie side
by side in memory, which is read faster so. Rows are those of all these heads; a score of one's row and another's key
counts as masked.

A request that lies in several shares is put together by the CTA that begins it; see `decode_parts.py`.
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
from jaxpaged.pallas import decode_teams
from jaxpaged.pallas.decode_load import load_all
from jaxpaged.pallas.decode_parts import ring_of_keys, ring_views, take_up
from jaxpaged.pallas.decode_pieces import for_each_piece
from jaxpaged.pallas.decode_plan import DecodePlan
from jaxpaged.pallas.decode_rows import store_piece
from jaxpaged.pallas.decode_shape import DecodeShape, per_column, reduction_bytes, workspace_types
from jaxpaged.pallas.decode_state import Memory, Operands, Piece, Softmax, Turn
from jaxpaged.pallas.decode_step import empty_state, loops_of, one_tile
from jaxpaged.pallas.decode_teams import REGISTERS, first_own, hand_over, merge, own_tiles, summed
from jaxpaged.pallas.eight_bits import scale_operands, scratch, widen_queries
from jaxpaged.pallas.mosaic import (
    Interpreter,
    follow_previous_kernel,
    kernel,
    let_next_kernel_start,
    wait_for_previous_kernel,
)
from jaxpaged.pallas.paged_tiles import CHUNK, split_views, swizzled, two_views
from jaxpaged.reference.attention import AttentionOptions


def decode(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    plan: DecodePlan,
    options: AttentionOptions,
    shape: DecodeShape,
    out: Any,
    interpret: Interpreter | None,
    workspace: Sequence[Any] | None = None,
    lse: Any = None,
) -> Any:
    """Write the rows of requests to `out`, and 0 to rows that attend to nothing.

    Args:
      query: [num_tokens, num_heads, head_size].
      out: a reference to the output [num_tokens, num_heads, v_head_size]; one by request is not cleared.
      workspace: arrays of `workspace_types`, whose memory no one uses who may be at work beside this kernel; needed if
        it overlaps another one.
      lse: a reference to [num_tokens, num_heads] float32, to which all rows' natural lses are written, or None.

    Returns:
      The lses of requests that attend to something [num_reqs, head_groups, columns] in units of log 2.
    """
    slopes, sinks = per_column(options.alibi_slopes, shape), per_column(options.sinks, shape)
    inputs = Operands(
        requests=plan.requests,
        shares=plan.shares,
        kept_tiles=plan.kept_tiles,
        table=batch.block_table,
        query=query,
        key=cache.key,
        value=cache.value,
        **(scale_operands(cache, shape) if shape.quantized else {}),
        slopes=slopes,
        sinks=sinks,
        out=out,
        lse=lse,
    )
    given = {name: x for name, x in inputs._asdict().items() if x is not None}
    results, types = ("parts", "flags", "lse_by_request"), workspace_types(shape, batch.num_reqs)
    if workspace is None and interpret is not None:  # one turn leaves it to the next
        workspace = [lax.empty(x.shape, x.dtype) for x in types]
    refs = [] if workspace is None else [jax.new_ref(x) for x in workspace]

    def run(turn: Turn | None = None) -> Any:
        return kernel(
            functools.partial(_allocate, shape, options, interpret, (*given, *results), turn=turn),
            out_type=types if workspace is None else (),
            grid=(shape.head_groups, shape.num_shares),
            grid_names=("head", "share"),
            num_threads=shape.warpgroups + 1,
            thread_name="wg",
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=reduction_bytes(shape)
            ),
            interpret=interpret,
            kernel_name="paged_decode",
        )(*given.values(), *refs)

    if interpret is None:
        made = run()
        return made[-1] if workspace is None else jax.freeze(refs[-1])
    lax.cond(jnp.any(plan.in_parts()), lambda: tuple(run(Turn.GOING_ON)), tuple)
    run(Turn.BEGINNING)
    return jax.freeze(refs[-1])


def _allocate(
    shape: DecodeShape,
    options: AttentionOptions,
    interpret: Interpreter | None,
    names: Sequence[str],
    *refs: Any,
    turn: Turn | None = None,
) -> None:
    """Allocate shared memory and barriers, and start the warpgroups."""
    operands = Operands(**dict(zip(names, refs, strict=True)), turn=turn)
    keys, values = shape.tiles("key"), shape.tiles("value")

    def run(**refs: Any) -> None:
        if shape.overlaps:
            let_next_kernel_start(interpret)
        else:
            follow_previous_kernel(interpret)
        memory = Memory(**refs)
        k, parts = ring_views(shape, memory, interpret)
        memory = memory._replace(
            q=memory.q if shape.quantized else split_views(memory.q, interpret),
            k=keys.views(k, interpret),
            parts=parts,
            v=values.views(memory.v, interpret),
        )
        wg, n = lax.axis_index("wg"), shape.warpgroups
        pl.when(wg < n)(lambda: _compute(shape, options, operands, _own_memory(shape, memory, wg), interpret))
        pl.when(wg == n)(lambda: load_all(shape, operands, memory, interpret))

    ring = functools.partial(plgpu.Barrier, num_barriers=shape.stages)
    each = () if shape.warpgroups == 1 else (shape.warpgroups,)
    has_row_scales = operands.k_scales is not None
    queries = two_views((2 * keys.chunks, shape.columns, CHUNK), shape.dtype, interpret)
    if shape.quantized:
        queries = plgpu.SMEM((2, shape.columns, shape.dims.head_size), shape.query_dtype)
    pl.run_scoped(
        run,
        q=queries,
        **ring_of_keys(shape, interpret),
        v=values.smem(interpret),
        p=plgpu.SMEM((*each, *reversed(shape.scores)), shape.dtype, transforms=swizzled(shape.dtype)),
        o=plgpu.RefUnion(
            plgpu.SMEM((shape.columns, shape.padded_v_size), shape.out_dtype),
            plgpu.SMEM((shape.padded_v_size, shape.columns), jnp.float32),
        ),
        by_column=plgpu.SMEM((*each, 2, shape.columns), jnp.float32),
        q_full=plgpu.Barrier(num_arrivals=shape.query_copies, num_barriers=2),
        q_empty=plgpu.Barrier(num_arrivals=shape.warpgroups, num_barriers=2),
        k_full=keys.barrier(with_scales=has_row_scales),
        k_empty=ring(),
        v_full=values.barrier(with_scales=has_row_scales),
        v_empty=ring(),
        **(scratch(shape, row_scales=has_row_scales) if shape.quantized else {}),
        **(decode_teams.scratch(shape) if each else {}),
        collective_axes="wg",
    )


def _own_memory(shape: DecodeShape, memory: Memory, wg: Any) -> Memory:
    """What a warpgroup that computes sees of shared memory: its own place where each has one."""
    if shape.warpgroups == 1:
        return memory
    own = {name: getattr(memory, name) for name in ("p", "by_column", "queries", "values", "reductions")}
    return memory._replace(**{name: ref.at[wg] for name, ref in own.items() if ref is not None})


def _compute(
    shape: DecodeShape, options: AttentionOptions, operands: Operands, memory: Memory, interpret: Interpreter | None
) -> None:
    wg, several = lax.axis_index("wg"), shape.warpgroups > 1
    if several:
        plgpu.set_max_registers(REGISTERS[shape.warpgroups][0], action="increase")

    def attend(piece: Piece, pieces: Any, tiles: Any) -> None:
        q_slot = lax.rem(pieces, jnp.int32(2))
        plgpu.barrier_wait(memory.q_full.at[q_slot])
        factors = widen_queries(shape, operands, memory, q_slot, interpret) if shape.quantized else None
        step = functools.partial(one_tile, shape, options, operands, memory, interpret, piece, q_slot, factors, tiles)
        state, loops = empty_state(shape), loops_of(shape, options, piece)
        if several:
            mine = first_own(shape, wg, tiles)
            step = functools.partial(_own_step, shape, step, mine)
            loops = [own_tiles(shape, mine, loop) for loop in loops]
        for first, end, how in loops:
            state = lax.fori_loop(first, end, functools.partial(step, **how), state)
        if not shape.quantized:
            plgpu.barrier_arrive(memory.q_empty.at[q_slot])
        own = summed(shape, memory, state, interpret)
        own = take_up(shape, operands, memory, piece, tiles + piece.count, wg, own, interpret)
        store = functools.partial(store_piece, shape, operands, memory, piece, interpret)
        if several:
            pl.when(wg > 0)(lambda: hand_over(shape, memory, wg, pieces, own))
            pl.when(wg == 0)(lambda: store(merge(shape, memory, own)))
        else:
            store(own)

    pieces, _, _ = for_each_piece(shape, operands, attend)
    if several:
        pl.when((wg > 0) & (pieces > 0))(lambda: plgpu.barrier_wait(memory.taken))
    plgpu.wait_smem_to_gmem(0)
    if shape.overlaps:
        wait_for_previous_kernel(interpret)


def _own_step(shape: DecodeShape, step: Any, first: Any, i: Any, state: Softmax, **how: Any) -> Softmax:
    """A step of a warpgroup's own ones, the first of which is the piece's `first`."""
    return step(first + i * shape.warpgroups, state, **how)
