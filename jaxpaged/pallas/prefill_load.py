"""The warpgroup of prefill that loads: queries, keys and values by TMA, each by a warp of its own."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.mosaic import Interpreter, drain, one_warp_each
from jaxpaged.pallas.paged_tiles import Span, Stream, chunk_slice, load_tiles
from jaxpaged.pallas.prefill_items import Item, Visit, for_each_item, kv_head
from jaxpaged.pallas.prefill_shape import WG_ROWS, PrefillShape
from jaxpaged.pallas.prefill_state import Memory, Operands


def load_all(shape: PrefillShape, operands: Operands, memory: Memory, interpret: Interpreter | None) -> None:
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
