"""The second step of prefill where tiles were split among CTAs: merge their parts."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas import prefill_plan as field
from jaxpaged.pallas.fragments import BY_ROW
from jaxpaged.pallas.mosaic import Interpreter, kernel, store
from jaxpaged.pallas.paged_tiles import CHUNK, Views, split_views, two_views
from jaxpaged.pallas.prefill_heads import sinks_of_rows
from jaxpaged.pallas.prefill_plan import PrefillPlan
from jaxpaged.pallas.prefill_shape import WG_ROWS, PrefillShape
from jaxpaged.pallas.scores import normalized, with_sink

SIZE = (WG_ROWS, CHUNK)
"""Rows and columns of a CTA."""


def merge_parts(
    plan: PrefillPlan,
    part_out: Any,
    part_lse: Any,
    sinks: Any,
    shape: PrefillShape,
    out: Any,
    interpret: Interpreter | None,
    *,
    return_lse: bool,
) -> Any:
    """Write the rows of the plan's requests to `out`, a reference to [num_tokens, num_heads, v_head_size].

    Args:
      part_out, part_lse: what `prefill` left, in parts.
      sinks: [num_heads] float, or None.

    Returns:
      With `return_lse` the lses in units of log 2 [most tiles, heads of the plan, 2 * WG_ROWS] float32, else None.
    """
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    given = _Operands(plan.work, plan.counts, plan.parts.reshape(1), part_out, part_lse, sinks, out)
    most, heads, rows = part_lse.shape
    lses = (most // shape.tiling.most_parts, heads, rows)
    names = [name for name, x in given._asdict().items() if x is not None] + ["lse"] * return_lse
    results = kernel(
        functools.partial(_merge_list, shape, interpret, names),
        out_type=[jax.ShapeDtypeStruct(lses, jnp.float32)] * return_lse,
        scratch_types=dict(o_s=two_views(SIZE, shape.out_dtype, interpret), lse_s=plgpu.SMEM((WG_ROWS,), jnp.float32)),
        grid=(shape.tiling.num_ctas, 2, shape.padded_v_size // CHUNK),
        grid_names=("list", "half", "chunk"),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_prefill_merge",
    )(*(x for x in given if x is not None))
    return results[0] if return_lse else None


class _Operands(NamedTuple):
    """References to global memory."""

    work: Any = None
    counts: Any = None
    parts: Any = None
    part_out: Any = None
    part_lse: Any = None
    sinks: Any = None
    out: Any = None
    lse: Any = None


class _Tile(NamedTuple):
    """A tile whose first part is in a CTA's list.

    Attributes:
      first_row: of the query.
      rows: number of tokens.
      part: number of the first part.
    """

    first_row: Any
    rows: Any
    head: Any
    part: Any


def _merge_list(
    shape: PrefillShape, interpret: Interpreter | None, names: Sequence[str], *refs: Any, o_s: Any, lse_s: Any
) -> None:
    """The kernel: merge half of the rows and a chunk of the columns of those tiles whose first part is in a list."""
    operands = _Operands(**dict(zip(names, refs, strict=True)))
    o_views = split_views(o_s, interpret)
    cta, half = lax.axis_index("list"), lax.axis_index("half")

    def visit(i: Any, _: None) -> None:
        first_row, rows, head, part = (
            operands.work[cta, i, f] for f in (field.FIRST_ROW, field.ROWS, field.HEAD, field.TILE)
        )
        rows -= half * WG_ROWS if shape.splits_tokens else 0
        first_row += half * WG_ROWS if shape.splits_tokens else 0
        tile = _Tile(first_row, rows, head, part)
        is_first = lax.rem(part, jnp.int32(shape.tiling.most_parts)) == 0
        pl.when(is_first & (rows > 0))(lambda: _merge_tile(shape, operands, tile, o_views, lse_s))

    lax.fori_loop(0, operands.counts[cta], visit, None)


def _merge_tile(shape: PrefillShape, operands: _Operands, tile: _Tile, o_s: Views, lse_s: Any) -> None:
    peak, total, acc = _merged(operands, tile)
    weight, lse = normalized(peak, total)
    if operands.sinks is not None:
        sinks = sinks_of_rows(shape, operands.sinks, tile.head, lax.axis_index("half"))
        weight = with_sink(weight, lse, sinks)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was sent before has left shared memory
    store(o_s.tensor_core, (acc * lax.broadcast_in_dim(weight, SIZE, [0])).astype(shape.out_dtype))
    if operands.lse is not None:
        store(lse_s, lse)
    plgpu.commit_smem()
    half = lax.axis_index("half")
    if operands.lse is not None:
        number = lax.div(tile.part, jnp.int32(shape.tiling.most_parts))
        target = operands.lse.at[number, tile.head, pl.ds(half * WG_ROWS, WG_ROWS)]
        pl.when(lax.axis_index("chunk") == 0)(lambda: plgpu.copy_smem_to_gmem(lse_s, target))
    for wg in range(2):
        pl.when(half == wg)(functools.partial(_send, shape, operands, tile, o_s.tma, wg))
    plgpu.wait_smem_to_gmem(0)


def _merged(operands: _Operands, tile: _Tile) -> tuple[Any, Any, Any]:
    """Maximum, sum and output of a chunk over the parts of a tile, as in the online softmax."""
    rows = pl.ds(lax.axis_index("half") * WG_ROWS, WG_ROWS)
    columns = pl.ds(lax.axis_index("chunk") * CHUNK, CHUNK)

    def add(part: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        peak, total, acc = state
        lse = plgpu.load(operands.part_lse.at[part, tile.head, rows], layout=BY_ROW, optimized=False)
        o = plgpu.load(operands.part_out.at[part, tile.head, rows, columns], layout=plgpu.Layout.WGMMA, optimized=False)
        new = jnp.maximum(peak, lse)
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        decay, weight = jnp.exp2(peak - shift), jnp.exp2(lse - shift)
        acc = acc * lax.broadcast_in_dim(decay, SIZE, [0]) + o * lax.broadcast_in_dim(weight, SIZE, [0])
        return new, total * decay + weight, acc

    peak, total = (plgpu.layout_cast(jnp.full((WG_ROWS,), x, jnp.float32), BY_ROW) for x in (-jnp.inf, 0.0))
    acc = plgpu.layout_cast(jnp.zeros(SIZE, jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(tile.part, tile.part + operands.parts[0], add, (peak, total, acc))


def _send(shape: PrefillShape, operands: _Operands, tile: _Tile, o_s: Any, wg: int) -> None:
    """Start copying the tile's tokens of every head slot of a half to the output."""
    columns = pl.ds(lax.axis_index("chunk") * CHUNK, CHUNK)

    def send(first: Any, count: int) -> None:
        for place, head in enumerate(shape.head_slots(wg)):
            q_head = tile.head * shape.group + head if shape.tiling.packed else tile.head
            source = o_s.at[pl.ds(place * shape.wg_tokens + first, count), :]
            plgpu.copy_smem_to_gmem(source, operands.out.at[pl.ds(tile.first_row + first, count), q_head, columns])

    full = tile.rows >= shape.wg_tokens
    pl.when(full)(lambda: send(0, shape.wg_tokens))
    # A neighbour's rows must not be touched: a tile that is not full goes row by row.
    lax.fori_loop(0, jnp.where(full, 0, tile.rows), lambda token, _: send(token, 1), None)
