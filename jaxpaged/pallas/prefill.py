"""Attention of many new tokens a request to a paged cache, at the rate of the tensor cores.

Persistent CTAs walk through the items of a plan: 128 rows of queries, the tokens of one query head or fewer tokens of
all heads of a kv head. Two warpgroups compute 64 rows each and take turns on the tensor cores, one multiplying while
the other does its softmax (FlashAttention-3, Shah et al., 2024); a third brings queries, keys and values by TMA, each
from a warp of its own, and runs ahead into the next item. For 8-bit caches a fourth stands between it and the others,
and widens what comes (`prefill_widen.py`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import QUANTIZED_DTYPES, KVCache
from jaxpaged.metadata.layout import CacheDims, KVLayout
from jaxpaged.pallas import prefill_plan as field
from jaxpaged.pallas.fragments import BY_ROW
from jaxpaged.pallas.matmul import dot, dot_onto, transposed
from jaxpaged.pallas.mosaic import Interpreter, drain, kernel, let_next_kernel_start, one_warp_each, store
from jaxpaged.pallas.paged_tiles import (
    CHUNK,
    PagedTiles,
    Span,
    Stream,
    chunk_columns,
    chunk_slice,
    iota,
    load_tiles,
    split_views,
    tile_at,
    two_views,
)
from jaxpaged.pallas.prefill_items import Item, Visit, for_each_item, kv_head
from jaxpaged.pallas.prefill_plan import PrefillPlan, PrefillTiling
from jaxpaged.pallas.prefill_widen import positive_scale, scale_of_item, scale_operands, scratch, widen
from jaxpaged.pallas.ranges import Loop, leading_loops
from jaxpaged.pallas.scores import TilePlace, kept, log2_scores, normalized, with_sink
from jaxpaged.reference.attention import AttentionOptions, attended_range

WG_ROWS = 64
"""Rows of a warpgroup: what one wgmma computes."""


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """What a prefill kernel is compiled for.

    Attributes:
      dtype: of the queries, and of the products.
      cache_dtype, buffer_dtype: of the numbers in the cache, and of the buffers that hold them.
      group: query heads a kv head.
      stages, q_stages: slots of the ring of keys and values, and of queries.
      narrow_stages: slots of the ring of 8-bit keys and values.
      o_slots: chunks of a warpgroup's output that leave shared memory together.
      half_steps: whether the last step is a half where a warpgroup's rows need no more.
      registers: of a thread that computes, of one that loads, and of one that widens if there are such.
      windowed: whether an item may begin past its request's first step, for a window or for a part.
      in_parts: whether results go to a workspace, in float32, since tiles are split among CTAs.
    """

    layout: KVLayout
    dims: CacheDims
    dtype: Any
    cache_dtype: Any
    buffer_dtype: Any
    out_dtype: Any
    num_tokens: int
    group: int
    tiling: PrefillTiling
    stages: int
    q_stages: int
    narrow_stages: int
    o_slots: int
    half_steps: bool
    registers: tuple[int, ...]
    windowed: bool
    return_lse: bool
    in_parts: bool

    def tiles(self, which: Any) -> PagedTiles:
        return PagedTiles(which, self.layout, self.dims, self.dtype, self.tiling.step, self.stages)

    def narrow_tiles(self, which: Any) -> PagedTiles:
        """Tiles of 8-bit numbers, as they come."""
        return PagedTiles(which, self.layout, self.dims, self.buffer_dtype, self.tiling.step, self.narrow_stages)

    @property
    def quantized(self) -> bool:
        return self.cache_dtype in QUANTIZED_DTYPES

    @property
    def padded_v_size(self) -> int:
        return self.tiles("value").chunks * CHUNK

    @property
    def o_chunk(self) -> int:
        """Columns of a chunk of the output."""
        return chunk_columns(self.out_dtype)

    @property
    def o_chunks(self) -> int:
        return -(-self.dims.v_head_size // self.o_chunk)

    @property
    def wg_tokens(self) -> int:
        """Tokens of a warpgroup's rows."""
        return min(self.tiling.tokens, WG_ROWS)

    @property
    def heads_per_wg(self) -> int:
        """Query heads of a warpgroup's rows: head by head, the tokens of each."""
        return WG_ROWS // self.wg_tokens

    @property
    def splits_tokens(self) -> bool:
        """Whether the second warpgroup has the tile's later tokens, or else its other heads."""
        return self.tiling.tokens == 2 * WG_ROWS

    def head_slots(self, wg: int) -> list[int]:
        """Index in the group of the query head of each of a warpgroup's slots; some slots may stay empty."""
        if not self.tiling.packed or self.splits_tokens:
            return [0]
        heads = [wg * self.heads_per_wg + slot for slot in range(self.heads_per_wg)]
        return [head for head in heads if head < self.group]


