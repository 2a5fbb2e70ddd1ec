"""The warpgroup of decode that loads: queries, keys and values by TMA, each by a warp of its own."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.decode_parts import bring_parts, brings_parts
from jaxpaged.pallas.decode_pieces import for_each_piece
from jaxpaged.pallas.decode_rows import clear_rows
from jaxpaged.pallas.decode_shape import DecodeShape
from jaxpaged.pallas.decode_state import Memory, Operands, Piece, Turn
from jaxpaged.pallas.decode_teams import REGISTERS
from jaxpaged.pallas.mosaic import Interpreter, drain, one_warp_each
from jaxpaged.pallas.paged_tiles import Span, Stream, chunk_slice, load_tiles


def load_all(shape: DecodeShape, operands: Operands, memory: Memory, interpret: Interpreter | None) -> None:
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

        for_each_piece(shape, operands, load_piece)

    def load_queries() -> None:
        for_each_piece(
            shape, operands, lambda piece, pieces, tiles: _load_query(shape, operands, memory, piece, pieces)
        )

    def clear() -> None:
        clear_rows(shape, operands, interpret)

    def load_in_turn() -> None:
        def load_piece(piece: Piece, pieces: Any, tiles: Any) -> None:
            _load_query(shape, operands, memory, piece, pieces)
            _load_tiles(shape, operands, (keys, values), piece, tiles)
            bring_parts(shape, operands, memory, piece, tiles + piece.count, interpret)

        pieces, tiles, others = for_each_piece(shape, operands, load_piece)
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
