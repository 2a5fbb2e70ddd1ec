"""Numbers of 8 bits in a kernel's registers: `reference.quantize` in what Mosaic GPU can do."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.fragments import along_rows, divide, divide_short
from jaxpaged.pallas.mosaic import Interpreter
from jaxpaged.reference.quantize import largest


def quantize(
    x: Any, dtype: Any, kept_as: Any, scale: Any, layout: Any, short: bool, interpret: Interpreter | None
) -> Any:
    """`x / scale` rounded to the nearest number of `dtype`, ties to even, saturated; NaN is 0 in int8.

    Args:
      x: [rows, columns] float32, in `layout`.
      short: whether these are numbers of 16 bits.
      kept_as: dtype of the result, which has the bits of `dtype`.
      scale: float32 scalar, [rows], or None for 1.
    """
    if scale is not None and short:
        x = divide_short(x, scale, layout.reduce(1) if scale.ndim else plgpu.Layout.WG_SPLAT, layout, interpret)
    elif scale is not None:
        x = divide(x, along_rows(scale, x.shape, layout), layout, interpret)
    limit = largest(dtype)
    if dtype == jnp.int8:
        x = jnp.where(x == x, x, 0.0)
    x = jnp.minimum(jnp.maximum(x, -limit), limit)
    if dtype == jnp.int8:
        x = jnp.round(x)
    stored = x.astype(dtype)
    return stored if kept_as == dtype else lax.bitcast_convert_type(stored, kept_as)


def row_scale(pieces: list[Any], dtype: Any) -> Any:
    """`reference.quantize.row_scale` of rows that lie in pieces [rows, columns] float32; [rows]."""
    peak = jnp.abs(pieces[0]).max(axis=1)
    for piece in pieces[1:]:
        peak = jnp.maximum(peak, jnp.abs(piece).max(axis=1))
    scale = jnp.maximum(peak * np.float32(1 / largest(dtype)), jnp.finfo(jnp.float32).tiny)
    return jnp.where(peak > 0, scale, 1.0)
