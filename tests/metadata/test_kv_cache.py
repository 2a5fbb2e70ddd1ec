"""Making caches: sizes, dtypes, scales, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.metadata.layout import CacheDims, KVLayout

NAMES = ["NHD", "HND", "2NHD", "2HND", "N2HD", "HN2D", "NH2D", "VLLM_V0"]
EIGHT_BIT = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_zeros(name, dtype):
    cache = KVCache.zeros(5, 4, 3, 16, dtype, layout=name)
    assert cache.dims == CacheDims(5, 4, 3, 16, 16)
    assert (cache.num_blocks, cache.block_size, cache.num_kv_heads) == (5, 4, 3)
    assert (cache.head_size, cache.v_head_size, cache.num_slots) == (16, 16, 20)
    assert cache.layout == KVLayout.of(name) and cache.dtype == dtype and not cache.quantized
    x = 16 // jnp.dtype(dtype).itemsize
    shapes = cache.layout.shapes(cache.dims, x)
    assert cache.key.shape == shapes[0] and cache.key.dtype == dtype
    assert (None if cache.value is None else cache.value.shape) == shapes[1]
    assert not any(np.any(np.asarray(leaf, np.float32)) for leaf in jax.tree.leaves(cache))
    assert cache.buffer("key") is cache.key
    assert cache.buffer("value") is (cache.key if cache.value is None else cache.value)
    assert cache.k_scale is None and cache.v_scale is None


def test_zeros_with_value_heads_of_another_size():
    for name, key_shape in (("NHD", (5, 4, 3, 16)), ("HN2D", (5, 3, 4, 24)), ("NH2D", (5, 4, 3, 24))):
        cache = KVCache.zeros(5, 4, 3, 16, jnp.float32, layout=name, v_head_size=8)
        assert cache.key.shape == key_shape and (cache.head_size, cache.v_head_size) == (16, 8)


@pytest.mark.parametrize("dtype", EIGHT_BIT)
@pytest.mark.parametrize(("kind", "shape"), [("tensor", ()), ("head", (3,)), ("token_head", (5, 4, 3))])
def test_zeros_with_scales(dtype, kind, shape):
    cache = KVCache.zeros(5, 4, 3, 16, dtype, scales=kind)
    assert cache.quantized and cache.dtype == dtype
    for which in ("key", "value"):
        scale = cache.scale(which)
        assert scale.dtype == jnp.float32
        np.testing.assert_array_equal(scale, np.ones(shape))
    assert cache.scale("key") is cache.k_scale and cache.scale("value") is cache.v_scale


def test_float8_needs_no_scales_and_one_may_be_missing():
    assert KVCache.zeros(5, 4, 3, 16, jnp.float8_e4m3fn).k_scale is None
    key = jnp.zeros((5, 4, 3, 16), jnp.float8_e5m2)
    cache = KVCache.from_arrays(key, key, v_scale=jnp.full(3, 2, jnp.float32))
    assert cache.k_scale is None and cache.v_scale.tolist() == [2, 2, 2]


@pytest.mark.parametrize("scale", [2, 2.0, np.float64(2), np.float32(2), jnp.float32(2)])
def test_numbers_are_scales_per_tensor(scale):
    key = np.zeros((5, 4, 3, 16), np.int8)
    cache = KVCache.from_arrays(key, key, k_scale=scale, v_scale=scale)
    for got in (cache.k_scale, cache.v_scale):
        assert got.dtype == jnp.float32 and got.shape == () and float(got) == 2


@pytest.mark.parametrize("name", NAMES)
def test_from_arrays_keeps_the_arrays_and_reads_the_sizes(name):
    layout = KVLayout.of(name)
    key_shape, value_shape = layout.shapes(CacheDims(5, 4, 3, 16, 16))
    key = jnp.zeros(key_shape, jnp.bfloat16)
    value = None if value_shape is None else jnp.zeros(value_shape, jnp.bfloat16)
    for given in (name, layout):
        cache = KVCache.from_arrays(key, value, layout=given)
        assert cache.key is key and cache.value is value
        assert cache.dims == CacheDims(5, 4, 3, 16, 16)


def test_from_arrays_of_unequal_heads_in_one_row():
    cache = KVCache.from_arrays(np.zeros((5, 3, 4, 24), np.float32), layout="HN2D", head_size=16)
    assert (cache.head_size, cache.v_head_size) == (16, 8)


def test_a_cache_is_a_pytree_of_its_arrays():
    cache = KVCache.zeros(5, 4, 3, 16, jnp.int8, scales="head")
    assert len(jax.tree.leaves(cache)) == 4
    assert len(jax.tree.leaves(KVCache.zeros(5, 4, 3, 16, jnp.float32, layout="N2HD"))) == 1
    traces = []

    @jax.jit
    def add_one(cache):
        traces.append(cache.dims)
        return jax.tree.map(lambda x: x + 1, cache)

    got = add_one(add_one(cache))
    assert got.layout == cache.layout and got.dims == cache.dims and len(traces) == 1
    assert np.all(got.key == 2) and np.all(got.v_scale == 3)


zeros_defaults = {"num_blocks": 5, "block_size": 4, "num_kv_heads": 3, "head_size": 16, "dtype": jnp.float32}


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        *[
            (ValueError, f"{name}: expected a positive int, got 0", {name: 0})
            for name in ("num_blocks", "block_size", "num_kv_heads", "head_size", "v_head_size")
        ],
        (TypeError, "block_size: expected a positive int, got 4.0", {"block_size": 4.0}),
        (TypeError, "num_blocks: expected a positive int, got True", {"num_blocks": True}),
        (TypeError, "dtype: expected dtype float32 or bfloat16 or .* or int8, got float64", {"dtype": np.float64}),
        (TypeError, "dtype: expected dtype .* got int32", {"dtype": jnp.int32}),
        (ValueError, "layout: expected one of NHD, .* got 'DHN'", {"layout": "DHN"}),
        (TypeError, "layout: expected a name or a KVLayout, got tuple", {"layout": (1, 2)}),
        (ValueError, "layout N2HD: .* got head_size=16, v_head_size=8", {"layout": "N2HD", "v_head_size": 8}),
        (ValueError, "layout VLLM_V0: head_size 18 is not a multiple of x = 4", {"layout": "VLLM_V0", "head_size": 18}),
        (ValueError, "scales: expected 'tensor', 'head', 'token_head' or None, got 'row'", {"scales": "row"}),
        (ValueError, "scales: they belong to 8-bit caches, expected None for float32, got 'head'", {"scales": "head"}),
        (ValueError, "k_scale, v_scale: an int8 cache needs both scales, got None", {"dtype": jnp.int8}),
    ],
)
def test_errors_of_zeros(error, message, change):
    with pytest.raises(error, match=message):
        KVCache.zeros(**{**zeros_defaults, **change})


FLOATS = np.zeros((5, 4, 3, 16), np.float32)
INT8 = np.zeros((5, 4, 3, 16), np.int8)
ONE = np.float32(1)


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (TypeError, "key_cache: expected an array, got list", ([1.0], FLOATS), {}),
        (TypeError, "key_cache: expected an array, got NoneType", (None, FLOATS), {}),
        (TypeError, "value_cache: expected an array, got int", (FLOATS, 3), {}),
        (ValueError, "layout: value_cache=None means .* but NHD keeps them apart", (FLOATS,), {}),
        (
            ValueError,
            "value_cache: layout HN2D holds keys and values in key_cache",
            (FLOATS, FLOATS),
            {"layout": "HN2D"},
        ),
        (ValueError, r"key_cache: layout NHD expects shape .* got \[4, 3, 16\]", (FLOATS[0], FLOATS), {}),
        (ValueError, "value_cache: block_size is 2, but 4 in key_cache", (FLOATS, FLOATS[:, :2]), {}),
        (ValueError, "head_size: the key cache holds heads of 16, got 8", (FLOATS, FLOATS), {"head_size": 8}),
        (TypeError, "key_cache: expected dtype .* got float64", (FLOATS.astype(float), FLOATS), {}),
        (TypeError, "value_cache: expected dtype float32, got float16", (FLOATS, FLOATS.astype(np.float16)), {}),
        (ValueError, "k_scale: scales belong to 8-bit caches, expected None", (FLOATS, FLOATS), {"k_scale": 1.0}),
        (ValueError, "k_scale, v_scale: an int8 cache needs both scales, got None", (INT8, INT8), {"v_scale": 1.0}),
        (TypeError, "v_scale: expected an array, got list", (INT8, INT8), {"k_scale": 1.0, "v_scale": [1.0]}),
        (
            TypeError,
            "k_scale: expected dtype float32, got float64",
            (INT8, INT8),
            {"k_scale": np.ones(3), "v_scale": 1.0},
        ),
        (
            ValueError,
            r"v_scale: expected shape \[\] or \[3\] or \[5, 4, 3\], got \[4\]",
            (INT8, INT8),
            {"k_scale": ONE, "v_scale": np.ones(4, np.float32)},
        ),
    ],
)
def test_errors_of_from_arrays(error, message, arguments, options):
    with pytest.raises(error, match=message):
        KVCache.from_arrays(*arguments, **options)


@pytest.mark.parametrize("layout", ["NHD", "2HND", "HN2D", "VLLM_V0"])
def test_sizes_are_those_of_the_part_that_vmap_hands_over(layout):
    caches = [KVCache.zeros(5, 4, 2, 16, "float32", layout=layout) for _ in range(3)]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *caches)
    seen = []
    jax.vmap(lambda cache: seen.append(cache.dims) or cache)(stacked)
    assert seen == [caches[0].dims]
