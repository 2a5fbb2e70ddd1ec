"""Decode's steps on 8-bit caches: queries, keys and values in the type of the products, and the scales.

Products are exact in float16 for float8 and int8 numbers, and both become float16 in few instructions, but bfloat16
queries may be too large for it: each row is brought near 1 by a power of two. Weights that scales of single tokens are
multiplied into may be too small: values are of the queries' type then.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.kv_cache import FLOAT8_DTYPES, KVCache
from jaxpaged.pallas.decode_shape import DecodeShape
from jaxpaged.pallas.decode_state import Memory, Operands
from jaxpaged.pallas.decode_teams import BY_ROW
from jaxpaged.pallas.fragments import (
    as_operand,
    as_permuted,
    by_16_bytes,
    by_four,
    columns_in_turn,
    int8_as_float16,
    reduced,
)
from jaxpaged.pallas.matmul import dot, dot_onto, transposed
from jaxpaged.pallas.mosaic import Interpreter, store
from jaxpaged.pallas.paged_tiles import CHUNK
from jaxpaged.pallas.row_tiles import rows_layout

WIDE_KEYS = jnp.dtype(jnp.float16)
UNIT = 1
"""The row of `Memory.by_column` for the units of queries."""
EXPONENT = 0x7F800000
"""The bits of a float32 that say between which powers of two it lies."""


def product_dtype(query_dtype: Any, cache: KVCache) -> Any:
    """Of values and weights."""
    widened = cache.dtype in FLOAT8_DTYPES or (cache.dtype == jnp.int8 and not has_row_scales(cache))
    return jnp.dtype(jnp.float16 if widened else query_dtype)


def has_row_scales(cache: KVCache) -> bool:
    """Whether each token and head has a scale."""
    return any(scale is not None and scale.ndim == 3 for scale in (cache.k_scale, cache.v_scale))


def scale_refusal(query_dtype: Any, cache: KVCache) -> str | None:
    """Why decode can't take the scales of an 8-bit cache, or None."""
    if not has_row_scales(cache):
        return None
    if not all(scale is not None and scale.ndim == 3 for scale in (cache.k_scale, cache.v_scale)):
        return "the kernels take scales per token and head for both keys and values, or neither"
    if product_dtype(query_dtype, cache) == jnp.float16:
        return "the kernels take scales per token and head with int8 caches and bfloat16 queries"
    if math.gcd(cache.block_size, 64) * cache.num_kv_heads % 32:
        return (
            "the kernels take scales per token and head where those of a block fill rows of 32, not "
            f"{cache.block_size} tokens of {cache.num_kv_heads} kv heads"
        )
    return None


def scale_operands(cache: KVCache, shape: DecodeShape) -> dict[str, Any]:
    """The cache's scales as kernels take them: `k_scale` and `v_scale` [1] or [num_kv_heads], or `k_scales` and
    `v_scales` [num_blocks, .., columns of `PagedTiles.scale_rows`]."""
    given = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    if has_row_scales(cache):
        width = shape.tiles("key").scale_rows[1]
        return {f"{name}s": scale.reshape(cache.num_blocks, -1, width) for name, scale in given.items()}
    return {name: scale.reshape(-1) for name, scale in given.items() if scale is not None}


def scale_of_head(scale: Any) -> Any:
    """From a reference to a scale per tensor or kv head, that of this CTA, of one kv head if there are several."""
    return scale[lax.axis_index("head") if scale.shape[0] > 1 else 0]


def scratch(shape: DecodeShape, *, row_scales: bool) -> dict[str, Any]:
    """Shared memory for what is widened, and for scales."""
    keys, values = shape.tiles("key"), shape.tiles("value")
    each = () if shape.warpgroups == 1 else (shape.warpgroups,)
    found: dict[str, Any] = {
        "queries": plgpu.SMEM((*each, 2 * keys.chunks, shape.columns, CHUNK), WIDE_KEYS, transforms=shape.swizzled),
        "values": plgpu.SMEM((*each, shape.scores[0], values.head_size), shape.dtype, transforms=shape.swizzled),
    }
    if row_scales:
        scales = plgpu.SMEM((shape.stages, *keys.scale_rows), jnp.float32)
        found |= {"k_scales": scales, "v_scales": scales}
    return found


