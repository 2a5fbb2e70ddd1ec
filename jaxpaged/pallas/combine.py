"""The second step of decode: combine the parts of requests that several CTAs shared, and clear rows without a key.

The parts are weighted by their lses, as in flash-decoding (Dao et al., 2023).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.pallas import decode_plan as field
from jaxpaged.pallas.decode import BY_ROW, DecodeShape, per_column
from jaxpaged.pallas.decode_plan import DecodePlan
from jaxpaged.pallas.matmul import transposed
from jaxpaged.pallas.mosaic import Interpreter, kernel, store, wait_for_previous_kernel
from jaxpaged.pallas.paged_tiles import CHUNK
from jaxpaged.pallas.prefill_rows import row_requests
from jaxpaged.pallas.scores import normalized, with_sink

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
    return_lse: bool,
) -> Any:
    """Write to `out` the rows of requests that decode left in parts, and 0 to rows that attend to nothing.

    Args:
      part_out, part_lse: see `decode`.
      out: a reference to the output [num_tokens, num_heads, v_head_size]; one by request is not cleared.

    Returns:
      With `return_lse` the lses of requests in parts [num_reqs, num_kv_heads, columns] in units of log 2, and anything
      for the others; else None.
    """
    chunks = shape.padded_v_size // CHUNK
    columns = per_column(sinks, shape)
    operands = [plan.requests, part_out, part_lse, *([] if columns is None else [columns]), out]
    heads, num_reqs = shape.dims.num_kv_heads, plan.requests.shape[0] - 1
    lse = [jax.ShapeDtypeStruct((num_reqs, heads, shape.columns), jnp.float32)] if return_lse else []
    at_once = MANY if shape.num_shares > 4 * num_reqs else FEW
    at_once = max(2, at_once * 8 // shape.columns)
    results = kernel(
        functools.partial(_combine, shape, at_once, columns is not None, interpret),
        out_type=lse,
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
    )(*operands)
    return results[0] if return_lse else None


def _combine(
    shape: DecodeShape, at_once: int, has_sinks: bool, interpret: Interpreter | None, *refs: Any, o_s: Any, lse_s: Any
) -> None:
    requests, part_out, part_lse, *rest = refs
    sinks = rest.pop(0) if has_sinks else None
    out, *merged_lse = rest
    request = lax.axis_index("request")
    tiles, q_start, q_len, first, last = (
        requests[request, f] for f in (field.TILES, field.Q_START, field.Q_LEN, field.FIRST_SHARE, field.LAST_SHARE)
    )
    wait_for_previous_kernel(interpret)  # decode, but the plan was there before
    size = (CHUNK, shape.columns)

    def send(token: Any, row: Any) -> None:
        heads = pl.ds(lax.axis_index("head") * shape.group, shape.group)
        where = pl.ds(lax.axis_index("chunk") * CHUNK, CHUNK)
        plgpu.copy_smem_to_gmem(o_s.at[pl.ds(row, shape.group), :], out.at[token, heads, where])

    def clear() -> None:
        zeros = plgpu.layout_cast(jnp.zeros(size, shape.out_dtype), plgpu.Layout.WGMMA)
        store(transposed(o_s), zeros)
        plgpu.commit_smem()
        lax.fori_loop(q_start, q_start + q_len, lambda token, _: send(token, 0), None)

    if not shape.by_request:
        pl.when((tiles == 0) & (q_len > 0))(clear)

    @pl.when((tiles > 0) & (first < last))
    def _merge() -> None:
        peak, total, acc = _merged(shape, at_once, part_out, part_lse, first, last)
        weight, lse = normalized(peak, total)
        if sinks is not None:
            sink = plgpu.load(sinks.at[0, lax.axis_index("head")], layout=BY_ROW, optimized=False)
            weight = with_sink(weight, lse, sink)
        o = acc * lax.broadcast_in_dim(weight, size, [1])
        if shape.by_request:
            store(o_s, o)
        else:
            store(transposed(o_s), o.astype(shape.out_dtype))
        if merged_lse:
            store(lse_s, lse)
        plgpu.commit_smem()
        if merged_lse:
            target = merged_lse[0].at[request, lax.axis_index("head")]
            pl.when(lax.axis_index("chunk") == 0)(lambda: plgpu.copy_smem_to_gmem(lse_s, target))
        if shape.by_request:
            rows = pl.ds(lax.axis_index("chunk") * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(o_s, out.at[request, lax.axis_index("head"), rows, :])
            return
        for token in range(shape.max_query_len):
            pl.when(token < q_len)(functools.partial(send, q_start + token, token * shape.group))

    plgpu.wait_smem_to_gmem(0)


def rows_of_requests(x: Any, shape: DecodeShape, batch: PagedBatch) -> Any:
    """[num_reqs, num_kv_heads, .., columns] as [num_tokens, num_kv_heads, .., group]; other rows get anything."""
    request, index = row_requests(batch, shape.num_tokens)
    by_column = x[jnp.minimum(request, batch.num_reqs - 1)]
    if shape.max_query_len == 1:
        return by_column[..., : shape.group]
    column = jnp.clip(index, 0, shape.max_query_len - 1)[:, None] * shape.group + jnp.arange(shape.group)
    return jnp.take_along_axis(by_column, column.reshape(-1, *(1,) * (x.ndim - 2), shape.group), axis=-1)


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
