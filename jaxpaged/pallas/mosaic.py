"""The one way in to Pallas' Mosaic GPU backend: compile a kernel for a GPU, or interpret it on the CPU."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Interpreter = plgpu.InterpretGPUParams
_interpreter: contextvars.ContextVar[Interpreter | None] = contextvars.ContextVar("jaxpaged_interpreter", default=None)


@contextlib.contextmanager
def interpreted(**params: Any) -> Iterator[None]:
    """Within it, the kernels run in Pallas' interpreter, on any machine.

    Args:
      params: of `plgpu.InterpretGPUParams`; by default races are looked for, memory that nothing wrote is NaN, and
        reads out of bounds are errors.
    """
    defaults = {"detect_races": True, "out_of_bounds_reads": "raise", "uninitialized_memory": "nan"}
    token = _interpreter.set(Interpreter(**{**defaults, **params}))
    try:
        yield
    finally:
        _interpreter.reset(token)


def interpreter() -> Interpreter | None:
    """The interpreter's parameters within `interpreted`, else None. Hashable: a static argument of jitted functions."""
    return _interpreter.get()


def kernel(body: Callable[..., None], *, interpret: Interpreter | None, **options: Any) -> Any:
    """`plgpu.kernel`, interpreted where `interpret` says so."""
    return plgpu.kernel(body, interpret=interpret, **options)


def store(ref: Any, value: Any) -> None:
    """Store registers to memory of any form, be it slowly: jax 0.12 refuses `ref[...] = value` if it is slow."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def let_next_kernel_start(interpret: Interpreter | None) -> None:
    """The next kernel of the stream may be launched when all CTAs have come here: its CTAs take the place of those that
    end, and wait for the rest in `wait_for_previous_kernel` (CUDA's programmatic dependent launch).

    The next kernel takes for done what ended before this one's CTAs came here. So wait first; docs/design.md says why.
    """
    if interpret is None:
        plgpu.griddepcontrol_launch_dependents()


def wait_for_previous_kernel(interpret: Interpreter | None) -> None:
    """Wait until the kernel before this one has ended and its writes can be seen, and so for all before it, if each of
    those that are launched early waits, too. A kernel that waits is launched early where the one before lets it."""
    if interpret is None:
        plgpu.griddepcontrol_wait()


def follow_previous_kernel(interpret: Interpreter | None) -> None:
    """To begin with, in all threads: wait for the kernel before, then let the next one do so."""
    wait_for_previous_kernel(interpret)
    let_next_kernel_start(interpret)


def one_warp_each(*jobs: Callable[[], None]) -> None:
    """Do each of up to four jobs in a warp of the warpgroup by itself, all at a time."""

    @plgpu.warp_map
    def _(warp: Any) -> None:
        for i, job in enumerate(jobs):
            pl.when(warp == i)(job)


def drain(barriers: Any, total: Any, stages: int) -> None:
    """Observe the last phases of a ring of barriers, of which `total` were completed: the interpreter insists on it."""

    def wait(i: Any, _: None) -> None:
        plgpu.barrier_wait(barriers.at[lax.rem(i, jnp.int32(stages))])

    lax.fori_loop(jnp.maximum(total - stages, 0), total, wait, None)