def widen_queries(
    shape: DecodeShape, operands: Operands, memory: Memory, q_slot: Any, interpret: Interpreter | None
) -> Any:
    """Put a request's queries into `memory.queries` in the type of widened keys, in the order of `as_operand`.

    Returns:
      What makes scores of products with the keys: [columns] float32, a scalar, or None for 1.
    """
    keys = shape.tiles("key")
    columns = keys.row_columns
    parts = [
        plgpu.load(memory.q.at[q_slot, :, pl.ds(c, columns)], layout=by_four(columns), optimized=False)
        for c in range(0, keys.head_size, columns)
    ]
    scaled = shape.query_dtype != WIDE_KEYS
    if scaled:
        wide = [x.astype(jnp.float32) for x in parts]
        largest = functools.partial(_largest, shape, memory, by_four(columns), interpret)
        unit, inverse = _unit(list(map(largest, wide)))
        store(memory.by_column.at[UNIT], unit)
        parts = [x * lax.broadcast_in_dim(inverse, x.shape, [0]) for x in wide]
    for part, x in enumerate(parts):
        permuted = as_permuted(x.astype(WIDE_KEYS), interpret)
        first = q_slot * keys.chunks + part * columns // CHUNK
        for c in range(columns // CHUNK):
            store(memory.queries.at[first + c], permuted[:, c * CHUNK : (c + 1) * CHUNK])
    plgpu.commit_smem()
    plgpu.barrier_arrive(memory.q_empty.at[q_slot])
    scale = None if operands.k_scale is None else scale_of_head(operands.k_scale)
    if not scaled:
        return scale
    units = plgpu.load(memory.by_column.at[UNIT], layout=BY_ROW, optimized=False)
    return units if scale is None else units * scale


def _largest(shape: DecodeShape, memory: Memory, layout: Any, interpret: Interpreter | None, x: Any) -> Any:
    """The largest magnitude of each row."""
    if shape.warpgroups == 1:
        return jnp.abs(x).max(axis=1)
    return reduced("max", jnp.abs(x), memory.reductions, interpret, 1, layout)


def _unit(peaks: Sequence[Any]) -> tuple[Any, Any]:
    """Of rows in pieces with these largest elements, a power of two near the largest, and its inverse, both normal."""
    peak = functools.reduce(jnp.maximum, peaks)
    bits = lax.bitcast_convert_type(peak, jnp.int32) & EXPONENT
    bits = jnp.minimum(jnp.maximum(bits, 1 << 23), 253 << 23)
    return lax.bitcast_convert_type(bits, jnp.float32), lax.bitcast_convert_type((254 << 23) - bits, jnp.float32)


def products(
    shape: DecodeShape, memory: Memory, slot: Any, q_slot: Any, interpret: Interpreter | None, *, at_once: bool
) -> Any:
    """Products with 8-bit keys, of all chunks at once or of one after the other: widened keys take registers."""
    keys = shape.tiles("key")
    columns = keys.row_columns

    def pairs(first: int) -> list[tuple[Any, Any]]:
        x = _stored(shape, memory.k, slot, (0, shape.scores[0]), (first, columns), by_16_bytes(columns))
        k = as_operand(_widened(x, WIDE_KEYS, by_16_bytes(columns), interpret), interpret)
        chunk = q_slot * keys.chunks + first // CHUNK
        queries = [transposed(memory.queries.at[chunk + c]) for c in range(columns // CHUNK)]
        return [(k[:, c * CHUNK : (c + 1) * CHUNK], q) for c, q in enumerate(queries)]

    size = shape.scores
    all_pairs = [pair for first in range(0, keys.head_size, columns) for pair in pairs(first)]
    if at_once:
        return dot(all_pairs, size, interpret)
    s = dot(all_pairs[:1], size, interpret)
    for k, q in all_pairs[1:]:
        (s,) = dot_onto([s], k, [q], interpret)
    return s


def widen_values(
    shape: DecodeShape,
    memory: Memory,
    slot: Any,
    used: Callable[[tuple[int, int], Any, int], Any] | None,
    interpret: Interpreter | None,
) -> None:
    """Put a tile's values into `memory.values` in the type of the products.

    Args:
      used: of a size, a layout and a first row, where some row attends; elsewhere values become 0.
    """
    values = shape.tiles("value")
    columns = values.row_columns
    layout = rows_layout(columns, shape.dtype.itemsize)
    count = CHUNK * CHUNK // columns // 2  # rows at a time: more take registers
    for start, first in itertools.product(range(0, values.head_size, columns), range(0, shape.scores[0], count)):
        v = _stored(shape, memory.v, slot, (first, count), (start, columns), layout)
        v = _widened(v, shape.dtype, layout, interpret)
        if used is not None:
            v = jnp.where(used(v.shape, layout, first), v, jnp.zeros_like(v))
        store(memory.values.at[pl.ds(first, count), pl.ds(start, columns)], v)


def _widened(x: Any, dtype: Any, layout: Any, interpret: Interpreter | None) -> Any:
    """8-bit numbers in a type that holds each of them exactly."""
    if x.dtype == jnp.int8 and dtype == jnp.float16:
        return int8_as_float16(x, layout, interpret)
    return x.astype(dtype)


def _stored(
    shape: DecodeShape, smem: Any, slot: Any, rows: tuple[int, int], columns: tuple[int, int], layout: Any
) -> Any:
    """Some rows and columns of 8-bit numbers in registers."""
    x = plgpu.load(smem.at[slot, pl.ds(*rows), pl.ds(*columns)], layout=layout, optimized=False)
    return x if x.dtype == shape.cache_dtype else lax.bitcast_convert_type(x, shape.cache_dtype)


def row_scales(shape: DecodeShape, scales: Any, slot: Any, size: tuple[int, ...], interpret: Interpreter | None) -> Any:
    """The scale of each row of a tile, position by position for each of this CTA's kv heads, along the first axis of an
    array."""
    first = lax.axis_index("head") * shape.heads
    by_row = columns_in_turn(scales.at[slot], shape.dims.num_kv_heads, first, shape.heads, interpret)
    return lax.broadcast_in_dim(by_row, size, [0])
