"""What becomes of a request's rows in decode: outputs and lses, parts for other CTAs, and 0 where nothing is seen."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.pallas import decode_plan as field
from jaxpaged.pallas.decode_parts import leave_part, own_share
from jaxpaged.pallas.decode_plan import DecodePlan
from jaxpaged.pallas.decode_shape import DecodeShape, column_place
from jaxpaged.pallas.decode_state import Memory, Operands, Piece
from jaxpaged.pallas.decode_teams import BY_ROW, Merged
from jaxpaged.pallas.eight_bits import scale_of_head
from jaxpaged.pallas.matmul import transposed
from jaxpaged.pallas.mosaic import Interpreter, store
from jaxpaged.pallas.paged_tiles import send_rows
from jaxpaged.pallas.prefill_rows import row_requests
from jaxpaged.pallas.scores import LN2, normalized, with_sink
from jaxpaged.pallas.warps import fill

LSE = 0
"""The row of `Memory.by_column` for lses."""


def columns_of(values: Any, request: Any, shape: DecodeShape) -> Any:
    """Those of a CTA's rows among `per_column` values; past its last row anything."""
    which, start = column_place(lax.axis_index("head"), shape)
    return plgpu.load(values.at[request, which, pl.ds(start, shape.columns)], layout=BY_ROW, optimized=False)


def store_piece(
    shape: DecodeShape,
    operands: Operands,
    memory: Memory,
    piece: Piece,
    interpret: Interpreter | None,
    state: Merged,
) -> None:
    """Divide by the sums, and send the rows of a request that begins in this share to the output, else as a part."""
    weight, lse = normalized(state.peak, state.total)
    scaled = weight if operands.v_scale is None else weight * scale_of_head(operands.v_scale)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous piece has left shared memory
    lses = memory.by_column.at[LSE]
    store(lses, lse)

    def put(factor: Any) -> None:
        """The output as it is computed, transposed and float32, into shared memory."""
        for rows, o in _weighted(shape, state, factor):
            store(memory.o[1].at[rows, :], o)
        plgpu.commit_smem()

    @pl.when(~piece.starts_request)
    def _part() -> None:
        put(weight)
        leave_part(shape, operands, memory, lses, interpret)

    @pl.when(piece.starts_request)
    def _request() -> None:
        if shape.by_request:
            put(scaled)
            plgpu.copy_smem_to_gmem(memory.o[1], operands.out.at[piece.request, lax.axis_index("head")])
        else:
            _send_output(shape, operands, memory, piece, state, scaled, lse)
        plgpu.copy_smem_to_gmem(lses, operands.lse_by_request.at[piece.request, lax.axis_index("head")])
        if operands.lse is not None:
            _write_lses(shape, operands, piece, lses)


def _weighted(shape: DecodeShape, state: Merged, factor: Any) -> list[tuple[Any, Any]]:
    """Rows of the transposed output, and what it is there."""
    weighted = [a * lax.broadcast_in_dim(factor, a.shape, [1]) for a in state.acc]
    return list(zip(shape.value_rows, weighted, strict=True))


def _send_output(
    shape: DecodeShape, operands: Operands, memory: Memory, piece: Piece, state: Merged, weight: Any, lse: Any
) -> None:
    if operands.sinks is not None:
        weight = with_sink(weight, lse, columns_of(operands.sinks, 0, shape))
    for columns, o in _weighted(shape, state, weight):
        store(transposed(memory.o[0].at[:, columns]), o.astype(shape.out_dtype))
    plgpu.commit_smem()

    def send(token: int, first: int, start: int, count: int) -> None:
        rows = memory.o[0].at[pl.ds(start, count), :]
        send_rows(rows, _output_rows(shape, operands, piece.q_start + token, first, count), 0, shape.dims.v_head_size)

    for run in shape.runs:
        pl.when(run[0] < piece.q_len)(functools.partial(send, *run))


