"""Argument checks: each raises a ValueError or TypeError that names the argument, what came and what was expected."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

INT32_MAX = int(np.iinfo(np.int32).max)

# A dimension of an expected shape: a number that must match, or the name of one that may be anything.
Dim = int | str


def shape_text(shape: Iterable[Dim]) -> str:
    return "[" + ", ".join(str(dim) for dim in shape) + "]"


def check_shape(name: str, shape: Sequence[int], expected: Sequence[Dim]) -> None:
    """Raise ValueError unless `shape` fits `expected`; a named dimension fits any size."""
    fits = len(shape) == len(expected) and all(
        isinstance(want, str) or got == want for got, want in zip(shape, expected, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: expected shape {shape_text(expected)}, got {shape_text(shape)}")


def check_dtype(name: str, dtype: Any, allowed: Iterable[Any]) -> None:
    """Raise TypeError unless `dtype` is one of `allowed`."""
    allowed = [jnp.dtype(a) for a in allowed]
    if jnp.dtype(dtype) not in allowed:
        raise TypeError(f"{name}: expected dtype {' or '.join(a.name for a in allowed)}, got {jnp.dtype(dtype).name}")


def check_positive(name: str, value: Any) -> int:
    """The value as an int; ValueError unless it is a whole number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: expected a positive int, got {value!r}")
    if value <= 0:
        raise ValueError(f"{name}: expected a positive int, got {value}")
    return int(value)


def is_concrete(x: Any) -> bool:
    """Whether the values of `x` can be read now (it is not a tracer)."""
    return not isinstance(x, jax.core.Tracer)


def on_host(x: Any) -> bool:
    """Whether reading the values of `x` needs no wait for another device."""
    if not is_concrete(x):
        return False
    if isinstance(x, jax.Array):
        return all(device.platform == "cpu" for device in x.devices())
    return True


def as_int32_indices(x: Any) -> Any:
    """Blocks or slots as int32; those that int32 can't hold become -1, which is none, instead of wrapping around."""
    if x.dtype == np.int32 or x.dtype.itemsize < 4:
        return x.astype(np.int32)
    xp = jnp if isinstance(x, jax.Array) else np
    return xp.where((x >= 0) & (x <= INT32_MAX), x.astype(np.int32), -1)
