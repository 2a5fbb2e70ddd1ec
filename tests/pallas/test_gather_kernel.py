"""The gather kernel: it lowers for CUDA in every variant, and gives what the reference gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, gather_kv, write_kv
from jaxpaged.metadata.layout import _PRESETS
from jaxpaged.pallas import gather
from jaxpaged.pallas.cache_write import WriteTiles
from jaxpaged.pallas.mosaic import interpreter

LAYOUTS = [name for name in _PRESETS if name != "VLLM_V0"]
# Heads, head_size, v_head_size.
SHAPES = [(8, 128, 128), (1, 16, 48), (3, 80, 72), (2, 64, 512), (40, 128, 128)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_layout_lowers_for_cuda(layout, dtype):
    check_lowers(jax.eval_shape(lambda: KVCache.zeros(64, 16, 8, 128, dtype, layout=layout)), 61)


@pytest.mark.parametrize(("heads", "head_size", "v_head_size"), SHAPES)
@pytest.mark.parametrize("tokens", [7, 9001])
def test_every_shape_lowers_for_cuda(heads, head_size, v_head_size, tokens):
    make = jax.tree_util.Partial(KVCache.zeros, dtype="bfloat16", v_head_size=v_head_size)
    check_lowers(jax.eval_shape(lambda: make(64, 16, heads, head_size)), tokens)


def check_lowers(cache, tokens):
    assert gather.refusal(cache, cache.dtype) is None
    table, lens = jax.ShapeDtypeStruct((3, 40), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
    traced = jax.jit(gather.gather_kv, static_argnums=3).trace(cache, table, lens, tokens)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_the_kernel_cannot_take_is_refused_with_a_reason():
    assert "dtype" in gather.refusal(KVCache.zeros(4, 8, 2, 16, "bfloat16"), jnp.dtype("float32"))
    assert "dtype" in gather.refusal(KVCache.zeros(4, 8, 2, 16, "int8", scales="head"), jnp.dtype("float32"))
    assert "VLLM_V0" in gather.refusal(KVCache.zeros(4, 8, 2, 16, "bfloat16", layout="VLLM_V0"), jnp.dtype("bfloat16"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gathers_what_the_reference_gathers(kernels, layout, dtype):
    """Slots of no request are NaN; a block is out of range, and the result is longer than the requests."""
    cache = poisoned(layout, dtype)
    table = np.array([[5, 2, 99], [-1, 0, 3], [1, 1, 1]], np.int32)
    lens = np.array([9, 7, 100], np.int32)
    arguments = (cache, table, lens)
    got = gather_kv(*arguments, total_tokens=37, implementation="mosaic_gpu")
    expected = gather_kv(*arguments, total_tokens=37, implementation="reference")
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert np.isfinite(np.asarray(got[0]).astype(np.float32)).all()


def poisoned(layout, dtype):
    """All slots that the test's requests see hold numbers, the others NaN."""
    cache = KVCache.zeros(6, 4, 2, 16, dtype, layout=layout)
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)
    slots = [*range(20, 24), *range(8, 12), *range(4), *range(12, 15), *range(4, 8)]
    rows = np.random.default_rng(0).standard_normal((2, len(slots), 2, 16), np.float32)
    key, value = jnp.asarray(rows, dtype)
    return write_kv(cache, key, value, np.array(slots, np.int32), implementation="reference")


@pytest.mark.parametrize(("heads", "head_size", "v_head_size"), SHAPES[1:4])
def test_tiles_of_several_tokens(kernels, heads, head_size, v_head_size):
    rng = np.random.default_rng(1)
    cache = KVCache.zeros(6, 4, heads, head_size, "bfloat16", v_head_size=v_head_size)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), cache)
    table, lens = jnp.asarray(rng.permutation(6).reshape(2, 3).astype(np.int32)), jnp.asarray([11, 7], jnp.int32)
    got = gather.gather_kv(cache, table, lens, 18, interpret=interpreter(), config=WriteTiles(min_ctas=1))
    expected = gather_kv(cache, table, lens, total_tokens=18, implementation="reference")
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
