"""The block copy kernels: they lower for CUDA in every variant, and copy what the oracle copies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, copy_blocks, swap_blocks
from jaxpaged.metadata.layout import _PRESETS
from jaxpaged.pallas import block_copy
from jaxpaged.pallas.block_copy import CopyTiles
from jaxpaged.pallas.block_pairs import block_pairs
from jaxpaged.pallas.mosaic import interpreter
from jaxpaged.testing import oracle

DTYPES = [("bfloat16", None), ("float32", None), ("float8_e4m3fn", "head"), ("int8", "token_head")]
BLOCKS, SIZE, HEADS, HEAD_SIZE = 6, 4, 2, 16
# Chains, a cycle, copies to the same block, a block onto itself, blocks out of range.
PAIRS = {
    "apart": [[0, 3], [1, 4], [0, 5]],
    "chain": [[0, 1], [1, 2], [2, 3]],
    "cycle": [[0, 1], [1, 0], [2, 2]],
    "same target": [[0, 3], [1, 3], [2, 3], [4, 4], [5, 4]],
    "itself last": [[5, 4], [4, 4], [4, 1]],
    "out of range": [[-1, 3], [3, 6], [6, 4], [0, -1], [2**31 - 1, 0], [0, -(2**31)], [1, 5]],
    "none": [],
}


def copied(cache, source, pairs):
    """What the oracle makes of each buffer: blocks are the axis n, wherever it lies."""
    result = {}
    for name in ("key", "value", "k_scale", "v_scale"):
        old, new = getattr(source, name), getattr(cache, name)
        if new is None or (name.endswith("scale") and new.ndim < 3):
            result[name] = new
            continue
        axis = 0 if name.endswith("scale") else cache.layout.axes(name).index("n")
        old, new = (np.moveaxis(np.asarray(x), axis, 0) for x in (old, new))
        result[name] = np.moveaxis(oracle.swap_blocks(old, new, pairs), 0, axis)
    return result


def random(dtype, scales, layout="NHD", blocks=BLOCKS, seed=0, **sizes):
    sizes = {"block_size": SIZE, "num_kv_heads": HEADS, "head_size": HEAD_SIZE} | sizes
    cache = KVCache.zeros(blocks, **sizes, dtype=dtype, layout=layout, scales=scales)
    rng = np.random.default_rng(seed)

    def noise(x):
        return (
            None if x is None else jnp.asarray(rng.integers(0, 256, x.nbytes, np.uint8).view(x.dtype).reshape(x.shape))
        )

    return dataclasses.replace(
        cache,
        key=noise(cache.key),
        value=noise(cache.value),
        k_scale=noise(cache.k_scale),
        v_scale=noise(cache.v_scale),
    )


def check(got, expected):
    for name, x in expected.items():
        if x is not None:
            assert np.asarray(getattr(got, name)).tobytes() == np.ascontiguousarray(x).tobytes(), name


@pytest.mark.parametrize("layout", _PRESETS)
@pytest.mark.parametrize(("dtype", "scales"), DTYPES)
def test_every_variant_lowers_for_cuda(layout, dtype, scales):
    make = jax.tree_util.Partial(KVCache.zeros, dtype=dtype, layout=layout, scales=scales)
    cache, other = (jax.eval_shape(lambda n=n: make(n, 16, 8, 128)) for n in (64, 9))
    assert block_copy.refusal(cache) is None

    def copy(source, target, pairs):
        blocks = block_pairs(pairs, (source or target).num_blocks, target.num_blocks, within=source is None)
        return block_copy.copy_blocks(source, target, blocks)

    for source in (None, other):
        for x64, index in ((False, jnp.int32), (True, jnp.int64)):
            with jax.enable_x64(x64):
                pairs = jax.ShapeDtypeStruct((5, 2), index)
                traced = jax.jit(copy, donate_argnums=1).trace(source, cache, pairs)
                assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("block_size", "heads", "head_size"), [(1, 1, 16), (3, 5, 72), (16, 5, 128), (256, 8, 128), (16, 128, 512)]
)
def test_every_shape_lowers_for_cuda(block_size, heads, head_size):
    for dtype, scales in DTYPES[:2]:
        make = jax.tree_util.Partial(KVCache.zeros, dtype=dtype, scales=scales)
        cache = jax.eval_shape(lambda make=make: make(8, block_size, heads, head_size))
        assert block_copy.refusal(cache) is None

        def copy(target, pairs):
            return block_copy.copy_blocks(None, target, block_pairs(pairs, 8, 8, within=True))

        pairs = jax.ShapeDtypeStruct((300, 2), jnp.int32)
        jax.jit(copy, donate_argnums=0).trace(cache, pairs).lower(lowering_platforms=("cuda",))


def test_blocks_of_odd_sizes_are_refused_with_a_reason():
    cache = KVCache.zeros(4, 1, 1, 8, "int8", scales="tensor")
    assert "block_size" in block_copy.refusal(cache)
    cache = KVCache.zeros(4, 3, 1, 16, "int8", scales="token_head")
    assert "k_scale" in block_copy.refusal(cache)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_copies_within_a_cache(kernels, pairs, on_host):
    cache = random("int8", "token_head")
    pairs = np.asarray(pairs, np.int32).reshape(-1, 2)
    got = copy_blocks(cache, pairs if on_host else jnp.asarray(pairs), implementation="mosaic_gpu")
    check(got, copied(cache, cache, pairs))


@pytest.mark.parametrize("layout", _PRESETS)
@pytest.mark.parametrize(("dtype", "scales"), DTYPES)
def test_copies_in_every_layout(kernels, layout, dtype, scales):
    cache = random(dtype, scales, layout)
    pairs = np.array(PAIRS["chain"], np.int32)
    check(copy_blocks(cache, jnp.asarray(pairs), implementation="mosaic_gpu"), copied(cache, cache, pairs))


@pytest.mark.parametrize("layout", ["NHD", "2HND", "HN2D"])
def test_copies_from_another_cache(kernels, layout):
    source, cache = random("bfloat16", None, layout, blocks=3, seed=1), random("bfloat16", None, layout)
    pairs = np.array([[2, 0], [0, 5], [3, 1], [1, 6], [1, 0]], np.int64)
    check(swap_blocks(source, cache, pairs, implementation="mosaic_gpu"), copied(cache, source, pairs))
    check(swap_blocks(source, cache, jnp.asarray(pairs), implementation="mosaic_gpu"), copied(cache, source, pairs))


@pytest.mark.parametrize("config", [CopyTiles(chunk_bytes=64, aside_ctas=2), CopyTiles(chunk_bytes=1300, aside_ctas=1)])
def test_blocks_in_many_chunks(kernels, config):
    """Chunks that don't divide a block, keys and values of different sizes, and more pairs than CTAs."""
    cache = random("float16", None, blocks=7, block_size=16, num_kv_heads=5, v_head_size=40)
    pairs = np.array([[i, (i + 1) % 7] for i in range(7)], np.int32)
    planned = block_pairs(jnp.asarray(pairs), 7, 7, within=True)
    got = block_copy.copy_blocks(None, cache, planned, interpret=interpreter(), config=config)
    check(got, copied(cache, cache, pairs))


