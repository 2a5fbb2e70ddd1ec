"""A kernel that lets the next one start at once, and only much later copies from one memory to another.

Whoever comes next and doesn't wait reads what was there before, or overwrites what is yet to be read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.bridge import launch
from jaxpaged.metadata.checks import INT32_MAX
from jaxpaged.pallas.mosaic import kernel, let_next_kernel_start

TURNS = 4_000_000
"""Of a loop, some 30 milliseconds: long enough for all that is launched next."""


def copy_late(x: torch.Tensor, y: torch.Tensor) -> None:
    """Copy `x` to `y`, both compact and of the same size, a multiple of 16 bytes, by such a kernel on the current
    stream."""
    assert x.is_contiguous() and y.is_contiguous() and x.nbytes == y.nbytes
    columns = next(n for n in (256, 4) if x.nbytes % (4 * n) == 0)
    array = jax.ShapeDtypeStruct((x.nbytes // (4 * columns), columns), jnp.int32)
    launch.program(_copied, array, array, device=x.get_device()).bind(0, 1)((x.data_ptr(), y.data_ptr()))


def _copied(x: Any, y: Any) -> Any:
    rows = next(n for n in (64, 32, 16, 8, 4, 2, 1) if x.shape[0] % n == 0)
    ref = jax.new_ref(y)
    kernel(
        functools.partial(_copy, rows),
        interpret=None,
        grid=(x.shape[0] // rows,),
        grid_names=("cta",),
        scratch_types={"tile": plgpu.SMEM((rows, x.shape[1]), jnp.int32), "come": plgpu.Barrier()},
        kernel_name="copy_late",
    )(x, ref)
    return jax.freeze(ref)


def _copy(rows: int, x: Any, y: Any, *, tile: Any, come: Any) -> None:
    let_next_kernel_start(None)
    first = lax.axis_index("cta") * rows

    def step(_: Any, s: Any) -> Any:
        return (s * 1664525 + 1013904223) ^ lax.shift_right_logical(s, jnp.int32(13))

    number = lax.fori_loop(0, TURNS, step, first)
    # 0, but for one number in 2^31, so the loop must be run to know.
    nothing = lax.div(number & INT32_MAX, jnp.int32(INT32_MAX))
    plgpu.copy_gmem_to_smem(x.at[pl.ds(first + nothing, rows)], tile, come)
    plgpu.barrier_wait(come)
    plgpu.copy_smem_to_gmem(tile, y.at[pl.ds(first, rows)])
    plgpu.wait_smem_to_gmem(0)