def _output_rows(shape: DecodeShape, operands: Operands, token: Any, first: int, count: int) -> Any:
    """The output of a token and some of this CTA's query heads."""
    return operands.out.at[token, pl.ds(lax.axis_index("head") * shape.group + first, count)]


def _write_lses(shape: DecodeShape, operands: Operands, piece: Piece, lses: Any) -> None:
    """Write natural lses by token and head, of ones by row in units of log 2 in shared memory."""

    def write(i: Any, _: None) -> None:
        token, member = lax.div(i, jnp.int32(shape.group)), lax.rem(i, jnp.int32(shape.group))
        natural = lses[shape.row(token, member)] * jnp.float32(LN2)
        operands.lse[piece.q_start + token, lax.axis_index("head") * shape.group + member] = natural

    lax.fori_loop(0, piece.q_len * shape.group, write, None)


def clear_rows(shape: DecodeShape, operands: Operands, interpret: Interpreter | None) -> None:
    """Write 0, and lses of -inf, to the rows of requests that attend to nothing, and to those of none: a warp's work.

    Shares take turns with requests, and with the tokens of none.
    """
    if shape.by_request:
        return
    share, shares = own_share(shape), jnp.int32(shape.num_shares)
    last = operands.requests.shape[0] - 1

    def turns(first: Any, end: Any) -> Any:
        return lax.div(end - first + shares - 1, shares)

    def clear(row: Any) -> None:
        fill(_output_rows(shape, operands, row, 0, shape.group), 0.0, interpret)
        if operands.lse is not None:
            heads = pl.ds(lax.axis_index("head") * shape.group, shape.group)
            fill(operands.lse.at[row, heads], -jnp.inf, interpret)

    def visit(i: Any, _: None) -> None:
        request = share + i * shares
        tiles, start, rows = (operands.requests[request, f] for f in (field.TILES, field.Q_START, field.Q_LEN))
        empty = jnp.where(tiles == 0, jnp.maximum(rows, 0), 0)
        lax.fori_loop(0, empty, lambda token, _: clear(start + token), None)

    lax.fori_loop(0, turns(share, last), visit, None)
    start, rows = (operands.requests[last, f] for f in (field.Q_START, field.Q_LEN))
    lax.fori_loop(0, turns(share, jnp.maximum(rows, 0)), lambda i, _: clear(start + share + i * shares), None)


def rows_of_requests(x: Any, shape: DecodeShape, batch: PagedBatch) -> Any:
    """[num_reqs, head_groups, .., columns] as [num_tokens, head_groups, .., group]; other rows get anything."""
    request, index = row_requests(batch, shape.num_tokens)
    by_column = x[jnp.minimum(request, batch.num_reqs - 1)]
    if shape.max_query_len == 1:
        return by_column[..., : shape.group]
    own, token = shape.group // shape.heads, jnp.clip(index, 0, shape.max_query_len - 1)
    first = jnp.arange(shape.heads) * shape.max_query_len + token[:, None]  # run of each kv head, [num_tokens, heads]
    column = (first[..., None] * own + jnp.arange(own)).reshape(-1, *(1,) * (x.ndim - 2), shape.group)
    return jnp.take_along_axis(by_column, column, axis=-1)


def decoded_lse(plan: DecodePlan, lse_by_request: Any, shape: DecodeShape, batch: PagedBatch) -> Any:
    """Lses in units of log 2 [num_tokens, num_heads] from what `decode` left, -inf for all other rows."""
    lse = rows_of_requests(lse_by_request, shape, batch)
    lse = jnp.where(attending_rows(plan, shape, batch)[:, None, None], lse, -jnp.inf)
    return lse.reshape(shape.num_tokens, -1)


def attending_rows(plan: DecodePlan, shape: DecodeShape, batch: PagedBatch) -> Any:
    """[num_tokens] bool: rows that attend to something, among those that decode takes."""
    request, _ = row_requests(batch, shape.num_tokens)
    return plan.requests[request, field.TILES] > 0
