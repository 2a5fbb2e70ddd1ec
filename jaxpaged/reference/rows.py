"""Between a cache buffer's own axis order and rows [.., num_kv_heads, head_size]."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.metadata.layout import Which


def cast_bits(x: Any, dtype: Any) -> Any:
    """`x` with its bits read as another dtype of the same width, where it isn't of that dtype already."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def to_buffer_axes(rows: Any, cache: KVCache, which: Which) -> Any:
    """Rows [n, num_kv_heads, head_size] in the axis order that `layout.index(which, dims, blocks, slots)` selects."""
    axes = cache.layout.rest(which, "ns")
    if "x" in axes:
        x = cache.buffer(which).shape[cache.layout.axes(which).index("x")]
        rows = rows.reshape(*rows.shape[:-1], -1, x)
    order = ["h", "d", "x"] if "x" in axes else ["h", "d"]
    return rows.transpose(0, *(1 + order.index(axis) for axis in axes))


def blocks_by_head(selected: Any, cache: KVCache, which: Which) -> Any:
    """Blocks that `layout.index(which, dims, blocks)` has selected, as [num_kv_heads, n, block_size, head_size]."""
    axes = cache.layout.rest(which, "n")
    order = ["h", "n", "s", "d"] + (["x"] if "x" in axes else [])
    selected = selected.transpose([("n", *axes).index(axis) for axis in order])
    return selected.reshape(*selected.shape[:3], -1)


def dequantize(rows: Any, cache: KVCache, which: Which, token_scale: Any) -> Any:
    """Rows [num_kv_heads, n, head_size] as the cache keeps them, as float32 values.

    Args:
      token_scale: [num_kv_heads, n], used when the cache has a scale per token and head.
    """
    values = cast_bits(rows, cache.dtype).astype(jnp.float32)
    scale = cache.scale(which)
    if scale is None:
        return values
    if scale.ndim == 3:
        return values * token_scale[:, :, None]
    return values * (scale if scale.ndim == 0 else scale[:, None, None])
