"""Steps on registers, by themselves, in small kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.fragments import (
    BY_ROW,
    BY_TWO,
    ROWS,
    as_operand,
    as_permuted,
    by_16_bytes,
    by_four,
    columns_in_turn,
    divide,
    divide_short,
    int8_as_float16,
    permuted_columns,
)
from jaxpaged.pallas.matmul import dot, transposed
from jaxpaged.pallas.mosaic import interpreter, kernel, store
from jaxpaged.pallas.paged_tiles import swizzled
from jaxpaged.pallas.row_tiles import load, rows_layout


def in_kernel(body, out, *inputs, smem):
    """`body(out ref, *refs to shared memory with the inputs)` in a kernel."""

    def run(*refs):
        given, result, (*copies, barrier) = refs[: len(inputs)], refs[len(inputs)], refs[len(inputs) + 1 :]
        for source, target in zip(given, copies, strict=True):
            plgpu.copy_gmem_to_smem(source, target, barrier)
        plgpu.barrier_wait(barrier)
        body(result, *copies)

    scratch = [*smem, plgpu.Barrier(num_arrivals=len(inputs))]
    call = kernel(run, interpret=interpreter(), out_type=out, grid=(1,), grid_names=("cta",), scratch_types=scratch)
    return call(*inputs)


SIZES = [(ROWS, 64), (2 * ROWS, 64), (ROWS, 128), (2 * ROWS, 128)]


def chunked(x_ref, columns):
    """The columns by 64: as many lie in one row of shared memory."""
    return [transposed(x_ref.at[:, pl.ds(c, 64)]) for c in range(0, columns, 64)]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("float8_e4m3fn", "float16"), ("float8_e5m2", "float16"), ("int8", "float16"), ("int8", "bfloat16")],
)
def test_products_with_eight_bit_numbers(kernels, stored, dtype, rows, columns):
    rng, interpret = np.random.default_rng(0), interpreter()
    a = jnp.asarray(rng.uniform(-100, 100, (rows, columns)), stored)
    b = jnp.asarray(rng.standard_normal((8, columns)), dtype)

    def body(out, a_ref, b_ref):
        x = plgpu.load(a_ref, layout=by_16_bytes(columns), optimized=False)
        halves = (stored, dtype) == ("int8", "float16")
        x = int8_as_float16(x, by_16_bytes(columns), interpret) if halves else x.astype(dtype)
        x = as_operand(x, interpret)
        pairs = [(x[:, 64 * c : 64 * (c + 1)], part) for c, part in enumerate(chunked(b_ref, columns))]
        out[...] = dot(pairs, (rows, 8), interpret)

    smem = [
        plgpu.SMEM(a.shape, a.dtype, transforms=swizzled(a.dtype, columns)),
        plgpu.SMEM(b.shape, b.dtype, transforms=swizzled(b.dtype)),
    ]
    out = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    got = in_kernel(body, out, a, permuted_columns(b, columns), smem=smem)
    expected = np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64).T
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-3)


def held(layout, shape):
    """[128 threads, registers, vector]: which elements of an array each thread holds, by what Mosaic's layouts mean."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        lead, k = x.ndim - len(tile), len(tile)
        sizes = [size for n, t in zip(x.shape[lead:], tile, strict=True) for size in (n // t, t)]
        x = x.reshape(*x.shape[:lead], *sizes)
        x = x.transpose(*range(lead), *range(lead, lead + 2 * k, 2), *range(lead + 1, lead + 2 * k, 2))
    first = [i % x.ndim for i in (*layout.warp_dims, *layout.lane_dims)]
    last = layout.vector_dim % x.ndim
    others = [i for i in range(x.ndim) if i not in (*first, last)]
    return x.transpose(*first, *others, last).reshape(128, -1, x.shape[last])


@pytest.mark.parametrize(("rows", "columns"), [(8, 64), (8, 128), (16, 128)])
def test_which_elements_threads_hold_of_queries(rows, columns):
    """Halves of fours, in order, are twos of the permuted array: no thread needs another's."""
    fours, twos = (held(layout.to_mgpu(), (rows, columns)) for layout in (by_four(columns), BY_TWO))
    permuted = np.asarray(permuted_columns(np.arange(rows * columns).reshape(rows, columns), columns))
    np.testing.assert_array_equal(fours.reshape(128, -1, 2), permuted.reshape(-1)[twos])


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_which_elements_threads_hold_of_keys(rows, columns):
    wide = held(by_16_bytes(columns).to_mgpu(), (rows, columns)).reshape(128, -1, 2, columns // 64, 8, 2)
    pairs = held(plgpu.Layout.WGMMA.to_mgpu(), (rows, columns)).reshape(128, -1, columns // 8, 2, 2)
    permuted = np.asarray(permuted_columns(np.arange(rows * columns).reshape(rows, columns), columns))
    by_pair = wide.reshape(128, -1, 2, columns // 8, 2).swapaxes(2, 3)  # rows g and g + 8 come last in wgmma's order
    np.testing.assert_array_equal(by_pair, permuted.reshape(-1)[pairs])


@pytest.mark.parametrize(("rows", "columns"), [(8, 64), (16, 128)])
def test_queries_permuted_as_keys_are(kernels, rows, columns):
    interpret = interpreter()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, columns)), jnp.bfloat16)

    def body(out, x_ref):
        permuted = as_permuted(plgpu.load(x_ref, layout=by_four(columns), optimized=False), interpret)
        for c in range(0, columns, 64):
            store(out.at[:, pl.ds(c, 64)], permuted[:, c : c + 64])

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    got = in_kernel(body, out, x, smem=[plgpu.SMEM(x.shape, x.dtype)])
    np.testing.assert_array_equal(np.asarray(got), np.asarray(permuted_columns(x, columns)))


def test_division_rounds_to_nearest(kernels):
    """Among many quotients are such that division by a reciprocal, or an approximate one, rounds otherwise."""
    rng, interpret = np.random.default_rng(0), interpreter()
    x, y = (rng.uniform(0.01, 10, (ROWS, 128)).astype(np.float32) for _ in range(2))
    x[0, 0], y[0, 0] = np.float32(np.float16(7.2)), np.float32(0.047363285)  # nearly 152: a tie between two float8
    assert (x * (np.float32(1) / y) != x / y).any()
    layout = plgpu.Layout.WG_STRIDED(x.shape, 4)

    def body(out, x_ref, y_ref):
        out[...] = divide(plgpu.load(x_ref, layout=layout), plgpu.load(y_ref, layout=layout), layout, interpret)

    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    got = in_kernel(body, out, x, y, smem=[plgpu.SMEM(x.shape, jnp.float32)] * 2)
    np.testing.assert_array_equal(np.asarray(got), x / y)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_every_int8_as_float16(kernels, rows, columns):
    interpret = interpreter()
    x = np.random.default_rng(0).permutation(np.arange(rows * columns)).astype(np.int8).reshape(rows, columns)
    assert len(np.unique(x)) == 256
    layout = by_16_bytes(columns)

    def body(out, x_ref):
        wide = int8_as_float16(plgpu.load(x_ref, layout=layout, optimized=False), layout, interpret)
        store(out, wide)

    out = jax.ShapeDtypeStruct(x.shape, jnp.float16)
    got = in_kernel(body, out, x, smem=[plgpu.SMEM(x.shape, x.dtype, transforms=swizzled(x.dtype, columns))])
    np.testing.assert_array_equal(np.asarray(got), x)


SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 60000.0, 2.0**-24]
DIVISORS = [1.0, 0.5, 2 - 2.0**-23, 1 + 2.0**-23, 2.0**-126, 3e-30, 1e20, 2.0**100]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("by_row", [False, True])
def test_division_of_short_numbers_rounds_to_8_bits(kernels, dtype, by_row):
    """Quotients may be off in the last place, but not to where another number of 8 bits is nearer."""
    rng, interpret = np.random.default_rng(0), interpreter()
    x = rng.uniform(0.01, 10, (ROWS, 128)).astype(dtype).astype(np.float32)
    x[:, : len(SPECIAL)] = np.array(SPECIAL).astype(dtype)
    y = rng.uniform(0.01, 10, ROWS).astype(np.float32)
    y[: len(DIVISORS)] = DIVISORS
    if not by_row:
        y[:] = DIVISORS[2]
    layout = rows_layout(128, 4)  # of what is loaded and stored here
    y_layout = layout.reduce(1) if by_row else plgpu.Layout.WG_SPLAT

    def body(out, x_ref, y_ref):
        divisor = load(y_ref, y_layout) if by_row else y_ref[0]
        out[...] = divide_short(load(x_ref, layout), divisor, y_layout, layout, interpret)

    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    smem = [plgpu.SMEM(x.shape, jnp.float32), plgpu.SMEM(y.shape, jnp.float32)]
    got = np.asarray(in_kernel(body, out, x, y, smem=smem))
    with np.errstate(all="ignore"):
        expected = x / y[:, None]
    np.testing.assert_allclose(got, expected, rtol=2e-7)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(expected)[number])
    if interpret is None:  # on the CPU XLA itself takes inverses
        bits, wanted = (a.view(np.int32) for a in (got, expected))
        differ = (bits != wanted) & number
        assert differ.mean() < 1e-3
        assert not (differ & ((bits % 2**16 == 0) | (wanted % 2**16 == 0))).any()


