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

import enum
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas import decode_plan as field
from jaxpaged.pallas import decode_teams
from jaxpaged.pallas.decode_parts import bring_parts, brings_parts, own_share, ring_of_keys, ring_views, take_up
from jaxpaged.pallas.decode_plan import DecodePlan
from jaxpaged.pallas.decode_rows import clear_rows, columns_of, store_piece
from jaxpaged.pallas.decode_shape import (
    DecodeShape,
    divided,
    per_column,
    reduction_bytes,
    workspace_types,
)
from jaxpaged.pallas.decode_teams import (
    BY_ROW,
    REGISTERS,
    first_own,
    hand_over,
    maximum,
    merge,
    own_tiles,
    summed,
)
from jaxpaged.pallas.eight_bits import (
    products,
    row_scales,
    scale_operands,
    scratch,
    widen_queries,
    widen_values,
)
from jaxpaged.pallas.matmul import dot, dot_onto, transposed
from jaxpaged.pallas.mosaic import (
    Interpreter,
    drain,
    follow_previous_kernel,
    kernel,
    let_next_kernel_start,
    one_warp_each,
    wait_for_previous_kernel,
)
from jaxpaged.pallas.paged_tiles import (
    CHUNK,
    Span,
    Stream,
    chunk_slice,
    iota,
    load_tiles,
    split_views,
    swizzled,
    tile_at,
    two_views,
)
from jaxpaged.pallas.ranges import Loop, leading_loops
from jaxpaged.pallas.scores import TilePlace, kept, log2_scores
from jaxpaged.reference.attention import AttentionOptions, attended_range


class Turn(enum.Enum):
    """Which pieces are computed. The interpreter, in which no CTA may read what another one wrote, takes two turns."""

    GOING_ON = enum.auto()
    BEGINNING = enum.auto()


class Operands(NamedTuple):
    """References to global memory; and if not all pieces are computed, which are."""

    requests: Any = None
    shares: Any = None
    kept_tiles: Any = None
    table: Any = None
    query: Any = None
    key: Any = None
    value: Any = None
    k_scale: Any = None
    v_scale: Any = None
    k_scales: Any = None
    v_scales: Any = None
    slopes: Any = None
    sinks: Any = None
    out: Any = None
    lse: Any = None
    parts: Any = None
    flags: Any = None
    lse_by_request: Any = None
    turn: Turn | None = None


class Memory(NamedTuple):
    """Shared memory and barriers of a CTA."""

    q: Any = None
    k: Any = None
    parts: Any = None
    v: Any = None
    k_scales: Any = None
    v_scales: Any = None
    queries: Any = None
    values: Any = None
    p: Any = None
    o: Any = None
    by_column: Any = None
    reductions: Any = None
    handed: Any = None
    handed_stats: Any = None
    handed_over: Any = None
    taken: Any = None
    q_full: Any = None
    q_empty: Any = None
    k_full: Any = None
    k_empty: Any = None
    v_full: Any = None
    v_empty: Any = None
    parts_there: Any = None


class Piece(NamedTuple):
    """The part of a request in a share: `count` tiles from `first_tile` on, a place in the list if there is one.

    If the request starts in the share, so many `others` go on with it, each in one of the shares after this one.
    """

    request: Any
    first_tile: Any
    count: Any
    starts_request: Any
    others: Any
    kv_len: Any
    q_start: Any
    q_len: Any
    damaged: Any


class Softmax(NamedTuple):
    """Running maximum of each row, sum for each of its places in a tile, and output, transposed, by pieces of the head.

    That threads don't add up their sums before a piece's end spares them a meeting in each step.
    """

    peak: Any
    total: Any
    acc: tuple[Any, ...]


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
        pl.when(wg == n)(lambda: _load(shape, operands, memory, interpret))

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