class Operands(NamedTuple):
    """References to global memory."""

    work: Any = None
    counts: Any = None
    kept_steps: Any = None
    table: Any = None
    query: Any = None
    key: Any = None
    value: Any = None
    k_scale: Any = None
    v_scale: Any = None
    slopes: Any = None
    sinks: Any = None
    out: Any = None
    lse: Any = None
    part_out: Any = None


class Memory(NamedTuple):
    """Shared memory and barriers of a CTA."""

    q: Any = None
    o: Any = None
    lse: Any = None
    k: Any = None
    v: Any = None
    q_full: Any = None
    q_empty: Any = None
    k_full: Any = None
    k_empty: Any = None
    v_full: Any = None
    v_empty: Any = None
    narrow_k: Any = None
    narrow_v: Any = None
    narrow_k_full: Any = None
    narrow_k_empty: Any = None
    narrow_v_full: Any = None
    narrow_v_empty: Any = None
    turns: Any = None


class Softmax(NamedTuple):
    """Running maximum and sum of each row, and its output by pieces of the head."""

    peak: Any
    total: Any
    acc: tuple[Any, ...]


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
        pl.when(wg == 2)(lambda: _load(shape, operands, memory, interpret))
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


# The warpgroup that loads.


def _load(shape: PrefillShape, operands: Operands, memory: Memory, interpret: Interpreter | None) -> None:
    plgpu.set_max_registers(shape.registers[1], action="decrease")
    value = operands.key if operands.value is None else operands.value
    if shape.quantized:
        k_ring, v_ring = shape.narrow_tiles("key"), shape.narrow_tiles("value")
        keys = Stream(k_ring, operands.key, memory.narrow_k, memory.narrow_k_full, memory.narrow_k_empty)
        values = Stream(v_ring, value, memory.narrow_v, memory.narrow_v_full, memory.narrow_v_empty)
    else:
        keys = Stream(shape.tiles("key"), operands.key, memory.k, memory.k_full, memory.k_empty)
        values = Stream(shape.tiles("value"), value, memory.v, memory.v_full, memory.v_empty)

    def load(*streams: Stream) -> None:
        for_each_item(shape, operands, lambda visit: _load_tiles(shape, operands, streams, visit))

    def load_queries() -> None:
        for_each_item(shape, operands, lambda visit: _load_queries(shape, operands, memory, visit))

    def load_in_turn() -> None:
        def load_item(visit: Visit) -> None:
            _load_queries(shape, operands, memory, visit)
            _load_tiles(shape, operands, (keys, values), visit)

        loaded, steps = for_each_item(shape, operands, load_item)
        drain(memory.q_empty, loaded, shape.q_stages)
        for stream in (keys, values):
            drain(stream.empty, steps, stream.tiles.stages)

    if interpret is not None:  # it runs warps one after the other
        load_in_turn()
    else:
        one_warp_each(lambda: load(keys), lambda: load(values), load_queries)


def _load_tiles(shape: PrefillShape, operands: Operands, streams: Sequence[Stream], visit: Visit) -> None:
    """Bring an item's keys, values or both, when there is room in the ring."""
    item = visit.item
    span = Span(item.table_row, item.kv_len, kv_head(shape, item), item.first_step, item.steps, operands.kept_steps)
    load_tiles(streams, operands.table, span, visit.steps)