@pytest.mark.parametrize(
    ("rows", "first", "count", "columns"),
    [
        (ROWS, 0, 1, 8),
        (2 * ROWS, 5, 1, 128),
        (ROWS, 2, 1, 4),
        (ROWS, 2, 2, 64),
        (ROWS, 0, 8, 32),
        (2 * ROWS, 4, 4, 128),
    ],
)
def test_columns_in_turn(kernels, rows, first, count, columns):
    """Of a matrix 8 wide that lies in rows of any length."""
    interpret = interpreter()
    x = np.random.default_rng(0).standard_normal((rows // count, 8)).astype(np.float32)

    def body(out, x_ref):
        start = lax.axis_index("cta") + first
        along_rows = lax.broadcast_in_dim(columns_in_turn(x_ref, 8, start, count, interpret), (rows, 8), [0])
        out[...] = plgpu.layout_cast(along_rows, plgpu.Layout.WGMMA)

    assert plgpu.Layout.WGMMA.reduce(1) == BY_ROW
    out = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    lies = x.reshape(-1, columns)
    got = in_kernel(body, out, lies, smem=[plgpu.SMEM(lies.shape, jnp.float32)])
    expected = x[:, first : first + count].T.reshape(-1, 1)
    np.testing.assert_array_equal(np.asarray(got), np.broadcast_to(expected, (rows, 8)))


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_lowers_for_cuda(rows, columns):
    """Each of the above, as it is compiled."""
    x = jax.ShapeDtypeStruct((rows, columns), jnp.int8)
    b = jax.ShapeDtypeStruct((8, columns), jnp.float16)

    def body(out, a_ref, b_ref):
        a = plgpu.load(a_ref, layout=by_16_bytes(columns), optimized=False)
        a = as_operand(int8_as_float16(a, by_16_bytes(columns), None), None)
        s = dot([(a[:, 64 * c : 64 * (c + 1)], b) for c, b in enumerate(chunked(b_ref, columns))], (rows, 8), None)
        out[...] = divide(s, plgpu.layout_cast(s + 1.0, plgpu.Layout.WGMMA), plgpu.Layout.WGMMA, None)

    smem = [
        plgpu.SMEM(x.shape, x.dtype, transforms=swizzled(x.dtype, columns)),
        plgpu.SMEM(b.shape, b.dtype, transforms=swizzled(b.dtype)),
    ]
    call = functools.partial(in_kernel, body, jax.ShapeDtypeStruct((rows, 8), jnp.float32), smem=smem)
    lowered = jax.jit(call).trace(x, b).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in lowered
