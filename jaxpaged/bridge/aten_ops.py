"""The operations of PyTorch that mask and score functions are made of, as JAX functions of the same arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jaxpaged.bridge.dlpack import GPU_ALIGNMENT, to_numpy
from jaxpaged.metadata.checks import INT32_MAX


def jax_dtype(dtype: torch.dtype) -> Any:
    """The dtype that stands for PyTorch's: JAX computes in 32 bits at most."""
    name = str(dtype).removeprefix("torch.")
    return jnp.dtype({"int64": "int32", "float64": "float32"}.get(name, name))


def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return jnp.add(x, y if alpha == 1 else alpha * y)


def _subtract(x: Any, y: Any, alpha: Any = 1) -> Any:
    return jnp.subtract(x, y if alpha == 1 else alpha * y)


def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    quotient = jnp.true_divide(x, y)
    if rounding_mode is None:
        return quotient
    return jnp.trunc(quotient) if jnp.issubdtype(jnp.result_type(x, y), jnp.floating) else jax.lax.div(x, y)


def _index(x: Any, indices: Sequence[Any]) -> Any:
    if len(indices) != x.ndim or any(index is None for index in indices):
        raise NotImplementedError(f"a part of a tensor of {x.ndim} axes indexed by {len(indices)}: index all of them")
    return x[tuple(indices)]


def _converted(x: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return x if dtype is None else jnp.asarray(x).astype(jax_dtype(dtype))


def _filled(value: Any) -> Callable[..., Any]:
    """A tensor like an argument, whose shape is that of all elements: a number that broadcasts stands for it."""

    def make(x: Any, size: Sequence[int] = (), *, dtype: torch.dtype | None = None, **_: Any) -> Any:
        if any(n != 1 for n in size):
            raise NotImplementedError(f"a new tensor of shape {list(size)}: make it outside of the function")
        return jnp.asarray(value, x.dtype if dtype is None else jax_dtype(dtype))

    return make


def _full_like(x: Any, value: Any, **given: Any) -> Any:
    return _filled(value)(x, **given)


def _clamped(x: Any, low: Any = None, high: Any = None) -> Any:
    return jnp.clip(x, low, high)


_SAME = (
    "abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sqrt", "sin", "cos", "floor", "ceil", "round",
    "trunc", "square", "reciprocal", "isnan", "isinf", "maximum", "minimum", "floor_divide", "remainder", "fmod",
    "logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_not", "where", "sign", "atan2",
)  # fmt: skip

OPS: dict[str, Callable[..., Any]] = {
    **{name: getattr(jnp, "arctan2" if name == "atan2" else name) for name in _SAME},
    "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater,
    "ge": jnp.greater_equal, "neg": jnp.negative, "mul": jnp.multiply, "pow": jnp.power, "sgn": jnp.sign,
    "add": _add, "sub": _subtract, "rsub": lambda x, y, alpha=1: _subtract(y, x, alpha), "div": _divide,
    "sigmoid": jax.nn.sigmoid, "relu": jax.nn.relu, "erf": jax.scipy.special.erf, "rsqrt": jax.lax.rsqrt,
    "clamp": _clamped, "clamp_min": lambda x, low: jnp.maximum(x, low),
    "clamp_max": lambda x, high: jnp.minimum(x, high), "index": _index,
    "_to_copy": _converted, "clone": lambda x, **_: x, "alias": lambda x: x, "detach": lambda x: x,
    "full_like": _full_like, "zeros_like": _filled(0), "ones_like": _filled(1), "new_zeros": _filled(0),
    "new_ones": _filled(1),
}  # fmt: skip
"""By the operation's name, without its overload."""


def as_constant(tensor: torch.Tensor) -> Any:
    """A tensor that a function holds, as an array for JAX: on its memory, or where that has 64 bits a copy in 32.

    One of a GPU stays a tensor, compact, for `torch_call`; ints of 64 bits that 32 can't hold become the nearest ones
    that they can, since nobody waits to look at them.

    Raises:
      ValueError: it holds an int that 32 bits can't.
    """
    tensor = tensor.detach()
    if tensor.is_cuda:
        return _on_gpu(tensor)
    if tensor.dtype == torch.int64:
        if tensor.numel() and (tensor.max() > INT32_MAX or tensor.min() < -INT32_MAX - 1):
            raise ValueError(f"a tensor of int64 holds {tensor.abs().max()}, expected numbers of 32 bits")
        tensor = tensor.int()
    return to_numpy(tensor.float() if tensor.dtype == torch.float64 else tensor)


def _on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.int64:
        return tensor.clamp(-INT32_MAX - 1, INT32_MAX).int()
    tensor = (tensor.float() if tensor.dtype == torch.float64 else tensor).contiguous()
    return tensor.clone() if tensor.data_ptr() % GPU_ALIGNMENT else tensor