def _load_queries(shape: PrefillShape, operands: Operands, memory: Memory, visit: Visit) -> None:
    item, before = visit.item, visit.queries
    pl.when(item.steps > 0)(lambda: _load_item_queries(shape, operands, memory, item, before))


def _load_item_queries(shape: PrefillShape, operands: Operands, memory: Memory, item: Item, before: Any) -> None:
    """Bring an item's queries, when the item before the last one has no more use for its own."""
    chunks = shape.tiles("key").chunks
    slot = lax.rem(before, jnp.int32(shape.q_stages))
    pl.when(before >= shape.q_stages)(lambda: plgpu.barrier_wait(memory.q_empty.at[slot]))
    for wg in range(2):
        first = item.first_row + (wg * WG_ROWS if shape.splits_tokens else 0)
        # Rows past a request's are another's, or zeros past the query's end: their results are not stored.
        rows = pl.ds(jnp.minimum(first, shape.num_tokens - 1), shape.wg_tokens)
        for place, head in enumerate(shape.head_slots(wg)):
            q_head = item.head * shape.group + head if shape.tiling.packed else item.head
            slots = pl.ds(place * shape.wg_tokens, shape.wg_tokens)
            for c in range(chunks):
                source = operands.query.at[rows, q_head, chunk_slice(c, shape.dims.head_size)]
                target = memory.q.tma.at[(slot * 2 + wg) * chunks + c, slots, :]
                plgpu.copy_gmem_to_smem(source, target, memory.q_full.at[slot])


# The warpgroups that compute.


def _compute(
    shape: PrefillShape, options: AttentionOptions, operands: Operands, memory: Memory, interpret: Interpreter | None
) -> None:
    plgpu.set_max_registers(shape.registers[0], action="increase")
    wg = lax.axis_index("wg")
    take_turn = functools.partial(_take_turn, memory)
    pl.when(wg == 1)(take_turn)  # the second warpgroup lets the first go ahead

    def attend(visit: Visit) -> None:
        item = visit.item
        q_slot, slot = lax.rem(visit.queries, jnp.int32(shape.q_stages)), lax.rem(visit.steps, jnp.int32(shape.stages))
        pl.when(item.steps > 0)(lambda: plgpu.barrier_wait(memory.q_full.at[q_slot]))
        pl.when(item.steps > 0)(lambda: plgpu.barrier_wait(memory.k_full.at[slot]))
        # Mosaic asks the hardware for the warpgroup's number wherever it is used: in a step, that delays the products.
        q_first = (q_slot * 2 + wg) * shape.tiles("key").chunks
        k_scale = None if operands.k_scale is None else positive_scale(scale_of_item(shape, operands.k_scale, item))
        given = (item, q_slot, q_first, k_scale)
        step = functools.partial(_step, shape, options, operands, memory, interpret, *given)
        carry = (_empty_state(shape), slot)
        for first, end, how in _loops(shape, options, item):
            carry = lax.fori_loop(first, end, functools.partial(step, **how), carry)
        state, _ = carry
        _store(shape, operands, memory, item, visit.index, state)

    for_each_item(shape, operands, attend)
    pl.when(wg == 0)(take_turn)
    plgpu.wait_smem_to_gmem(0)


def _take_turn(memory: Memory) -> None:
    """Let the other warpgroup on to the tensor cores, and wait until it lets this one on."""
    plgpu.barrier_arrive(memory.turns)
    plgpu.barrier_wait(memory.turns)


def _empty_state(shape: PrefillShape) -> Softmax:
    def by_row(value: float) -> Any:
        return plgpu.layout_cast(jnp.full((WG_ROWS,), value, jnp.float32), BY_ROW)

    sizes = shape.tiles("value").part_sizes
    acc = tuple(plgpu.layout_cast(jnp.zeros((WG_ROWS, n), jnp.float32), plgpu.Layout.WGMMA) for n in sizes)
    return Softmax(by_row(-jnp.inf), by_row(0.0), acc)


