"""Prefill on 8-bit caches: a warpgroup that brings keys and values into the type of the products, ahead of those that
compute, which find their ring as if TMA had filled it.

bfloat16 and float16 hold each 8-bit number exactly. The scales are left to the scores and to the output.
"""

import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.kv_cache import FLOAT8_DTYPES, KVCache
from jaxpaged.pallas.mosaic import Interpreter, drain, store
from jaxpaged.pallas.paged_tiles import PagedTiles
from jaxpaged.pallas.prefill_items import Item, Visit, for_each_item, kv_head
from jaxpaged.pallas.prefill_shape import PrefillShape
from jaxpaged.pallas.prefill_state import Memory, Operands
from jaxpaged.pallas.row_tiles import rows_layout

ROWS = 32
"""Rows that are in registers at a time."""


def scale_operands(cache: KVCache) -> dict[str, Any]:
    """The cache's scales, [1] or [num_kv_heads], as the kernel takes them."""
    given = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    return {name: scale.reshape(-1) for name, scale in given.items() if scale is not None}


def scale_of_item(shape: PrefillShape, scale: Any, item: Item) -> Any:
    """From a reference to a scale per tensor or kv head, that of an item's head."""
    return scale[kv_head(shape, item) if scale.shape[0] > 1 else 0]


def positive_scale(scale: Any) -> Any:
    """A scale's magnitude, whose sign `widen` gives the keys, so that maxima stay maxima; of 0 next to nothing, since
    masked scores are infinite."""
    return jnp.maximum(jnp.abs(scale), jnp.float32(1e-30))


def scratch(shape: PrefillShape, interpret: Interpreter | None) -> dict[str, Any]:
    """Shared memory and barriers for 8-bit numbers, as TMA brings them."""
    found: dict[str, Any] = {}
    for name, which in (("narrow_k", "key"), ("narrow_v", "value")):
        tiles = shape.narrow_tiles(which)
        found[name], found[f"{name}_full"] = tiles.smem(interpret), tiles.barrier()
        found[f"{name}_empty"] = plgpu.Barrier(num_barriers=tiles.stages)
    return found


def widen(shape: PrefillShape, operands: Operands, memory: Memory, interpret: Interpreter | None) -> None:
    """The warpgroup: each step's keys, then its values."""
    plgpu.set_max_registers(shape.registers[2], action="decrease")

    def widen_item(visit: Visit) -> None:
        sign: Any = None
        if operands.k_scale is not None:
            sign = jnp.where(scale_of_item(shape, operands.k_scale, visit.item) < 0, -1.0, 1.0)

        def step(i: Any, _: None) -> None:
            _widen_tile(shape, shape.tiles("key"), memory, visit.steps + i, sign)
            _widen_tile(shape, shape.tiles("value"), memory, visit.steps + i, None)

        lax.fori_loop(0, visit.item.steps, step, None)

    _, steps = for_each_item(shape, operands, widen_item)
    if interpret is not None:
        for empty in (memory.k_empty, memory.v_empty):
            drain(empty, steps, shape.stages)


def _widen_tile(shape: PrefillShape, tiles: PagedTiles, memory: Memory, before: Any, sign: Any) -> None:
    """Bring a tile, before which `before` were, from the ring of 8-bit numbers into the other one.

    Args:
      sign: what numbers are multiplied by, or None.
    """
    name = "k" if tiles.which == "key" else "v"
    narrow, full, empty = (getattr(memory, f"narrow_{name}{end}") for end in ("", "_full", "_empty"))
    ring, ring_full, ring_empty = (getattr(memory, f"{name}{end}") for end in ("", "_full", "_empty"))
    source, slot = lax.rem(before, jnp.int32(shape.narrow_stages)), lax.rem(before, jnp.int32(shape.stages))
    plgpu.barrier_wait(full.at[source])
    pl.when(before >= shape.stages)(lambda: plgpu.barrier_wait(ring_empty.at[slot]))
    columns = shape.narrow_tiles(tiles.which).row_columns
    layout = rows_layout(columns, jnp.dtype(shape.dtype).itemsize)
    for start, first in itertools.product(range(0, tiles.head_size, columns), range(0, tiles.tile, ROWS)):
        where = (pl.ds(first, ROWS), pl.ds(start, columns))
        x = plgpu.load(narrow.at[source, *where], layout=layout, optimized=False)
        x = _widened(x, shape.cache_dtype, jnp.dtype(shape.dtype))
        store(ring.at[slot, *where], x if sign is None else x * sign.astype(shape.dtype))
    plgpu.commit_smem()  # TMA may write here anew, and the tensor cores read there
    plgpu.barrier_arrive(empty.at[source])
    plgpu.barrier_arrive(ring_full.at[slot])


def _widened(x: Any, cache_dtype: Any, dtype: Any) -> Any:
    if x.dtype != cache_dtype:
        x = lax.bitcast_convert_type(x, cache_dtype)
    if x.dtype in FLOAT8_DTYPES and dtype == jnp.bfloat16:
        x = x.astype(jnp.float16).astype(jnp.float32)  # the hardware makes float16 of float8, and nothing else
    return x.astype(dtype)
