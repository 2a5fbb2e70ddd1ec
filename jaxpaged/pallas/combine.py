"""The second step of decode: combine the parts of requests that several CTAs shared, and clear rows without a key.

The parts are weighted by their lses, as in flash-decoding (Dao et al., 2023).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.pallas import decode_plan as field
from jaxpaged.pallas.decode import columns_of
from jaxpaged.pallas.decode_plan import DecodePlan
from jaxpaged.pallas.decode_shape import DecodeShape, per_column
from jaxpaged.pallas.decode_teams import BY_ROW
from jaxpaged.pallas.matmul import transposed
from jaxpaged.pallas.mosaic import Interpreter, follow_previous_kernel, kernel, store
from jaxpaged.pallas.paged_tiles import CHUNK, send_rows
from jaxpaged.pallas.prefill_rows import row_requests
from jaxpaged.pallas.scores import LN2, normalized, with_sink

MANY, FEW = 16, 4
"""Parts whose loads are in flight together, with 8 columns. Many take registers, and then fewer CTAs fit on a
multiprocessor: they are for few requests, which have many parts each."""


def combine(
    plan: DecodePlan,
    part_out: Any,
    part_lse: Any,
    sinks: Any,
    shape: DecodeShape,
    out: Any,
    interpret: Interpreter | None,
    *,
    return_lse: bool = False,
    whole_lse: Any = None,
    lse: Any = None,
) -> Any:
    """Write to `out` the rows of requests that decode left in parts, and 0 to rows that attend to nothing.

    Args:
      part_out, part_lse: see `decode`.
      out: a reference to the output [num_tokens, num_heads, v_head_size]; one by request is not cleared.
      lse: a reference to [num_tokens, num_heads] float32, to which all rows' natural lses are written, or None. It
        needs `whole_lse`, see `decode`.

    Returns:
      With `return_lse` the lses of requests in parts [num_reqs, head_groups, columns] in units of log 2, and anything
      for the others; else None.
    """
    chunks = shape.padded_v_size // CHUNK
    columns = per_column(sinks, shape)
    given = {"requests": plan.requests, "part_out": part_out, "part_lse": part_lse, "sinks": columns, "out": out}
    given |= {} if lse is None else {"whole_lse": whole_lse, "lse": lse}
    operands = {name: x for name, x in given.items() if x is not None}
    names = (*operands, *(["merged_lse"] if return_lse else []))  # the last is the kernel's result
    heads, num_reqs = shape.head_groups, plan.requests.shape[0] - 1
    merged_lse = [jax.ShapeDtypeStruct((num_reqs, heads, shape.columns), jnp.float32)] if return_lse else []
    at_once = MANY if shape.num_shares > 4 * num_reqs else FEW
    at_once = max(2, at_once * 8 // shape.columns)
    results = kernel(
        functools.partial(_combine, shape, at_once, interpret, names),
        out_type=merged_lse,
        scratch_types=dict(
            o_s=plgpu.SMEM((CHUNK, shape.columns), jnp.float32)
            if shape.by_request
            else plgpu.SMEM((shape.columns, CHUNK), shape.out_dtype),
            lse_s=plgpu.SMEM((shape.columns,), jnp.float32),
        ),
        grid=(heads, chunks, num_reqs + 1),
        grid_names=("head", "chunk", "request"),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode_combine",
    )(*operands.values())
    return results[0] if return_lse else None


class Operands(NamedTuple):
    """References to global memory."""

    requests: Any
    part_out: Any
    part_lse: Any
    out: Any
    sinks: Any = None
    whole_lse: Any = None
    lse: Any = None
    merged_lse: Any = None


def _combine(
    shape: DecodeShape,
    at_once: int,
    interpret: Interpreter | None,
    names: tuple[str, ...],
    *refs: Any,
    o_s: Any,
    lse_s: Any,
) -> None:
    operands = Operands(**dict(zip(names, refs, strict=True)))
    requests, out = operands.requests, operands.out
    head, request = lax.axis_index("head"), lax.axis_index("request")
    tiles, q_start, q_len, first, last = (
        requests[request, f] for f in (field.TILES, field.Q_START, field.Q_LEN, field.FIRST_SHARE, field.LAST_SHARE)
    )
    follow_previous_kernel(interpret)  # decode, but the plan was there before decode began
    size = (CHUNK, shape.columns)

    def send(token: Any, first_head: int, row: int, count: int) -> None:
        rows, chunk = o_s.at[pl.ds(row, count), :], lax.axis_index("chunk")
        target = out.at[q_start + token, pl.ds(head * shape.group + first_head, count)]
        whole, rest = divmod(shape.dims.v_head_size, CHUNK)
        if whole:
            pl.when(chunk < whole)(lambda: plgpu.copy_smem_to_gmem(rows, target.at[:, pl.ds(chunk * CHUNK, CHUNK)]))
        if rest:
            pl.when(chunk == whole)(lambda: send_rows(rows, target, whole * CHUNK, shape.dims.v_head_size))

    def clear() -> None:
        zeros = plgpu.layout_cast(jnp.zeros(size, shape.out_dtype), plgpu.Layout.WGMMA)
        store(transposed(o_s), zeros)
        plgpu.commit_smem()
        for of_token, *run in shape.runs:
            if of_token == 0:
                lax.fori_loop(0, q_len, lambda token, _, run=run: send(token, *run), None)

    def send_lse(of_row: Callable[[Any], Any]) -> None:
        """Write natural lses by token and head, given them by row in units of log 2."""

        def one(i: Any, _: None) -> None:
            token, member = lax.div(i, jnp.int32(shape.group)), lax.rem(i, jnp.int32(shape.group))
            natural = of_row(shape.row(token, member)) * jnp.float32(LN2)
            operands.lse[q_start + token, head * shape.group + member] = natural

        first_chunk = lax.axis_index("chunk") == 0
        pl.when(first_chunk)(lambda: lax.fori_loop(0, q_len * shape.group, one, None))

    if not shape.by_request:
        pl.when((tiles == 0) & (q_len > 0))(clear)
    if operands.lse is not None:
        whole_lse = operands.whole_lse
        pl.when(tiles == 0)(lambda: send_lse(lambda row: jnp.float32(-jnp.inf)))
        pl.when((tiles > 0) & (first == last))(lambda: send_lse(lambda row: whole_lse[request, head, row]))

    @pl.when((tiles > 0) & (first < last))
    def _merge() -> None:
        peak, total, acc = _merged(shape, at_once, operands.part_out, operands.part_lse, first, last)
        weight, lse = normalized(peak, total)
        if operands.sinks is not None:
            weight = with_sink(weight, lse, columns_of(operands.sinks, 0, shape))
        o = acc * lax.broadcast_in_dim(weight, size, [1])
        if shape.by_request:
            store(o_s, o)
        else:
            store(transposed(o_s), o.astype(shape.out_dtype))
        if operands.merged_lse is not None or operands.lse is not None:
            store(lse_s, lse)
        plgpu.commit_smem()
        if operands.lse is not None:
            send_lse(lambda row: lse_s[row])
        if operands.merged_lse is not None:
            target = operands.merged_lse.at[request, head]
            pl.when(lax.axis_index("chunk") == 0)(lambda: plgpu.copy_smem_to_gmem(lse_s, target))
        if shape.by_request:
            rows = pl.ds(lax.axis_index("chunk") * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(o_s, out.at[request, head, rows, :])
            return
        for run in shape.runs:
            pl.when(run[0] < q_len)(functools.partial(send, *run))

    plgpu.wait_smem_to_gmem(0)


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


def decoded_lse(plan: DecodePlan, whole_lse: Any, merged_lse: Any, shape: DecodeShape, batch: PagedBatch) -> Any:
    """Lses in units of log 2 [num_tokens, num_heads] from what `decode` and `combine` left, -inf for all other rows."""
    in_parts = plan.requests[:-1, field.FIRST_SHARE] < plan.requests[:-1, field.LAST_SHARE]
    lse = rows_of_requests(jnp.where(in_parts[:, None, None], merged_lse, whole_lse), shape, batch)
    lse = jnp.where(attending_rows(plan, shape, batch)[:, None, None], lse, -jnp.inf)
    return lse.reshape(shape.num_tokens, -1)


def attending_rows(plan: DecodePlan, shape: DecodeShape, batch: PagedBatch) -> Any:
    """[num_tokens] bool: rows that attend to something, among those that decode takes."""
    request, _ = row_requests(batch, shape.num_tokens)
    return plan.requests[request, field.TILES] > 0


def _merged(
    shape: DecodeShape, at_once: int, part_out: Any, part_lse: Any, first: Any, last: Any
) -> tuple[Any, Any, Any]:
    """Maximum, sum and output of a chunk over the parts of a request, as in the online softmax of decode."""
    head, rows = lax.axis_index("head"), pl.ds(lax.axis_index("chunk") * CHUNK, CHUNK)
    size = (CHUNK, shape.columns)

    def load(share: Any) -> tuple[Any, Any]:
        # The request starts in its first share and goes on in the others; beyond the last the first part stands in.
        known = jnp.where(share > last, first, share)
        part = 2 * known + jnp.where(known == first, 0, 1)
        lse = plgpu.load(part_lse.at[part, head], layout=BY_ROW, optimized=False)
        o = plgpu.load(part_out.at[part, head, rows, :], layout=plgpu.Layout.WGMMA, optimized=False)
        beyond = jnp.full((shape.columns,), jnp.where(share > last, 1, 0)) == 1
        return jnp.where(beyond, -jnp.inf, lse), o

    def add(parts_from: Any, count: int, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        peak, total, acc = state
        parts = [load(parts_from + j) for j in range(count)]
        new = functools.reduce(jnp.maximum, [lse for lse, _ in parts], peak)
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        decay = jnp.exp2(peak - shift)
        total, acc = total * decay, acc * lax.broadcast_in_dim(decay, size, [1])
        for lse, o in parts:
            weight = jnp.exp2(lse - shift)
            total += weight
            acc += jnp.where(
                lax.broadcast_in_dim(weight, size, [1]) > 0, o * lax.broadcast_in_dim(weight, size, [1]), 0.0
            )
        return new, total, acc

    by_row = [plgpu.layout_cast(jnp.full((shape.columns,), x, jnp.float32), BY_ROW) for x in (-jnp.inf, 0.0)]
    acc = plgpu.layout_cast(jnp.zeros(size, jnp.float32), plgpu.Layout.WGMMA)
    # Most requests in parts are in two; others have as many loads in flight as there are registers for.
    count = last - first + 1
    state = lax.fori_loop(0, jnp.where(count <= 2, 1, 0), lambda _, state: add(first, 2, state), (*by_row, acc))
    turns = jnp.where(count <= 2, 0, lax.div(count + (at_once - 1), jnp.int32(at_once)))
    return lax.fori_loop(0, turns, lambda i, state: add(first + i * at_once, at_once, state), state)
