"""A step of decode: a tile's scores, online softmax, and its values onto the output."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.decode_rows import columns_of
from jaxpaged.pallas.decode_shape import DecodeShape, divided
from jaxpaged.pallas.decode_state import Memory, Operands, Piece, Softmax
from jaxpaged.pallas.decode_teams import BY_ROW, maximum
from jaxpaged.pallas.eight_bits import products, row_scales, widen_values
from jaxpaged.pallas.matmul import dot, dot_onto, transposed
from jaxpaged.pallas.mosaic import Interpreter
from jaxpaged.pallas.paged_tiles import iota, tile_at
from jaxpaged.pallas.ranges import Loop, leading_loops
from jaxpaged.pallas.scores import TilePlace, kept, log2_scores
from jaxpaged.reference.attention import AttentionOptions, attended_range


def empty_state(shape: DecodeShape) -> Softmax:
    sizes = shape.tiles("value").part_sizes
    acc = tuple(plgpu.layout_cast(jnp.zeros((n, shape.columns), jnp.float32), plgpu.Layout.WGMMA) for n in sizes)
    peak = plgpu.layout_cast(jnp.full((shape.columns,), -jnp.inf, jnp.float32), BY_ROW)
    total = plgpu.layout_cast(jnp.zeros(shape.scores, jnp.float32), plgpu.Layout.WGMMA)
    return Softmax(peak, total, acc)


def loops_of(shape: DecodeShape, options: AttentionOptions, piece: Piece) -> list[Loop]:
    """Ranges of a piece's tiles and how to treat each: masked or not, and with an eye to blocks out of range."""
    first_pos, last_pos = piece.kv_len - piece.q_len, piece.kv_len - 1
    sound = jnp.where(piece.damaged != 0, 0, piece.count)
    loops, end = leading_loops(options, first_pos, last_pos, piece.kv_len, shape.tile, piece.first_tile, sound)
    loops.append((end, sound, {"masked": True}))
    # A loop of its own: what it does takes registers, of which a thread may have 128 where two CTAs are to share an SM.
    loops.append((sound, piece.count, {"masked": True, "checked": True}))
    return loops


def one_tile(
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
        widen_values(shape, memory, slot, used if masked else None, interpret)
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