def test_pairs_with_64_bit_indices():
    pairs = np.array([[2**32, 1], [0, 2**32 + 1], [3, 2]], np.int64)
    with jax.enable_x64(True):
        planned = block_pairs(jnp.asarray(pairs), 4, 4, within=True)
    assert np.asarray(planned.target).tolist() == [-1, -1, 2]
    assert block_pairs(pairs, 4, 4, within=True).target.tolist() == [-1, -1, 2]


def test_only_overwritten_sources_are_set_aside():
    pairs = np.array(PAIRS["chain"] + [[5, 4]], np.int32)
    planned = block_pairs(jnp.asarray(pairs), 6, 6, within=True)
    assert planned.overwritten.tolist() == [0, 1, 1, 0]
    assert int(planned.any_overwritten) == 1
    assert int(block_pairs(jnp.asarray(pairs[[0, 3]]), 6, 6, within=True).any_overwritten) == 0
    assert block_pairs(pairs[[0, 3]], 6, 6, within=True).overwritten is None


@pytest.mark.gpu
def test_many_blocks(hopper):
    cache = random("bfloat16", None, blocks=9000, block_size=16, num_kv_heads=8, head_size=128)
    rng = np.random.default_rng(5)
    for pairs in (rng.permutation(9000)[:8192].reshape(-1, 2), rng.integers(-10, 9010, (4096, 2))):
        pairs = pairs.astype(np.int32)
        expected = copied(cache, cache, pairs)
        check(copy_blocks(cache, jnp.asarray(pairs), implementation="mosaic_gpu"), expected)
        check(copy_blocks(cache, pairs, implementation="mosaic_gpu"), expected)
