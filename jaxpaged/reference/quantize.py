"""Numbers of 8 bits for KV caches: value = stored * scale."""

from typing import Any

import jax.numpy as jnp
import numpy as np

_INT8_MAX = 127  # symmetric: -128 stays unused


def largest(dtype: Any) -> float:
    """The largest number that the quantised `dtype` stores."""
    return float(_INT8_MAX if jnp.dtype(dtype) == jnp.int8 else jnp.finfo(dtype).max)


def quantize(x: Any, dtype: Any, scale: Any) -> Any:
    """`x / scale` rounded to the nearest number of `dtype`, ties to even, saturated at its largest.

    Args:
      x: float array.
      dtype: float8_e4m3fn, float8_e5m2 (NaN stays NaN) or int8 (-127 to 127; NaN becomes 0).
      scale: float32, broadcasts against `x`.
    """
    scaled = x.astype(jnp.float32) / scale
    limit = largest(dtype)
    if jnp.dtype(dtype) == jnp.int8:
        scaled = jnp.round(jnp.nan_to_num(scaled, nan=0.0, posinf=limit, neginf=-limit))
    return jnp.clip(scaled, -limit, limit).astype(dtype)


def row_scale(x: Any, dtype: Any) -> Any:
    """The scale that makes each row's (last axis) largest magnitude the largest of `dtype`; 1 for a row of zeros.

    It is a normal float32 number at least: a smaller one is flushed to 0, and dividing by it would give NaN.
    """
    peak = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1)
    return jnp.where(peak > 0, jnp.maximum(peak * np.float32(1 / largest(dtype)), jnp.finfo(jnp.float32).tiny), 1.0)
