"""Which query head a row of prefill's tiles belongs to, and values per head."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.fragments import BY_ROW
from jaxpaged.pallas.prefill_items import Item
from jaxpaged.pallas.prefill_shape import WG_ROWS, PrefillShape
from jaxpaged.pallas.prefill_state import Operands


def head_slot(shape: PrefillShape, row: Any) -> Any:
    """The slot of a row of a packed tile, among those of its warpgroup."""
    return row >> (shape.wg_tokens.bit_length() - 1)


def slopes_row(operands: Operands, item: Item) -> Any:
    """The row of the slopes that an item's request has, or that all have."""
    return item.table_row if operands.slopes.shape[0] > 1 else 0


def of_head_slots(shape: PrefillShape, values: Any, plan_head: Any, wg: Any, size: tuple[int, ...], row: Any) -> Any:
    """A packed tile's values per query head, from a ref [num_heads], as an array of `size` whose rows are `row`."""
    result = jnp.zeros(size, jnp.float32)
    first = wg * shape.heads_per_wg
    for slot in range(shape.heads_per_wg):
        head = jnp.minimum(first + slot, shape.group - 1) + plan_head * shape.group
        mine = head_slot(shape, row) == slot
        result = jnp.where(mine, jnp.full(size, values[head]), result)
    return result


def sinks_of_rows(shape: PrefillShape, sinks: Any, plan_head: Any, wg: Any) -> Any:
    """The sink of each row of a warpgroup, from a ref [num_heads]."""
    if not shape.tiling.packed or shape.splits_tokens:
        head = plan_head if not shape.tiling.packed else plan_head * shape.group
        return plgpu.layout_cast(jnp.full((WG_ROWS,), sinks[head]), BY_ROW)
    row = plgpu.layout_cast(plgpu.broadcasted_iota(jnp.int32, (WG_ROWS,), 0, layout=BY_ROW), BY_ROW)
    return of_head_slots(shape, sinks, plan_head, wg, (WG_ROWS,), row)
