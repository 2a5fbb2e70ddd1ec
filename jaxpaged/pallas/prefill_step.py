"""A step of prefill: a tile's scores, online softmax, and its values onto the output."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.fragments import BY_ROW
from jaxpaged.pallas.matmul import dot, dot_onto, transposed
from jaxpaged.pallas.mosaic import Interpreter
from jaxpaged.pallas.paged_tiles import iota, tile_at
from jaxpaged.pallas.prefill_heads import head_slot, of_head_slots, slopes_row
from jaxpaged.pallas.prefill_items import Item
from jaxpaged.pallas.prefill_shape import WG_ROWS, PrefillShape
from jaxpaged.pallas.prefill_state import Memory, Operands, Softmax
from jaxpaged.pallas.ranges import Loop, leading_loops
from jaxpaged.pallas.scores import TilePlace, kept, log2_scores
from jaxpaged.reference.attention import AttentionOptions, attended_range


def take_turn(memory: Memory) -> None:
    """Let the other warpgroup on to the tensor cores, and wait until it lets this one on."""
    plgpu.barrier_arrive(memory.turns)
    plgpu.barrier_wait(memory.turns)


def empty_state(shape: PrefillShape) -> Softmax:
    def by_row(value: float) -> Any:
        return plgpu.layout_cast(jnp.full((WG_ROWS,), value, jnp.float32), BY_ROW)

    sizes = shape.tiles("value").part_sizes
    acc = tuple(plgpu.layout_cast(jnp.zeros((WG_ROWS, n), jnp.float32), plgpu.Layout.WGMMA) for n in sizes)
    return Softmax(by_row(-jnp.inf), by_row(0.0), acc)


def wg_first(shape: PrefillShape) -> Any:
    """Index in the tile of this warpgroup's first token."""
    return lax.axis_index("wg") * WG_ROWS if shape.splits_tokens else jnp.int32(0)


