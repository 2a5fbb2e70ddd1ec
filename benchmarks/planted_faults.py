"""Kernels with a fault planted in them, which compute-sanitizer must report, and the same without it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, COLUMNS = 64, 128
_BY_THREAD = plgpu.Layout.WG_STRIDED((COLUMNS,), 1)


def write_row(buffer: Any, row: Any) -> Any:
    """`buffer` [ROWS, COLUMNS] float32 with 7 in a row, [1] int32, of which nothing checks that there is one."""

    def body(row_ref: Any, buffer_ref: Any) -> None:
        sevens = plgpu.layout_cast(jnp.full((COLUMNS,), 7.0, jnp.float32), _BY_THREAD)
        buffer_ref[row_ref[0]] = sevens  # from registers: TMA would leave out what is past the end

    ref = jax.new_ref(buffer)
    plgpu.kernel(body, out_type=(), grid=(1,), grid_names=("cta",), kernel_name="planted_write")(row, ref)
    return jax.freeze(ref)


def pass_on(x: Any, *, awaited: bool) -> Any:
    """`x` [COLUMNS] float32 by way of shared memory, from a warpgroup to another, which waits for it or doesn't."""

    def body(x_ref: Any, out_ref: Any, between: Any, barrier: Any) -> None:
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _store() -> None:
            between[...] = plgpu.load(x_ref, layout=_BY_THREAD, optimized=False)
            if awaited:
                plgpu.barrier_arrive(barrier)

        @pl.when(wg == 1)
        def _load() -> None:
            if awaited:
                plgpu.barrier_wait(barrier)
            out_ref[...] = plgpu.load(between, layout=_BY_THREAD)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((COLUMNS,), jnp.float32),
        grid=(1,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((COLUMNS,), jnp.float32), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="planted_race",
    )(x)
