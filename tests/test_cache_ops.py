"""Writes, copies and reads of the cache, value by value, in every layout."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, copy_blocks, gather_kv, swap_blocks, write_kv
from jaxpaged.metadata.layout import _PRESETS
from jaxpaged.reference.quantize import quantize

BLOCKS, SIZE, HEADS, HEAD_SIZE = 6, 4, 2, 16


def rows(seed, n, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((n, HEADS, HEAD_SIZE)).astype(dtype)


def everything(cache):
    """All slots' keys and values, dequantised: [num_slots, num_kv_heads, head_size] each."""
    table = np.arange(cache.num_blocks, dtype=np.int32)[None]
    return [np.asarray(x) for x in gather_kv(cache, table, np.array([cache.num_slots], np.int32))]


@pytest.mark.parametrize("slot_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("layout", _PRESETS)
def test_write_puts_rows_into_their_slots_and_skips_the_rest(layout, slot_dtype):
    cache = KVCache.zeros(BLOCKS, SIZE, HEADS, HEAD_SIZE, "float32", layout=layout)
    key, value = rows(0, 7), rows(1, 7)
    slots = np.array([5, -1, 23, 24, 0, -(2**31), 2**31 - 1], slot_dtype)
    if slot_dtype == np.int64:
        slots[5:] = 2**32 + 3, -(2**40)  # their low words are slots of the cache
    keys, values = everything(write_kv(cache, key, value, slots))
    expected_keys, expected_values = np.zeros_like(keys), np.zeros_like(values)
    for token in (0, 2, 4):
        expected_keys[slots[token]], expected_values[slots[token]] = key[token], value[token]
    np.testing.assert_array_equal(keys, expected_keys)
    np.testing.assert_array_equal(values, expected_values)


def test_int64_slots_under_x64():
    with jax.enable_x64(True):
        cache = KVCache.zeros(BLOCKS, SIZE, HEADS, HEAD_SIZE, "float32")
        slots = jnp.array([2**32 + 3, 3, -(2**32)], jnp.int64)
        assert slots.dtype == jnp.int64
        keys, _ = everything(write_kv(cache, rows(0, 3), rows(1, 3), slots))
    assert np.flatnonzero(keys.any((1, 2))).tolist() == [3]
    np.testing.assert_array_equal(keys[3], rows(0, 3)[1])


@pytest.mark.parametrize(("tokens", "slots"), [(5, 3), (3, 5)])
def test_slot_mapping_may_be_longer_or_shorter_than_the_tokens(tokens, slots):
    cache = KVCache.zeros(BLOCKS, SIZE, HEADS, HEAD_SIZE, "float32")
    keys, _ = everything(write_kv(cache, rows(0, tokens), rows(1, tokens), np.arange(slots, dtype=np.int32)))
    np.testing.assert_array_equal(keys[:3], rows(0, tokens)[:3])
    assert not keys[3:].any()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("scales", ["tensor", "head"])
def test_write_quantises_with_given_scales(dtype, scales):
    cache = KVCache.zeros(BLOCKS, SIZE, HEADS, HEAD_SIZE, dtype, scales=scales)
    scale = np.float32(0.05) if scales == "tensor" else np.array([0.05, 0.2], np.float32)
    cache = KVCache.from_arrays(
        cache.key, cache.value, k_scale=jnp.asarray(scale), v_scale=jnp.asarray(scale), dtype=dtype
    )
    key = rows(0, 3)
    key[0, 0, :3] = np.inf, -np.inf, 1e9  # saturate
    keys, _ = everything(write_kv(cache, key, key, np.arange(3, dtype=np.int32)))
    by_head = scale if scales == "tensor" else scale[:, None]
    expected = np.asarray(quantize(jnp.asarray(key), dtype, by_head).astype(jnp.float32)) * by_head
    np.testing.assert_array_equal(keys[:3], expected)
    assert np.isfinite(keys).all()
    assert np.abs(keys[1:3] - key[1:3]).max() < {"int8": 0.11, "float8_e4m3fn": 0.2, "float8_e5m2": 0.4}[dtype]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_write_renews_scales_per_token_and_head(dtype):
    cache = KVCache.zeros(BLOCKS, SIZE, HEADS, HEAD_SIZE, dtype, scales="token_head")
    key = rows(0, 3) * np.array([1, 1000, 0], np.float32)[:, None, None]
    written = write_kv(cache, key, key, np.array([9, 2, 3], np.int32))
    keys, values = everything(written)
    np.testing.assert_array_equal(keys, values)
    step = {"int8": 1 / 250, "float8_e4m3fn": 1 / 15, "float8_e5m2": 1 / 7}[dtype]
    peak = np.abs(key).max(-1, keepdims=True)
    assert (np.abs(keys[[9, 2, 3]] - key) <= peak * step).all()
    assert np.asarray(written.k_scale)[0, 3].tolist() == [1.0, 1.0]  # a row of zeros


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_rows_of_tiny_numbers_stay_finite_and_near(dtype):
    cache = KVCache.zeros(BLOCKS, SIZE, HEADS, HEAD_SIZE, dtype, scales="token_head")
    key = rows(0, 3) * np.float32(1e-36)
    written = write_kv(cache, key, key, np.arange(3, dtype=np.int32))
    keys, _ = everything(written)
    assert (np.asarray(written.k_scale) > 0).all()
    assert np.abs(keys[:3] - key).max() < 1e-1 * np.abs(key).max()


def test_quantize_rounds_to_even_saturates_and_keeps_or_zeroes_nan():
    x = jnp.array([0.5, 1.5, -2.5, 1e9, -jnp.inf, jnp.nan])
    assert quantize(x, jnp.int8, 1.0).tolist() == [0, 2, -2, 127, -127, 0]
    as_float = quantize(x, jnp.float8_e4m3fn, 1.0).astype(jnp.float32)
    assert as_float[:5].tolist() == [0.5, 1.5, -2.5, 448.0, -448.0]
    assert np.isnan(as_float[5])


@pytest.mark.parametrize("layout", _PRESETS)
@pytest.mark.parametrize("scales", [None, "token_head"])
def test_copy_blocks_reads_before_it_writes_and_skips_bad_pairs(layout, scales):
    dtype = "int8" if scales else "float32"
    cache = KVCache.zeros(BLOCKS, SIZE, HEADS, HEAD_SIZE, dtype, layout=layout, scales=scales)
    all_slots = np.arange(BLOCKS * SIZE, dtype=np.int32)
    cache = write_kv(cache, rows(0, 24), rows(1, 24), all_slots)
    before = everything(cache)
    after = everything(copy_blocks(cache, [[0, 1], [1, 0], [2, 5], [-1, 3], [3, 6], [6, 4]]))
    order = [1, 0, 2, 3, 4, 2]
    for old, new in zip(before, after, strict=True):
        blocks = old.reshape(BLOCKS, SIZE, HEADS, HEAD_SIZE)[order]
        np.testing.assert_array_equal(new.reshape(blocks.shape), blocks)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_swap_blocks_between_caches_of_different_size(dtype):
    scales = None if dtype == "float32" else "token_head"
    src = KVCache.zeros(3, SIZE, HEADS, HEAD_SIZE, dtype, scales=scales)
    src = write_kv(src, rows(0, 12), rows(1, 12), np.arange(12, dtype=np.int32))
    dst = KVCache.zeros(BLOCKS, SIZE, HEADS, HEAD_SIZE, dtype, scales=scales)
    swapped = everything(swap_blocks(src, dst, np.array([[2, 0], [0, 5], [3, 1], [1, 6]])))
    for old, new in zip(everything(src), swapped, strict=True):
        np.testing.assert_array_equal(new[:4], old[8:12])
        np.testing.assert_array_equal(new[20:], old[:4])
        assert not new[4:20].any()


def test_gather_kv_pads_and_gives_zeros_for_blocks_out_of_range():
    cache = KVCache.zeros(BLOCKS, SIZE, HEADS, HEAD_SIZE, "float32", v_head_size=8)
    value = rows(1, 24)[..., :8]
    cache = write_kv(cache, rows(0, 24), value, np.arange(24, dtype=np.int32))
    table = np.array([[3, 99], [-1, 1], [0, 0]], np.int32)
    lens = np.array([6, 100, 0], np.int32)  # the second is clamped to 8
    keys, values = jax.jit(gather_kv, static_argnames="total_tokens")(cache, table, lens, total_tokens=16)
    assert values.shape == (16, HEADS, 8)
    np.testing.assert_array_equal(keys[:4], rows(0, 24)[12:16])
    assert not keys[4:10].any()
    np.testing.assert_array_equal(values[10:14], value[4:8])
    assert not keys[14:].any()


SWAP_BETWEEN_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jaxpaged import KVCache, swap_blocks

def cache(number, device):
    key, value = (jax.device_put(jnp.full((4, 8, 1, 16), number + i, jnp.float32), device) for i in range(2))
    return KVCache.from_arrays(key, value)

here, there = jax.devices()
pairs = np.array([[0, 1], [-1, 2], [9, 3], [1, 0], [-1, 0], [2, 7]])
for target in (here, there):
    swapped = swap_blocks(cache(5, here), cache(7, target), pairs)
    assert swapped.key.devices() == {target}
    assert np.asarray(swapped.key)[:, 0, 0, 0].tolist() == [5, 5, 7, 7], swapped.key[:, 0, 0, 0]
    assert np.asarray(swapped.value)[:, 0, 0, 0].tolist() == [6, 6, 8, 8]
"""


def test_swap_blocks_between_devices(with_devices):
    """A pair whose source does not exist writes nothing and hides no other pair, wherever the caches lie."""
    subprocess.run([sys.executable, "-c", SWAP_BETWEEN_DEVICES], env=with_devices(2), check=True, timeout=300)