def _wg_first(shape: PrefillShape) -> Any:
    """Index in the tile of this warpgroup's first token."""
    return lax.axis_index("wg") * WG_ROWS if shape.splits_tokens else jnp.int32(0)


def _loops(shape: PrefillShape, options: AttentionOptions, item: Item) -> list[Loop]:
    """Ranges of an item's steps and how to treat each: masked or not, and half."""
    size = jnp.int32(shape.tiling.step)
    first_pos = item.first_pos + _wg_first(shape)
    last_pos = first_pos + (shape.wg_tokens - 1)
    most_full = jnp.where(item.damaged, 0, item.steps)
    loops, full_end = leading_loops(
        options, first_pos, last_pos, item.kv_len, shape.tiling.step, item.first_step, most_full
    )
    masked_end = item.steps
    if shape.half_steps:
        rows = jnp.minimum(item.rows - _wg_first(shape), shape.wg_tokens)
        _, high = attended_range(options, first_pos, first_pos + rows - 1, item.kv_len)
        last_start = (item.first_step + item.steps - 1) * size
        needs_half = (high - last_start <= shape.tiling.step // 2) & (item.steps > full_end) & ~item.damaged
        masked_end -= jnp.where(needs_half, 1, 0)
    loops.append((full_end, masked_end, {"masked": True}))
    if shape.half_steps:
        loops.append((masked_end, item.steps, {"masked": True, "width": shape.tiling.step // 2}))
    return loops


def _step(
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
    s = dot(pairs, size, interpret, meanwhile=functools.partial(_take_turn, memory))
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
        return (iota(size, 0) & (shape.wg_tokens - 1)) + (item.first_pos + _wg_first(shape))

    def kv_pos() -> Any:
        return iota(size, 1) + first_pos

    if not shape.tiling.packed or shape.splits_tokens:
        only = item.head if not shape.tiling.packed else item.head * shape.group
        slope = None if operands.slopes is None else operands.slopes[_slopes_row(operands, item), only]
        return TilePlace(item.table_row, lambda: only, q_pos, kv_pos, slope)

    def head() -> Any:
        first = item.head * shape.group + lax.axis_index("wg") * shape.heads_per_wg
        return _head_slot(shape, iota(size, 0)) + first

    slope = None
    if operands.slopes is not None:
        slopes_row = operands.slopes.at[_slopes_row(operands, item)]
        slope = _of_head_slots(shape, slopes_row, item.head, lax.axis_index("wg"), size, iota(size, 0))
    return TilePlace(item.table_row, head, q_pos, kv_pos, slope)


def _head_slot(shape: PrefillShape, row: Any) -> Any:
    return row >> (shape.wg_tokens.bit_length() - 1)


def _slopes_row(operands: Operands, item: Item) -> Any:
    return item.table_row if operands.slopes.shape[0] > 1 else 0


def _of_head_slots(shape: PrefillShape, values: Any, plan_head: Any, wg: Any, size: tuple[int, ...], row: Any) -> Any:
    """A packed tile's values per query head, from a ref [num_heads], as an array of `size` whose rows are `row`."""
    result = jnp.zeros(size, jnp.float32)
    first = wg * shape.heads_per_wg
    for slot in range(shape.heads_per_wg):
        head = jnp.minimum(first + slot, shape.group - 1) + plan_head * shape.group
        mine = _head_slot(shape, row) == slot
        result = jnp.where(mine, jnp.full(size, values[head]), result)
    return result


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


def _store(
    shape: PrefillShape,
    operands: Operands,
    memory: Memory,
    item: Item,
    k: Any,
    state: Softmax,
) -> None:
    """Divide by the sums and send the rows that belong to the request to the output."""
    weight, lse = normalized(state.peak, state.total)
    if operands.sinks is not None:
        sinks = sinks_of_rows(shape, operands.sinks, item.head, lax.axis_index("wg"))
        weight = with_sink(weight, lse, sinks)
    if operands.v_scale is not None:
        weight = weight * scale_of_item(shape, operands.v_scale, item)
    out = [a * lax.broadcast_in_dim(weight, a.shape, [0]) for a in state.acc]
    if shape.in_parts:
        _store_part(shape, operands, item, k, out, lse)
        return
    for first in range(0, shape.o_chunks, shape.o_slots):
        chunks = range(first, min(first + shape.o_slots, shape.o_chunks))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was sent before has left shared memory
        for wg in range(2):
            rows = item.rows - (wg * WG_ROWS if shape.splits_tokens else 0)

            @pl.when((lax.axis_index("wg") == wg) & (rows > 0))
            def _(wg: int = wg, rows: Any = rows, chunks: range = chunks) -> None:
                for slot, c in enumerate(chunks):
                    o = _chunk_of(out, c, shape.o_chunk).astype(shape.out_dtype)
                    memory.o.tensor_core.at[wg * shape.o_slots + slot][...] = o
                if shape.return_lse and chunks[0] == 0:
                    store(memory.lse[wg], lse)
                plgpu.commit_smem()
                if shape.return_lse and chunks[0] == 0:
                    tile = operands.work[lax.axis_index("cta"), k, field.TILE]
                    target = operands.lse.at[tile, item.head, pl.ds(wg * WG_ROWS, WG_ROWS)]
                    plgpu.copy_smem_to_gmem(memory.lse[wg], target)
                send = functools.partial(_send, shape, operands, memory, item, wg, chunks)
                full = rows >= shape.wg_tokens
                pl.when(full)(lambda: send(0, shape.wg_tokens))
                # A neighbour's rows must not be touched: a tile that is not full goes row by row.
                lax.fori_loop(0, jnp.where(full, 0, rows), lambda t, _: send(t, 1), None)


def _store_part(shape: PrefillShape, operands: Operands, item: Item, k: Any, out: Sequence[Any], lse: Any) -> None:
    """Send all rows to the workspace, straight from registers."""
    part = operands.work[lax.axis_index("cta"), k, field.TILE]
    rows = pl.ds(lax.axis_index("wg") * WG_ROWS, WG_ROWS)
    first = 0
    for o in out:
        store(operands.part_out.at[part, item.head, rows, pl.ds(first, o.shape[1])], o)
        first += o.shape[1]
    store(operands.lse.at[part, item.head, rows], lse)


def _chunk_of(parts: Sequence[Any], c: int, columns: int) -> Any:
    """Columns `c * columns` to `(c + 1) * columns` of arrays that lie side by side, all of one width."""
    part, first = divmod(c * columns, parts[0].shape[1])
    return parts[part][:, first : first + columns]


def _send(
    shape: PrefillShape,
    operands: Operands,
    memory: Memory,
    item: Item,
    wg: int,
    chunks: range,
    first: Any,
    count: int,
) -> None:
    """Start copying tokens `first` to `first + count` of every head slot of a warpgroup to the output."""
    row = item.first_row + (wg * WG_ROWS if shape.splits_tokens else 0) + first
    for place, head in enumerate(shape.head_slots(wg)):
        q_head = item.head * shape.group + head if shape.tiling.packed else item.head
        for slot, c in enumerate(chunks):
            rows = pl.ds(place * shape.wg_tokens + first, count)
            source = memory.o.tma.at[wg * shape.o_slots + slot, rows, :]
            columns = chunk_slice(c, shape.dims.v_head_size, shape.o_chunk)
            plgpu.copy_smem_to_gmem(source, operands.out.at[pl.ds(row, count), q_head, columns])


def sinks_of_rows(shape: PrefillShape, sinks: Any, plan_head: Any, wg: Any) -> Any:
    """The sink of each row of a warpgroup, from a ref [num_heads]."""
    if not shape.tiling.packed or shape.splits_tokens:
        head = plan_head if not shape.tiling.packed else plan_head * shape.group
        return plgpu.layout_cast(jnp.full((WG_ROWS,), sinks[head]), BY_ROW)
    row = plgpu.layout_cast(plgpu.broadcasted_iota(jnp.int32, (WG_ROWS,), 0, layout=BY_ROW), BY_ROW)
    return _of_head_slots(shape, sinks, plan_head, wg, (WG_ROWS,), row)