def loops_of(shape: PrefillShape, options: AttentionOptions, item: Item) -> list[Loop]:
    """Ranges of an item's steps and how to treat each: masked or not, and half."""
    size = jnp.int32(shape.tiling.step)
    first_pos = item.first_pos + wg_first(shape)
    last_pos = first_pos + (shape.wg_tokens - 1)
    most_full = jnp.where(item.damaged, 0, item.steps)
    loops, full_end = leading_loops(
        options, first_pos, last_pos, item.kv_len, shape.tiling.step, item.first_step, most_full
    )
    masked_end = item.steps
    if shape.half_steps:
        rows = jnp.minimum(item.rows - wg_first(shape), shape.wg_tokens)
        _, high = attended_range(options, first_pos, first_pos + rows - 1, item.kv_len)
        last_start = (item.first_step + item.steps - 1) * size
        needs_half = (high - last_start <= shape.tiling.step // 2) & (item.steps > full_end) & ~item.damaged
        masked_end -= jnp.where(needs_half, 1, 0)
    loops.append((full_end, masked_end, {"masked": True}))
    if shape.half_steps:
        loops.append((masked_end, item.steps, {"masked": True, "width": shape.tiling.step // 2}))
    return loops


def one_step(
    shape: PrefillShape,
    options: AttentionOptions,
    operands: Operands,
    memory: Memory,
    interpret: Interpreter | None,
    item: Item,
    q_slot: Any,
    q_first: Any,
    k_scale: Any,
    i: Any,
    before: tuple[Softmax, Any],
    *,
    masked: bool = False,
    width: int | None = None,
) -> tuple[Softmax, Any]:
    """One step: scores, online softmax, and the step's values onto the output.

    Args:
      q_slot, q_first: the item's queries, and the first chunk of those of this warpgroup.
      k_scale: what products are multiplied by, above 0; None for 1.
      before: what the steps before left, and this step's place in the ring.
    """
    state, slot = before
    following = jnp.where(slot == shape.stages - 1, 0, slot + 1)
    # Looked up before the products, so that it is there after them.
    listed = None if operands.kept_steps is None else tile_at(operands.kept_steps, item.first_step + i)

    def tile() -> Any:
        return item.first_step + i if listed is None else listed

    keys, values = shape.tiles("key"), shape.tiles("value")
    checked = masked and width is None  # a half step is no damaged request's
    readable: Any = None
    width = width or shape.tiling.step
    size = (WG_ROWS, width)
    q_chunks = [memory.q.tensor_core.at[q_first + c] for c in range(keys.chunks)]
    k_chunks = [transposed(keys.chunk(memory.k, slot, c, width)) for c in range(keys.chunks)]
    pairs = list(zip(q_chunks, k_chunks, strict=True))
    s = dot(pairs, size, interpret, meanwhile=functools.partial(take_turn, memory))
    plgpu.barrier_arrive(memory.k_empty.at[slot])
    # Before the last turn is waited for: the other warpgroup's may need the next item's queries.
    pl.when(i == item.steps - 1)(lambda: plgpu.barrier_arrive(memory.q_empty.at[q_slot]))

    first_pos = tile() * shape.tiling.step
    place = _place(shape, operands, item, first_pos, size)
    s, factor = log2_scores(s, options, place, k_scale)
    if masked:
        s = jnp.where(kept(options, place, item.kv_len), s, -jnp.inf)
    if checked:
        readable = functools.partial(keys.readable, operands.table, item.table_row, tile(), item.kv_len)
        s = lax.cond(item.damaged, lambda s: jnp.where(readable(size, axis=1), s, -jnp.inf), lambda s: s, s)
    peak = jnp.maximum(state.peak, s.max(axis=1) * factor)
    # A row may have nothing to attend to so far: then any finite shift gives exp2(-inf) = 0 where -inf would give NaN.
    shift = jnp.where(peak == -jnp.inf, 0.0, peak) if masked or options.score_mod is not None else peak
    decay = jnp.exp2(state.peak - shift)
    p = jnp.exp2(s * factor - lax.broadcast_in_dim(shift, size, [0]))
    acc = tuple(a * lax.broadcast_in_dim(decay, a.shape, [0]) for a in state.acc)
    total = state.total * decay + p.sum(axis=1)
    p = p.astype(shape.dtype)
    acc, total, peak, p = lax.optimization_barrier((acc, total, peak, p))
    if masked:
        # The first warpgroup clears unused values for both, before it lets the second go ahead.
        plgpu.barrier_wait(memory.v_full.at[slot])
        first = lax.axis_index("wg") == 0
        pl.when(first)(lambda: _clear_unused_values(shape, options, memory, item, first_pos, slot, readable))
    plgpu.barrier_arrive(memory.turns)
    if not masked:
        plgpu.barrier_wait(memory.v_full.at[slot])
    plgpu.barrier_wait(memory.turns)

    def await_next_keys() -> None:
        pl.when(i + 1 < item.steps)(lambda: plgpu.barrier_wait(memory.k_full.at[following]))

    acc = dot_onto(acc, p, values.parts(memory.v, slot, width), interpret, meanwhile=await_next_keys)
    plgpu.barrier_arrive(memory.v_empty.at[slot])
    return Softmax(peak, total, acc), following


def _place(shape: PrefillShape, operands: Operands, item: Item, first_pos: Any, size: tuple[int, int]) -> TilePlace:
    def q_pos() -> Any:
        return (iota(size, 0) & (shape.wg_tokens - 1)) + (item.first_pos + wg_first(shape))

    def kv_pos() -> Any:
        return iota(size, 1) + first_pos

    if not shape.tiling.packed or shape.splits_tokens:
        only = item.head if not shape.tiling.packed else item.head * shape.group
        slope = None if operands.slopes is None else operands.slopes[slopes_row(operands, item), only]
        return TilePlace(item.table_row, lambda: only, q_pos, kv_pos, slope)

    def head() -> Any:
        first = item.head * shape.group + lax.axis_index("wg") * shape.heads_per_wg
        return head_slot(shape, iota(size, 0)) + first

    slope = None
    if operands.slopes is not None:
        slopes = operands.slopes.at[slopes_row(operands, item)]
        slope = of_head_slots(shape, slopes, item.head, lax.axis_index("wg"), size, iota(size, 0))
    return TilePlace(item.table_row, head, q_pos, kv_pos, slope)


def _clear_unused_values(
    shape: PrefillShape,
    options: AttentionOptions,
    memory: Memory,
    item: Item,
    first_pos: Any,
    slot: Any,
    readable: Any,
) -> None:
    """Values of positions that no row attends to may be anything, NaN too, and 0 * NaN is NaN: make them 0."""
    last = item.first_pos + item.rows - 1
    low, high = attended_range(options, item.first_pos, last, item.kv_len)
    values = shape.tiles("value")

    def clear(part: Any, used: Any) -> None:
        v = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where(used, v, jnp.zeros_like(v))

    def clear_unreadable(part: Any, first: int) -> None:
        clear(part, readable(part.shape, axis=0, first=first))

    @pl.when(item.damaged | (first_pos < low) | (first_pos + shape.tiling.step > high))
    def _clear() -> None:
        for first in range(0, shape.tiling.step, WG_ROWS):
            for part in values.parts(memory.v, slot, WG_ROWS, first):
                position = iota(part.shape, 0) + (first_pos + first)
                clear(part, (position >= low) & (position < high))
                if readable is not None:
                    pl.when(item.damaged)(functools.partial(clear_unreadable, part, first))
        plgpu.commit_smem()
