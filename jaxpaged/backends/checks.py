"""Checks of what PyTorch engines pass: each raises an error that names the argument, before anything is written."""

import math
from typing import Any

import numpy as np
import torch

from jaxpaged.bridge.dlpack import refuse_grad, to_numpy
from jaxpaged.bridge.torch_cache import ACTIVATION_DTYPES, check_ints
from jaxpaged.metadata.checks import INT32_MAX, check_shape, shape_text


def on_gpu(**tensors: Any) -> bool:
    """Whether the arguments lie on a GPU: then all that aren't None must, without a gradient to keep track of."""
    device = next((x.device for x in tensors.values() if isinstance(x, torch.Tensor) and x.is_cuda), None)
    if device is None:
        return False
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, as others are, got one on {x.device}")
        refuse_grad(x, name)
    return True


def check_tensors(**tensors: Any) -> None:
    """Raise unless every argument that isn't None is a tensor on the CPU without a gradient to keep track of."""
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.device.type != "cpu":
            raise NotImplementedError(
                f"{name}: expected a tensor on the CPU, got one on {x.device}; on a GPU, the functions of "
                f"jaxpaged.backends.functional and the layers for Aphrodite, vLLM and transformers take tensors"
            )
        refuse_grad(x, name)


def check_activation(
    name: str, x: torch.Tensor, shape: tuple[int | str, ...], dtype: torch.dtype | None = None
) -> None:
    """Raise unless `x` has the shape and the dtype, any float one when None."""
    expected = ACTIVATION_DTYPES if dtype is None else (dtype,)
    if x.dtype not in expected:
        raise TypeError(f"{name}: expected {' or '.join(map(str, expected))}, got {x.dtype}")
    check_shape(name, x.shape, shape)


def check_heads(q: torch.Tensor, num_kv_heads: int) -> None:
    num_heads = q.shape[-2]
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"q: the number of heads must be a multiple of the {num_kv_heads} kv heads, got {num_heads}")


def check_int_tensor(name: str, x: torch.Tensor, shape: tuple[int | str, ...]) -> None:
    check_ints(name, x)
    check_shape(name, x.shape, shape)


def lengths(name: str, x: torch.Tensor, num_reqs: int) -> np.ndarray:
    """Lengths [num_reqs] as int32, read on the host."""
    check_int_tensor(name, x, (num_reqs,))
    values = to_numpy(x)
    if values.size and (values.min() < 0 or values.max() > INT32_MAX):
        raise ValueError(f"{name}: expected lengths of 0 or more, got {values.min()} to {values.max()}")
    return values.astype(np.int32)


def cumulative(name: str, x: torch.Tensor, num_reqs: int | None, total: int | None) -> np.ndarray:
    """Cumulative lengths [num_reqs + 1] as int32, read on the host: from 0 on, never falling, up to `total` at most."""
    check_int_tensor(name, x, ("num_reqs + 1" if num_reqs is None else num_reqs + 1,))
    values = to_numpy(x)
    if values.size == 0 or values[0] != 0 or np.any(values[1:] < values[:-1]):
        raise ValueError(f"{name}: expected cumulative lengths, from 0 on and never falling, got {values.tolist()}")
    if total is not None and values[-1] > total:
        raise ValueError(f"{name}: it ends at {values[-1]}, past the {total} tokens there are")
    return values.astype(np.int32)


def check_out(out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, name: str = "out") -> None:
    if out is None:
        return
    if out.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {out.dtype}")
    check_shape(name, out.shape, shape)


def checked_window(window_size: Any) -> tuple[int | None, int | None]:
    """(left, right) with None for no bound, from an engine's window, where -1 is none."""
    if window_size is None:
        return None, None
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ValueError(f"window_size: expected (left, right) or None, got {window_size!r}")
    for side in window_size:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"window_size: expected an int on each side, got {window_size!r}")
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return left, right


def checked_soft_cap(softcap: Any) -> float | None:
    """The cap, or None for 0, which stands for none."""
    if softcap is None or softcap == 0:
        return None
    if not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap: expected a number above 0, or 0 for none, got {softcap!r}")
    return float(softcap)


def checked_scale(softmax_scale: Any, head_size: int) -> float:
    if softmax_scale is None:
        return head_size**-0.5
    if isinstance(softmax_scale, torch.Tensor) or not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale: expected a finite number or None, got {softmax_scale!r}")
    return float(softmax_scale)


def check_slopes(alibi_slopes: torch.Tensor | None, num_reqs: int, num_heads: int) -> None:
    if alibi_slopes is None:
        return
    if alibi_slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes: expected torch.float32, got {alibi_slopes.dtype}")
    if tuple(alibi_slopes.shape) not in ((num_heads,), (num_reqs, num_heads)):
        expected = f"{shape_text((num_heads,))} or {shape_text((num_reqs, num_heads))}"
        raise ValueError(f"alibi_slopes: expected shape {expected}, got {shape_text(alibi_slopes.shape)}")