def _for_each_piece(shape: DecodeShape, operands: Operands, body: Any) -> tuple[Any, Any, Any]:
    """Call `body(piece, number of pieces before, number of tiles before)` for each piece of this CTA's share.

    Returns:
      The numbers of pieces, of tiles, and of others' parts, which only the last piece has.
    """
    share = own_share(shape)
    first, last, lower, upper, *first_row = (operands.shares[share, i] for i in range(field.SHARE_FIELDS))

    def visit(request: Any, before: tuple[Any, ...]) -> tuple[Any, ...]:
        pieces, tiles, others, *row = before
        begin = row[field.BEGIN]
        skipped = jnp.maximum(lower - begin, 0)
        count = jnp.maximum(jnp.minimum(upper - begin, row[field.TILES]) - skipped, 0)
        if operands.turn is not None:
            count = jnp.where((skipped == 0) == (operands.turn is Turn.BEGINNING), count, 0)
        piece = Piece(
            request,
            row[field.FIRST_TILE] + skipped,
            count,
            skipped == 0,
            jnp.where(skipped == 0, row[field.LAST_SHARE] - share, 0),
            *(row[f] for f in (field.KV_LEN, field.Q_START, field.Q_LEN, field.DAMAGED)),
        )
        pl.when(count > 0)(lambda: body(piece, pieces, tiles))
        following = (operands.requests[request + 1, f] for f in range(field.NUM_FIELDS))
        some = count > 0
        return pieces + jnp.where(some, 1, 0), tiles + count, others + jnp.where(some, piece.others, 0), *following

    return lax.fori_loop(first, last + 1, visit, (*(jnp.int32(0),) * 3, *first_row))[:3]


# The warpgroup that loads.


def _load(shape: DecodeShape, operands: Operands, memory: Memory, interpret: Interpreter | None) -> None:
    if shape.warpgroups > 1:
        plgpu.set_max_registers(REGISTERS[shape.warpgroups][1], action="decrease")
    value = operands.key if operands.value is None else operands.value
    keys = Stream(
        shape.tiles("key"), operands.key, memory.k, memory.k_full, memory.k_empty, operands.k_scales, memory.k_scales
    )
    values = Stream(
        shape.tiles("value"), value, memory.v, memory.v_full, memory.v_empty, operands.v_scales, memory.v_scales
    )

    def load(*streams: Stream) -> None:
        def load_piece(piece: Piece, pieces: Any, tiles: Any) -> None:
            _load_tiles(shape, operands, streams, piece, tiles)
            if keys in streams:
                bring_parts(shape, operands, memory, piece, tiles + piece.count, interpret)

        _for_each_piece(shape, operands, load_piece)

    def load_queries() -> None:
        _for_each_piece(
            shape, operands, lambda piece, pieces, tiles: _load_query(shape, operands, memory, piece, pieces)
        )

    def clear() -> None:
        clear_rows(shape, operands, interpret)

    def load_in_turn() -> None:
        def load_piece(piece: Piece, pieces: Any, tiles: Any) -> None:
            _load_query(shape, operands, memory, piece, pieces)
            _load_tiles(shape, operands, (keys, values), piece, tiles)
            bring_parts(shape, operands, memory, piece, tiles + piece.count, interpret)

        pieces, tiles, others = _for_each_piece(shape, operands, load_piece)
        drain(memory.q_empty, pieces, 2)
        drain(memory.k_empty, tiles + (others if brings_parts(shape) else 0), shape.stages)
        drain(memory.v_empty, tiles, shape.stages)
        if operands.turn is Turn.BEGINNING:
            clear()

    if interpret is not None:  # it runs warps one after the other
        load_in_turn()
    else:
        one_warp_each(lambda: load(keys), lambda: load(values), load_queries, clear)


def _load_tiles(shape: DecodeShape, operands: Operands, streams: Sequence[Stream], piece: Piece, tiles: Any) -> None:
    head = lax.axis_index("head") * shape.heads
    span = Span(piece.request, piece.kv_len, head, piece.first_tile, piece.count, operands.kept_tiles)
    load_tiles(streams, operands.table, span, tiles)


def _load_query(shape: DecodeShape, operands: Operands, memory: Memory, piece: Piece, pieces: Any) -> None:
    slot, chunks = lax.rem(pieces, jnp.int32(2)), shape.tiles("key").chunks
    first = lax.axis_index("head") * shape.group
    pl.when(pieces >= 2)(lambda: plgpu.barrier_wait(memory.q_empty.at[slot]))
    for token, head, start, count in shape.runs:
        # Rows past the request's are its last one again: their results are not stored.
        row = piece.q_start + (jnp.minimum(token, piece.q_len - 1) if token else 0)
        heads, rows = pl.ds(first + head, count), pl.ds(start, count)
        if shape.quantized:
            plgpu.copy_gmem_to_smem(
                operands.query.at[row, heads, :], memory.q.at[slot, rows, :], memory.q_full.at[slot]
            )
            continue
        for c in range(chunks):
            source = operands.query.at[row, heads, chunk_slice(c, shape.dims.head_size)]
            target = memory.q.tma.at[slot * chunks + c, rows, :]
            plgpu.copy_gmem_to_smem(source, target, memory.q_full.at[slot])


