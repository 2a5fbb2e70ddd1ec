"""Attention to 8-bit caches: in which type the products are taken, and the factors that stand for the scales.

Products are exact in float16 for float8 numbers, and in bfloat16 too for int8. float8 becomes float16 in one
instruction, but bfloat16 queries may be too large for it: each row is brought near 1 by a power of two.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxpaged.metadata.kv_cache import FLOAT8_DTYPES, KVCache
from jaxpaged.pallas.fragments import permuted_columns


class Dequantization(NamedTuple):
    """What turns products with the numbers in an 8-bit cache into scores and outputs."""

    factors: Any
    """[num_reqs or 1, num_kv_heads, columns] float32, of scores."""
    v_factors: Any
    """[num_kv_heads] float32, of outputs."""
    k_scales: Any
    """[num_blocks, .., columns of `PagedTiles.scale_rows`] float32, of scores, or None."""
    v_scales: Any
    """Likewise of values."""


def product_dtype(query_dtype: Any, cache: KVCache) -> Any:
    return jnp.dtype(jnp.float16) if cache.dtype in FLOAT8_DTYPES else jnp.dtype(query_dtype)


def scale_refusal(query_dtype: Any, cache: KVCache) -> str | None:
    """Why decode can't take the scales of an 8-bit cache, or None."""
    by_row = [scale is not None and scale.ndim == 3 for scale in (cache.k_scale, cache.v_scale)]
    if not any(by_row):
        return None
    if not all(by_row):
        return "the kernels take scales per token and head for both keys and values, or neither"
    if product_dtype(query_dtype, cache) == jnp.float16:
        return "the kernels take scales per token and head with int8 caches and bfloat16 queries"
    if math.gcd(cache.block_size, 64) * cache.num_kv_heads % 32:
        return (
            "the kernels take scales per token and head where those of a block fill rows of 32, not "
            f"{cache.block_size} tokens of {cache.num_kv_heads} kv heads"
        )
    return None


def dequantization(query: Any, cache: KVCache, q_start: Any, shape: Any) -> tuple[Any, Dequantization]:
    """The query in the type of the products and in the order of `as_operand`, and the factors to undo its scaling and
    the cache's.

    Args:
      q_start: [num_reqs] int32, the first row of each request.
      shape: the `DecodeShape`.
    """
    heads = (shape.dims.num_kv_heads, shape.group)
    by_row = cache.k_scale is not None and cache.k_scale.ndim == 3
    k_factor, v_factor = (
        jnp.ones(heads[0], jnp.float32) if scale is None or scale.ndim == 3 else jnp.broadcast_to(scale, heads[:1])
        for scale in (cache.k_scale, cache.v_scale)
    )
    if shape.dtype == query.dtype:
        factors = jnp.broadcast_to(k_factor[None, :, None], (1, heads[0], shape.columns))
    else:
        peak = jnp.max(jnp.abs(query.astype(jnp.float32)), axis=-1)
        unit = jnp.where((peak > 0) & (peak < jnp.inf), 2.0 ** jnp.floor(jnp.log2(peak)), 1.0)
        query = (query.astype(jnp.float32) / unit[..., None]).astype(shape.dtype)
        rows = jnp.minimum(q_start[:, None] + jnp.arange(shape.max_query_len), shape.num_tokens - 1)
        by_row_unit = unit.reshape(-1, *heads)[rows] * k_factor[:, None]  # [num_reqs, tokens, num_kv_heads, group]
        factors = by_row_unit.swapaxes(1, 2).reshape(-1, heads[0], shape.rows)
        factors = jnp.pad(factors, [(0, 0), (0, 0), (0, shape.columns - shape.rows)])
    scales: tuple[Any, Any] = (None, None)
    if by_row:
        width = shape.tiles("key").scale_rows[1]
        scales = tuple(scale.reshape(cache.num_blocks, -1, width) for scale in (cache.k_scale, cache.v_scale))
    query = permuted_columns(lax.convert_element_type(query, shape.dtype), shape.tiles("key").row_columns)
    return query, Dequantization(factors, v_factor, *scales)
