"""Copies that Mosaic makes as plain bytes: faults are found when a kernel is lowered, as conftest.py does for all."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.mosaic import kernel
from tests.pallas.plain_copies import PlainCopies


def lower_load(start: Any) -> None:
    """Lower a kernel that loads eight numbers from `start` of the index of its CTA on."""

    def fetch(given: Any, out: Any, tile: Any, arrived: Any) -> None:
        plgpu.copy_gmem_to_smem(given.at[pl.ds(start(lax.axis_index("cta")), 8)], tile, arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(tile, out)
        plgpu.wait_smem_to_gmem(0)

    fetched = kernel(
        fetch,
        out_type=jax.ShapeDtypeStruct((8,), jnp.float32),
        scratch_types={"tile": plgpu.SMEM((8,), jnp.float32), "arrived": plgpu.Barrier()},
        grid=(4,),
        grid_names=("cta",),
        interpret=None,
    )
    jax.jit(fetched).trace(jax.ShapeDtypeStruct((64,), jnp.float32)).lower(lowering_platforms=("cuda",))


def lower(shape: tuple[int, ...], size: tuple[int, ...], starts: Any) -> None:
    """Lower a kernel that stores `size` numbers to an array of `shape`, from `starts` of the index of its CTA on."""

    def fill(out: Any, tile: Any) -> None:
        plgpu.copy_smem_to_gmem(tile, out.at[tuple(map(pl.ds, starts(lax.axis_index("cta")), size))])
        plgpu.wait_smem_to_gmem(0)

    filled = kernel(
        fill,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types={"tile": plgpu.SMEM(size, jnp.float32)},
        grid=(4,),
        grid_names=("cta",),
        interpret=None,
    )
    jax.jit(filled).trace().lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("shape", "size", "starts", "fault"),
    [
        ((64,), (8,), lambda i: (i * 8,), None),
        ((60,), (8,), lambda i: (i * 8,), None),  # the array's end
        ((64,), (8,), lambda i: (i * 7,), "misaligned"),
        ((4, 8), (1, 8), lambda i: (i, 0), None),
        ((4, 8), (1, 4), lambda i: (i, i), "misaligned"),
        ((4, 12), (1, 8), lambda i: (i, i * 8), "past the end"),
        ((4, 8), (1, 16), lambda i: (i, i * 4), "past the end"),
    ],
)
def test_faults_are_found(
    copies: PlainCopies, shape: tuple[int, ...], size: tuple[int, ...], starts: Any, fault: str | None
) -> None:
    lower(shape, size, starts)
    assert len(copies.found) == 1
    faults = copies.faults()
    copies.found.clear()  # the fixture must not find them, too
    assert faults == [] if fault is None else any(fault in x for x in faults)


@pytest.mark.parametrize(("step", "fault"), [(8, False), (7, True)])
def test_loads_that_may_begin_anywhere_are_found(copies: PlainCopies, step: int, fault: bool) -> None:
    lower_load(lambda i: i * step)
    assert [copy.shape for copy in copies.found] == [(64,), (8,)]
    assert [x.startswith("misaligned") for x in copies.faults()] == [True] * fault
    copies.found.clear()
