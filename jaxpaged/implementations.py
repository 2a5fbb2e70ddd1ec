"""The implementations of the public functions, and which of them a call gets."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

from jaxpaged.metadata.manual_axes import manual_axes
from jaxpaged.notices import warn_once

# Not in a function: Pallas adds to what JAX's caches of traces are keyed by, and so what was traced first would be
# compiled again.
from jaxpaged.pallas.mosaic import interpreter

Implementation = Literal["reference", "mosaic_gpu"]
SUITABLE_GPUS = ("9.0",)
"""Compute capabilities that the Pallas kernels are written for: Hopper."""
GPU_PLATFORMS = ("gpu", "cuda")


def choose(implementation: str | None, arrays: Any, refusal: Callable[[], str | None]) -> str:
    """The name of the implementation to call; the best one that takes the call when None.

    Args:
      arrays: a pytree of the call's arrays: those that are not traced tell the device.
      refusal: says why the kernels can't take the call, or None.

    Raises:
      ValueError: there is none of that name, or it can't take the call.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"implementation: expected None or one of {', '.join(get_args(Implementation))}, got {implementation!r}"
        )
    if implementation == "reference":
        return "reference"
    device = _device(arrays)
    reason = None if interpreter() is not None else _unsuitable(device)
    if reason is None and manual_axes(arrays):
        reason = "in jax.shard_map Pallas' kernels need check_vma=False"
    if implementation is None:
        if reason is not None and _platform(device) in GPU_PLATFORMS:
            warn_once(f"jaxpaged: {reason}; the slower reference is used", stacklevel=3)
        return "mosaic_gpu" if reason is None and refusal() is None else "reference"
    reason = reason or refusal()
    if reason is not None:
        raise ValueError(f"implementation: expected 'reference' or None, got 'mosaic_gpu': {reason}")
    return "mosaic_gpu"


def static_options(choice: str) -> dict[str, Any]:
    """Static arguments of a jitted operation: the implementation, and how its kernels are interpreted, if at all."""
    if choice == "reference":
        return {"implementation": choice, "interpret": None}
    return {"implementation": choice, "interpret": interpreter()}


def gpu_of_call(arrays: Any) -> Any:
    """What a call's kernels are compiled for, a static argument; the default GPU's tiles where there is no GPU."""
    from jaxpaged.pallas.tuning import gpu_of

    return gpu_of(None if interpreter() is not None else _device(arrays))


def _device(arrays: Any) -> Any:
    """The device that a call runs on: that of its first array that isn't traced, or else the default one."""
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            return next(iter(leaf.devices()))
    return jax.config.jax_default_device or jax.devices()[0]


def _unsuitable(device: Any) -> str | None:
    """Why the kernels don't run on a device, or None."""
    if _platform(device) not in GPU_PLATFORMS:
        return f"the kernels run on NVIDIA GPUs, not on the platform {_platform(device)}"
    capability = getattr(device, "compute_capability", None)
    if capability in SUITABLE_GPUS:
        return None
    suitable = ", ".join(SUITABLE_GPUS)
    return f"the kernels are written for GPUs of compute capability {suitable}, not {capability} ({device.device_kind})"


def _platform(device: Any) -> str:
    return device if isinstance(device, str) else device.platform