# The warpgroups that compute.


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
        step = functools.partial(_step, shape, options, operands, memory, interpret, piece, q_slot, factors, tiles)
        state, loops = _empty_state(shape), _loops(shape, options, piece)
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

    pieces, _, _ = _for_each_piece(shape, operands, attend)
    if several:
        pl.when((wg > 0) & (pieces > 0))(lambda: plgpu.barrier_wait(memory.taken))
    plgpu.wait_smem_to_gmem(0)
    if shape.overlaps:
        wait_for_previous_kernel(interpret)


def _empty_state(shape: DecodeShape) -> Softmax:
    sizes = shape.tiles("value").part_sizes
    acc = tuple(plgpu.layout_cast(jnp.zeros((n, shape.columns), jnp.float32), plgpu.Layout.WGMMA) for n in sizes)
    peak = plgpu.layout_cast(jnp.full((shape.columns,), -jnp.inf, jnp.float32), BY_ROW)
    total = plgpu.layout_cast(jnp.zeros(shape.scores, jnp.float32), plgpu.Layout.WGMMA)
    return Softmax(peak, total, acc)


def _loops(shape: DecodeShape, options: AttentionOptions, piece: Piece) -> list[Loop]:
    """Ranges of a piece's tiles and how to treat each: masked or not, and with an eye to blocks out of range."""
    first_pos, last_pos = piece.kv_len - piece.q_len, piece.kv_len - 1
    sound = jnp.where(piece.damaged != 0, 0, piece.count)
    loops, end = leading_loops(options, first_pos, last_pos, piece.kv_len, shape.tile, piece.first_tile, sound)
    loops.append((end, sound, {"masked": True}))
    # A loop of its own: what it does takes registers, of which a thread may have 128 where two CTAs are to share an SM.
    loops.append((sound, piece.count, {"masked": True, "checked": True}))
    return loops


def _own_step(shape: DecodeShape, step: Any, first: Any, i: Any, state: Softmax, **how: Any) -> Softmax:
    """A step of a warpgroup's own ones, the first of which is the piece's `first`."""
    return step(first + i * shape.warpgroups, state, **how)


def _step(
    shape: DecodeShape,
    options: AttentionOptions,
    operands: Operands,
    memory: Memory,
    interpret: Interpreter | None,
    piece: Piece,
    q_slot: Any,
    factors: Any,
    tiles: Any,
    i: Any,
    state: Softmax,
    *,
    masked: bool = False,
    checked: bool = False,
) -> Softmax:
    """One tile: scores, online softmax, and its values onto the output."""
    keys, values = shape.tiles("key"), shape.tiles("value")
    slot = lax.rem(tiles + i, jnp.int32(shape.stages))
    tile = tile_at(operands.kept_tiles, piece.first_tile + i)
    plgpu.barrier_wait(memory.k_full.at[slot])
    if shape.quantized:
        s = products(shape, memory, slot, q_slot, interpret, at_once=not masked)
        if factors is not None:
            s = s * (lax.broadcast_in_dim(factors, s.shape, [1]) if factors.ndim else factors)
        if memory.k_scales is not None:
            s = s * row_scales(shape, memory.k_scales, slot, s.shape, interpret)
    else:
        queries = [transposed(memory.q.tensor_core.at[q_slot * keys.chunks + c]) for c in range(keys.chunks)]
        chunks = [(keys.chunk(memory.k, slot, c), q) for c, q in enumerate(queries)]
        s = dot(chunks, shape.scores, interpret)
        plgpu.barrier_arrive(memory.k_empty.at[slot])

    place = _place(shape, options, operands, piece, tile)
    s, factor = log2_scores(s, options, place)
    readable = _readable(shape, operands, piece, tile) if checked else None
    if masked:
        keep = kept(options, place, piece.kv_len)
        if readable is not None:
            keep &= readable(s.shape)
        s = jnp.where(keep, s, -jnp.inf)
    if shape.heads > 1:
        s = jnp.where(_of_one_head(shape), s, -jnp.inf)
    peak = jnp.maximum(state.peak, maximum(shape, memory, s, interpret) * factor)
    # A row may have nothing to attend to so far: then any finite shift gives exp2(-inf) = 0 where -inf would give NaN.
    shift = jnp.where(peak == -jnp.inf, 0.0, peak) if masked or options.score_mod is not None else peak
    p = jnp.exp2(s * factor - lax.broadcast_in_dim(shift, s.shape, [1]))
    decay = jnp.exp2(state.peak - shift)
    total = state.total * lax.broadcast_in_dim(decay, p.shape, [1]) + p
    acc = tuple(a * lax.broadcast_in_dim(decay, a.shape, [1]) for a in state.acc)
    plgpu.barrier_wait(memory.v_full.at[slot])
    if memory.v_scales is not None:
        p *= row_scales(shape, memory.v_scales, slot, p.shape, interpret)
        p = jnp.where(s == -jnp.inf, 0.0, p)  # a scale that nothing wrote may be NaN
    transposed(memory.p)[...] = p.astype(shape.dtype)
    if shape.quantized:
        used = functools.partial(_used_values, shape, options, piece, tile, readable)
        widen_values(shape, memory, slot, used if masked else None)
    elif masked:
        _clear_unused_values(shape, options, memory, piece, tile, slot, readable)
    plgpu.commit_smem()
    if shape.quantized:  # threads read the keys, so TMA may not write there before the fence
        plgpu.barrier_arrive(memory.k_empty.at[slot])
    sources = [memory.values] if shape.quantized else values.parts(memory.v, slot)
    parts = [transposed(v) for v in sources]
    acc = dot_onto(acc, parts, [transposed(memory.p)] * len(parts), interpret)
    plgpu.barrier_arrive(memory.v_empty.at[slot])
    return Softmax(peak, total, acc)


