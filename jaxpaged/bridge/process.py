"""JAX in a process of PyTorch's: the GPU's memory stays PyTorch's, and children of a fork are turned away."""

import os
import threading
import warnings
from collections.abc import Callable

import jax

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_forked = False
_forgotten: list[Callable[[], None]] = []


def leave_memory_to_torch() -> None:
    """Keep JAX from reserving three quarters of a GPU's memory when its backend starts.

    It says so with a warning where that has happened already. A value that the environment has is left as it is.
    """
    if _PREALLOCATE in os.environ or os.environ.get(_ALLOCATOR) == "platform":
        return
    if _backends_started() and any(device.platform in ("gpu", "cuda") for device in jax.local_devices()):
        warnings.warn(
            f"JAX's GPU backend started before jaxpaged's functions for PyTorch were imported, and has reserved most "
            f"of the GPU's memory. Import jaxpaged.bridge.torch_ops first, or set {_PREALLOCATE}=false.",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    os.environ[_PREALLOCATE] = "false"


def _backends_started() -> bool:
    """Private to JAX (seen in 0.11.2 and 0.12.0); where it isn't found, backends are taken for not started."""
    try:
        from jax._src import xla_bridge

        return bool(xla_bridge.backends_are_initialized())
    except (ImportError, AttributeError):
        return False


def forget_after_fork(forget: Callable[[], None]) -> None:
    """Call a function in each child of a fork: it is to drop whatever belongs to the parent's CUDA context."""
    _forgotten.append(forget)


def refuse_after_fork() -> None:
    """Raise RuntimeError in a child of a fork."""
    if _forked:
        raise RuntimeError(
            "jaxpaged was imported before this process was forked: neither CUDA nor JAX works in a child of a fork. "
            'Start processes by multiprocessing.get_context("spawn"), or import jaxpaged in the child.'
        )


def _after_fork() -> None:
    global _forked
    _forked = True
    for forget in _forgotten:
        forget()


os.register_at_fork(after_in_child=_after_fork)


class OncePerThread(threading.local):
    """What a thread has been prepared for."""

    def __init__(self) -> None:
        self.prepared = False
