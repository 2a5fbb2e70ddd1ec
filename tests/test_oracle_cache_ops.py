"""Writes and copies of the cache, bit by bit against the oracle's, in every layout and dtype."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, copy_blocks, swap_blocks, write_kv
from jaxpaged.metadata.kv_cache import CACHE_DTYPES, QUANTIZED_DTYPES
from jaxpaged.testing import oracle
from jaxpaged.testing.cases import LAYOUTS, Case, build, stored_as_bits

KINDS = [
    (d.name, s) for d in CACHE_DTYPES for s in (("tensor", "head", "token_head") if d in QUANTIZED_DTYPES else (None,))
]


def drawn(layout, dtype, scales):
    case = Case("write", (3, 9), (20, 9), head_size=16, block_size=4, layout=layout, cache_dtype=dtype, scales=scales)
    inputs = build(case)
    # As bytes: XLA on the CPU converts arrays of float8 to work on them, and so may change how a NaN is encoded.
    key, value = stored_as_bits(inputs.key_buffer), stored_as_bits(inputs.value_buffer)
    cache = KVCache.from_arrays(
        jnp.asarray(key),
        None if value is None else jnp.asarray(value),
        layout=layout,
        k_scale=inputs.k_scale,
        v_scale=inputs.v_scale,
        dtype=inputs.key_buffer.dtype,
    )
    return inputs, cache


def logical(cache, which):
    """What a cache stores, as [num_blocks, block_size, num_kv_heads, head_size]."""
    x = np.asarray(cache.buffer(which))[cache.layout.index(which, cache.dims, np.arange(cache.num_blocks))]
    axes = ("n", *cache.layout.rest(which, "n"))
    x = x.transpose([axes.index(a) for a in ("n", "s", "h", "d", "x") if a in axes])
    return np.ascontiguousarray(x.reshape(*x.shape[:3], -1)).view(cache.dtype)


def same_bits(got, expected):
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "scales"), KINDS)
def test_write(layout, dtype, scales):
    """Nothing but the slots named changes, the poison of the others included."""
    inputs, cache = drawn(layout, dtype, scales)
    rng = np.random.default_rng(1)
    tokens = len(inputs.slot_mapping)
    slots = inputs.slot_mapping.copy()
    slots[[1, 5]] = -1, cache.num_slots
    source = dtype if dtype in ("bfloat16", "float16") else "float32"
    new = [rng.standard_normal((tokens, 2, 16)).astype(source) for _ in range(2)]
    written = write_kv(cache, *(jnp.asarray(x) for x in new), slots)
    for which, rows in zip(("key", "value"), new, strict=True):
        scale = None if cache.scale(which) is None else np.asarray(cache.scale(which))
        expected, expected_scale = oracle.write_kv(logical(cache, which), scale, rows, slots, dtype)
        same_bits(logical(written, which), expected)
        if expected_scale is not None:
            np.testing.assert_allclose(written.scale(which), expected_scale, rtol=2.5e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "scales"), [("float32", None), ("float8_e5m2", "head"), ("int8", "token_head")])
def test_copy_and_swap(layout, dtype, scales):
    _, cache = drawn(layout, dtype, scales)
    last = cache.num_blocks - 1
    pairs = np.array([[0, 1], [1, 0], [2, last], [-1, 3], [3, cache.num_blocks], [cache.num_blocks, 4]], np.int32)
    _, other = drawn(layout, dtype, scales)
    for which in ("key", "value"):
        before = logical(cache, which)
        same_bits(logical(copy_blocks(cache, pairs), which), oracle.copy_blocks(before, pairs))
        same_bits(
            logical(swap_blocks(cache, other, pairs), which), oracle.swap_blocks(before, logical(other, which), pairs)
        )
        scale = cache.scale(which)
        if scale is not None and scale.ndim == 3:
            same_bits(copy_blocks(cache, pairs).scale(which), oracle.copy_blocks(np.asarray(scale), pairs))


def test_dequantize_undoes_quantize():
    x = np.random.default_rng(0).standard_normal((5, 2, 16)).astype(np.float32)
    for dtype, step in (("int8", 1 / 250), ("float8_e4m3fn", 1 / 15), ("float8_e5m2", 1 / 7)):
        scale = oracle.row_scales(x, dtype)[..., None]
        error = np.abs(oracle.dequantize(oracle.quantize(x, dtype, scale), scale) - x)
        assert (error <= np.abs(x).max(-1, keepdims=True) * step).all()
