"""From prefill's registers to the output, or to the workspace where tiles are in parts."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas import prefill_plan as field
from jaxpaged.pallas.mosaic import store
from jaxpaged.pallas.paged_tiles import chunk_slice
from jaxpaged.pallas.prefill_heads import sinks_of_rows
from jaxpaged.pallas.prefill_items import Item
from jaxpaged.pallas.prefill_shape import WG_ROWS, PrefillShape
from jaxpaged.pallas.prefill_state import Memory, Operands, Softmax
from jaxpaged.pallas.prefill_widen import scale_of_item
from jaxpaged.pallas.scores import normalized, with_sink


def store_rows(
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
