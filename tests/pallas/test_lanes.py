"""Vectors over the threads of a warpgroup, by themselves, in small kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.lanes import (
    MOST_SCANNED,
    WARPGROUP,
    constant,
    gather,
    indices,
    last_at_most,
    prefix_sum,
    scatter,
    whole,
)
from jaxpaged.pallas.mosaic import interpreter, kernel


def in_kernel(body: Any, out: tuple[int, ...], *inputs: Any, smem: int = WARPGROUP, ctas: int = 1) -> np.ndarray:
    """`body(out, *inputs, scratch)` in a kernel, on references to int32."""
    call = kernel(
        lambda *refs, scratch: body(refs[-1], *refs[:-1], scratch),
        out_type=jax.ShapeDtypeStruct(out, jnp.int32),
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types={"scratch": plgpu.SMEM((smem,), jnp.int32)},
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpreter(),
    )
    return np.asarray(call(*(jnp.asarray(x, jnp.int32) for x in inputs)))


def copy_by(index: Any, n: int, out: Any, ref: Any, _: Any) -> None:
    """`out[i] = ref[index(i)]`."""
    place = indices(whole(n))
    scatter(out, [place], [gather(ref, index(place), interpreter())], place < n, interpreter())


@pytest.mark.parametrize("n", [1, 100, 128, 1000])
def test_gathers_and_scatters(kernels: None, n: int) -> None:
    x = np.random.default_rng(n).integers(-(2**31), 2**31 - 1, n)
    out = in_kernel(functools.partial(copy_by, lambda i: jnp.maximum(n - 1 - i, 0), n), (n, 1), x)
    np.testing.assert_array_equal(out[:, 0], x[::-1])


def test_scatters_rows_among_those_of_other_ctas(kernels: None) -> None:
    def body(out: Any, _: Any) -> None:
        place, me = indices(WARPGROUP), lax.axis_index("cta")
        values = [place, constant(WARPGROUP, me)]
        scatter(out, [lax.rem(place, jnp.int32(64)), constant(WARPGROUP, me)], values, place >= 64, interpreter())

    out = in_kernel(body, (64, 3, 2), ctas=3)
    np.testing.assert_array_equal(out[..., 0], np.arange(64, 128)[:, None] + np.zeros(3, int))
    np.testing.assert_array_equal(out[..., 1], np.zeros((64, 1), int) + np.arange(3))


@pytest.mark.parametrize("n", [WARPGROUP, 3 * WARPGROUP, MOST_SCANNED])
def test_sums_up(kernels: None, n: int) -> None:
    x = np.random.default_rng(n).integers(-1000, 1000, n)

    def body(out: Any, ref: Any, scratch: Any) -> None:
        place = indices(n)
        for turn in range(2):  # the second one must wait until the first one's scratch has been read
            sums, total = prefix_sum(gather(ref, place, interpreter()) + turn, scratch, interpreter())
        chosen = place < n
        scatter(out, [place], [sums, constant(n, total)], chosen, interpreter())

    out = in_kernel(body, (n, 2), x, smem=n + WARPGROUP)
    np.testing.assert_array_equal(out[:, 0], np.cumsum(x + 1))
    np.testing.assert_array_equal(out[:, 1], np.sum(x + 1))


@pytest.mark.parametrize("count", [1, 2, 7, 64, 100])
def test_finds_the_last_that_is_small_enough(kernels: None, count: int) -> None:
    rng = np.random.default_rng(count)
    numbers = np.sort(rng.integers(0, 50, count))
    numbers[0] = 0
    values = rng.integers(0, 60, WARPGROUP)

    def body(out: Any, ref: Any, values: Any, _: Any) -> None:
        place = indices(WARPGROUP)
        found = last_at_most(ref, gather(values, place, interpreter()), count, interpreter())
        scatter(out, [place], [found], place < WARPGROUP, interpreter())

    out = in_kernel(body, (WARPGROUP, 1), numbers, values)
    np.testing.assert_array_equal(out[:, 0], np.searchsorted(numbers, values, side="right") - 1)


OUT_OF_RANGE = [lambda i: i, lambda i: i - 1]


@pytest.mark.parametrize("kernels", ["interpreted"], indirect=True)
@pytest.mark.parametrize("index", OUT_OF_RANGE)
def test_reads_out_of_range_are_seen(kernels: None, index: Any) -> None:
    with pytest.raises(Exception, match=r"(?i)out.of.bounds"):
        in_kernel(functools.partial(copy_by, index, 100), (100, 1), np.zeros(100))


@pytest.mark.parametrize("kernels", ["interpreted"], indirect=True)
@pytest.mark.parametrize("index", OUT_OF_RANGE)
def test_writes_out_of_range_are_seen(kernels: None, index: Any) -> None:
    def body(out: Any, _: Any) -> None:
        place = indices(WARPGROUP)
        scatter(out, [index(place)], [place], place <= 100, interpreter())

    with pytest.raises(Exception, match=r"(?i)out.of.bounds|out of range"):
        in_kernel(body, (100, 1))