def _of_one_head(shape: DecodeShape) -> Any:
    """Which scores of a tile are of a key and a query of one kv head."""
    size = shape.scores
    of_query, _ = divided(iota(size, 1), shape.rows // shape.heads)
    of_key, _ = divided(iota(size, 0), shape.tile)
    return jnp.minimum(of_query, shape.heads - 1) == of_key


def _place(shape: DecodeShape, options: AttentionOptions, operands: Operands, piece: Piece, tile: Any) -> TilePlace:
    size = shape.scores

    def head() -> Any:
        row = iota(size, 1)
        return lax.axis_index("head") * shape.group + (shape.place(row)[1] if shape.max_query_len > 1 else row)

    def q_pos() -> Any:
        first = piece.kv_len - piece.q_len
        return shape.place(iota(size, 1))[0] + first if shape.max_query_len > 1 else first

    def kv_pos() -> Any:
        return shape.tiles("key").position(size, 0, tile * shape.tile)

    slope = None
    if operands.slopes is not None:
        request = piece.request if operands.slopes.shape[0] > 1 else 0
        slope = lax.broadcast_in_dim(columns_of(operands.slopes, request, shape), size, [1])
    return TilePlace(piece.request, head, q_pos, kv_pos, slope)


def _readable(shape: DecodeShape, operands: Operands, piece: Piece, tile: Any) -> Any:
    return functools.partial(shape.tiles("key").readable, operands.table, piece.request, tile, piece.kv_len, axis=0)


def _used_values(
    shape: DecodeShape,
    options: AttentionOptions,
    piece: Piece,
    tile: Any,
    readable: Any,
    size: tuple[int, ...],
    layout: Any = plgpu.Layout.WGMMA,
    first: int = 0,
) -> Any:
    """For an array whose rows are a tile's from `first` on, to which of their positions some row may attend."""
    low, high = attended_range(options, piece.kv_len - piece.q_len, piece.kv_len - 1, piece.kv_len)
    position = shape.tiles("value").position(size, 0, tile * shape.tile, layout, first)
    used = (position >= low) & (position < high)
    return used if readable is None else used & readable(size, layout=layout, first=first)


def _clear_unused_values(
    shape: DecodeShape, options: AttentionOptions, memory: Memory, piece: Piece, tile: Any, slot: Any, readable: Any
) -> None:
    """Values of positions that no row attends to may be anything, NaN too, and 0 * NaN is NaN: make them 0."""
    values = shape.tiles("value")
    for c in range(values.chunks):
        chunk = values.chunk(memory.v, slot, c)
        v = plgpu.load(chunk, layout=plgpu.Layout.WGMMA)
        used = _used_values(shape, options, piece, tile, readable, v.shape)
        chunk[...] = jnp.where(used, v, jnp.zeros_like(v))
