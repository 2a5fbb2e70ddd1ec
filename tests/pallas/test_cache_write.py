"""The cache write kernel: it lowers for CUDA in every variant, and writes bit for bit what the oracle says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, write_kv
from jaxpaged.metadata.kv_cache import FLOAT8_DTYPES
from jaxpaged.metadata.layout import _PRESETS
from jaxpaged.pallas import cache_write
from jaxpaged.pallas.cache_write import MOST_SEARCHED, WriteTiles, write_rows
from jaxpaged.pallas.mosaic import interpreted, interpreter
from jaxpaged.testing import oracle

LAYOUTS = [name for name in _PRESETS if name != "VLLM_V0"]
# The cache's dtype, its scales, the new rows' dtype.
DTYPES = [
    ("bfloat16", None, "bfloat16"),
    ("float16", None, "float16"),
    ("float32", None, "float32"),
    ("float32", None, "bfloat16"),
    ("float32", None, "float16"),
    ("float8_e4m3fn", None, "bfloat16"),
    ("float8_e4m3fn", "tensor", "float32"),
    ("float8_e4m3fn", "head", "bfloat16"),
    ("float8_e4m3fn", "token_head", "float16"),
    ("float8_e5m2", "tensor", "bfloat16"),
    ("float8_e5m2", "head", "float32"),
    ("float8_e5m2", "token_head", "bfloat16"),
    ("int8", "tensor", "float16"),
    ("int8", "head", "bfloat16"),
    ("int8", "token_head", "float32"),
]
SHAPES = [(8, 128, 128), (1, 16, 48), (3, 80, 80), (2, 64, 512), (5, 96, 112), (2, 256, 192), (40, 128, 128)]
BLOCKS, SIZE = 6, 8


def lowered(cache, rows_dtype, *, tokens=61, slots=None):
    """The StableHLO of a donated write, for CUDA."""
    heads = cache.num_kv_heads
    arguments = [jax.ShapeDtypeStruct((tokens, heads, d), rows_dtype) for d in (cache.head_size, cache.v_head_size)]
    slots = slots or jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def write(cache, key, value, slots):
        return cache_write.write_kv(cache, key, value, slots, interpret=None)

    return jax.jit(write, donate_argnums=0).trace(cache, *arguments, slots).lower(lowering_platforms=("cuda",))


def abstract(dtype, scales, layout="NHD", heads=8, head_size=128, v_head_size=None):
    make = jax.tree_util.Partial(KVCache.zeros, dtype=dtype, layout=layout, scales=scales, v_head_size=v_head_size)
    return jax.eval_shape(lambda: make(64, 16, heads, head_size))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "scales", "rows_dtype"), DTYPES)
def test_every_variant_lowers_for_cuda(layout, dtype, scales, rows_dtype):
    cache = abstract(dtype, scales, layout)
    assert cache_write.refusal(cache, jnp.dtype(rows_dtype)) is None
    assert "mosaic_gpu" in lowered(cache, rows_dtype).as_text()


@pytest.mark.parametrize(("heads", "head_size", "v_head_size"), SHAPES)
@pytest.mark.parametrize(("dtype", "scales", "rows_dtype"), DTYPES[::2])
@pytest.mark.parametrize("tokens", [7, 9000])
def test_every_shape_lowers_for_cuda(heads, head_size, v_head_size, dtype, scales, rows_dtype, tokens):
    cache = abstract(dtype, scales, "NHD", heads, head_size, v_head_size)
    assert cache_write.refusal(cache, jnp.dtype(rows_dtype)) is None
    lowered(cache, rows_dtype, tokens=tokens)


@pytest.mark.parametrize(("dtype", "scales", "rows_dtype"), DTYPES[::4])
def test_64_bit_slots_lower_for_cuda(dtype, scales, rows_dtype):
    cache = abstract(dtype, scales)
    with jax.enable_x64(True):
        lowered(cache, rows_dtype, slots=jax.ShapeDtypeStruct((61,), jnp.int64))
    key = jax.ShapeDtypeStruct((61, 8, 128), rows_dtype)
    words = jax.ShapeDtypeStruct((61, 2), jnp.int32)
    jax.jit(write_rows).trace(cache, key, key, words).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("kept_as", FLOAT8_DTYPES)
def test_buffers_of_float8_lower_for_cuda(kept_as):
    buffer = jax.ShapeDtypeStruct((64, 16, 8, 128), kept_as)
    lowered(KVCache.from_arrays(buffer, buffer), "bfloat16")


def test_what_the_kernel_cannot_take_is_refused_with_a_reason():
    def refusal(*arguments, rows="bfloat16", **options):
        return cache_write.refusal(abstract(*arguments, **options), jnp.dtype(rows))

    assert "VLLM_V0" in refusal("bfloat16", None, "VLLM_V0")
    assert "head_size" in refusal("int8", "tensor", head_size=72)
    assert "head_size" in refusal("int8", "tensor", layout="HN2D", head_size=24, v_head_size=8)
    assert "head_size" in refusal("bfloat16", None, head_size=4, v_head_size=8)
    assert "num_kv_heads" in refusal("bfloat16", None, heads=257)
    assert "num_kv_heads" in refusal("float32", None, heads=128, head_size=256, rows="float32")
    with pytest.raises(ValueError, match="implementation: expected 'reference' or None, got 'mosaic_gpu': the kernels"):
        rows = np.zeros((1, 2, 16), np.float32)
        cache = KVCache.zeros(4, 8, 2, 16, "float32")
        write_kv(cache, rows, rows, np.zeros(1, np.int32), implementation="mosaic_gpu")


def logical(cache, which):
    """Keys or values [num_blocks, block_size, num_kv_heads, head_size] as they are stored."""
    stored = np.asarray(cache.buffer(which)).view(cache.dtype)
    blocks = stored[cache.layout.index(which, cache.dims, np.arange(cache.num_blocks))]
    axes = ("n", *cache.layout.rest(which, "n"))
    return blocks.transpose([axes.index(axis) for axis in "nshd"])


def poisoned(dtype, scales, layout="NHD", heads=2, head_size=32, v_head_size=None, blocks=BLOCKS):
    """A cache whose every byte is a canary, with scales of all sizes."""
    cache = KVCache.zeros(blocks, SIZE, heads, head_size, dtype, layout=layout, scales=scales, v_head_size=v_head_size)

    def canaries(buffer):
        words = np.arange(np.asarray(buffer).nbytes, dtype=np.uint64) * 2654435761 >> 7
        return jnp.asarray(words.astype(np.uint8).view(buffer.dtype).reshape(buffer.shape))

    rng = np.random.default_rng(1)
    new_scales = [
        None if s is None else jnp.asarray(rng.uniform(0.02, 3, s.shape), jnp.float32)
        for s in (
            cache.k_scale,
            cache.v_scale,
        )
    ]
    return dataclasses.replace(
        cache,
        key=canaries(cache.key),
        value=None if cache.value is None else canaries(cache.value),
        k_scale=new_scales[0],
        v_scale=new_scales[1],
    )


def new_rows(tokens, heads, head_size, dtype, seed=0, scales=None):
    rows = np.random.default_rng(seed).standard_normal((tokens, heads, head_size)).astype(np.float32)
    rows *= np.geomspace(1e-3, 1e3, tokens, dtype=np.float32)[:, None, None]
    if scales != "token_head":  # whether a maximum sees NaN depends on the row's length in XLA on CPUs
        rows[0, 0, :4] = np.nan, np.inf, -np.inf, 0
    rows[1] = 0
    rows[2, -1, 0] = 1e-38
    return np.asarray(jnp.asarray(rows, dtype))


def expected(cache, which, rows, slots):
    """What the oracle stores, and the scales. Its scale of a row is rounded otherwise than ours, so it gets ours."""
    stored, scale = logical(cache, which), cache.scale(which)
    scale = None if scale is None else np.array(scale)
    if scale is None or scale.ndim < 3:
        return oracle.write_kv(stored, scale, rows, slots, cache.dtype.name)
    for row, slot in zip(rows, slots, strict=False):
        peak = np.abs(row.astype(np.float32)).max(-1)
        own = np.maximum(peak * np.float32(1 / oracle._LARGEST[cache.dtype.name]), np.finfo(np.float32).tiny)
        own = np.where(peak > 0, own, np.float32(1))
        stored, _ = oracle.write_kv(stored, own, row[None], np.array([slot]), cache.dtype.name)
        if 0 <= slot < cache.num_slots:
            scale[slot // SIZE, slot % SIZE] = own
    return stored, scale


def check(before, after, rows, slots):
    """Every byte of the cache is the oracle's; NaN is NaN, whatever its bits."""
    for which, x in zip(("key", "value"), rows, strict=True):
        stored, scale = expected(before, which, x, slots)
        got = logical(after, which)
        nan = np.isnan(stored.astype(np.float32))
        bits = np.dtype(f"uint{8 * stored.itemsize}")
        written = np.zeros((before.num_slots,), bool)
        written[[s for s in slots[: len(x)] if 0 <= s < before.num_slots]] = True
        written = written.reshape((*stored.shape[:2], 1, 1)) & nan
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
        np.testing.assert_array_equal(got.view(bits)[~written], np.ascontiguousarray(stored).view(bits)[~written])
        if scale is not None:
            np.testing.assert_array_equal(np.asarray(after.scale(which)), scale)


SLOTS = np.array([5, -1, 23, 24, 0, -(2**31), 2**31 - 1, 47, 48, 11, 23, 2], np.int32)  # 23 twice, 48 is past the end


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "scales", "rows_dtype"), DTYPES[::3])
def test_writes_what_the_oracle_writes(kernels, layout, dtype, scales, rows_dtype):
    cache = poisoned(dtype, scales, layout)
    rows = [new_rows(12, 2, 32, rows_dtype, seed, scales) for seed in (0, 1)]
    check(cache, write_kv(cache, *rows, SLOTS, implementation="mosaic_gpu"), rows, SLOTS)


@pytest.mark.parametrize(("dtype", "scales", "rows_dtype"), DTYPES)
def test_conversions_are_the_oracles(kernels, dtype, scales, rows_dtype):
    cache = poisoned(dtype, scales, heads=3, head_size=80, v_head_size=48)
    rows = [new_rows(12, 3, size, rows_dtype, size, scales) for size in (80, 48)]
    check(cache, write_kv(cache, *rows, SLOTS, implementation="mosaic_gpu"), rows, SLOTS)


@pytest.mark.parametrize(("heads", "head_size", "v_head_size"), SHAPES[:-1])
@pytest.mark.parametrize(("dtype", "scales", "rows_dtype"), [DTYPES[0], DTYPES[8]])
def test_tiles_of_several_tokens(kernels, heads, head_size, v_head_size, dtype, scales, rows_dtype):
    cache = poisoned(dtype, scales, heads=heads, head_size=head_size, v_head_size=v_head_size)
    rows = [new_rows(29, heads, size, rows_dtype, size, scales) for size in (head_size, v_head_size)]
    slots = np.random.default_rng(2).permutation(np.arange(-4, 52))[:29].astype(np.int32)
    after = write_rows(cache, *map(jnp.asarray, rows), slots, interpret=interpreter(), config=WriteTiles(min_ctas=1))
    check(cache, after, rows, slots)


@pytest.mark.parametrize(("tokens", "slots"), [(5, 3), (3, 5), (3, 0), (0, 3)])
def test_slot_mapping_may_be_longer_or_shorter_than_the_tokens(kernels, tokens, slots):
    cache = poisoned("bfloat16", None)
    rows = [new_rows(8, 2, 32, "bfloat16")[:tokens]] * 2
    after = write_kv(cache, *rows, np.arange(slots, dtype=np.int32), implementation="mosaic_gpu")
    check(cache, after, rows, np.arange(slots))


def test_64_bit_slots(kernels):
    cache = poisoned("bfloat16", None)
    rows = [new_rows(6, 2, 32, "bfloat16")] * 2
    slots = np.array([2**32 + 3, 7, -(2**40), 47, 48, 2**31], np.int64)
    check(cache, write_kv(cache, *rows, slots, implementation="mosaic_gpu"), rows, slots)
    words = jnp.asarray(slots.view(np.int32).reshape(-1, 2))
    check(cache, write_rows(cache, *map(jnp.asarray, rows), words, interpret=interpreter()), rows, slots)
    with jax.enable_x64(True):
        check(cache, write_kv(cache, *rows, jnp.asarray(slots), implementation="mosaic_gpu"), rows, slots)


def equal_slots(tokens, bits):
    """Slots of which many are given several times; and of 64 bits, ones that differ from others in the high word."""
    rng = np.random.default_rng(tokens)
    slots = rng.integers(-3, BLOCKS * SIZE + 3, tokens).astype(f"int{bits}")
    if bits == 64:
        slots[rng.random(tokens) < 0.3] += 2**32
    return slots


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("tokens", [31, 72, *(pytest.param(n, marks=pytest.mark.gpu) for n in (509, MOST_SEARCHED))])
def test_of_tokens_with_one_slot_the_last_is_kept(kernels, tokens, bits):
    cache = poisoned("bfloat16", None)
    rows = [new_rows(tokens, 2, 32, "bfloat16", seed) for seed in (0, 1)]
    slots = equal_slots(tokens, bits)
    with jax.enable_x64(True):
        check(cache, write_kv(cache, *rows, jnp.asarray(slots), implementation="mosaic_gpu"), rows, slots)


def test_slots_given_twice_are_a_race_unless_the_last_is_kept(complaints):
    cache = poisoned("bfloat16", None)
    rows = [jnp.asarray(new_rows(12, 2, 32, "bfloat16"))] * 2
    with interpreted():
        raised, printed = complaints(
            lambda: jax.block_until_ready(write_rows(cache, *rows, SLOTS, interpret=interpreter()))
        )
    assert "RACE DETECTED" in (raised or "") + printed


@pytest.mark.parametrize(("tokens", "slots_dtype"), [(64, jnp.int32), (MOST_SEARCHED, jnp.int64)])
def test_few_slots_are_looked_at_by_the_kernel_alone(tokens, slots_dtype):
    with jax.enable_x64(True):
        slots = jax.ShapeDtypeStruct((tokens,), slots_dtype)
        text = lowered(abstract("bfloat16", None), "bfloat16", tokens=tokens, slots=slots).as_text()
    assert text.count("mosaic_gpu") and "stablehlo.compare" not in text
    with_xla = lowered(abstract("bfloat16", None), "bfloat16", tokens=MOST_SEARCHED + 1).as_text()
    assert "stablehlo.compare" in with_xla


def fields_of(cache):
    return [getattr(cache, field.name) for field in dataclasses.fields(cache)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrontPart(KVCache):
    """A cache that is all but the last two blocks of its buffers: those are a guard band."""

    @property
    def dims(self):
        return dataclasses.replace(super().dims, num_blocks=BLOCKS - 2)


@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", None), ("int8", "token_head")])
def test_nothing_outside_the_cache_is_written(kernels, dtype, scales):
    whole = poisoned(dtype, scales)
    part = FrontPart(*fields_of(whole))
    rows = [new_rows(4, 2, 32, "bfloat16", 0, scales)] * 2
    slots = np.array([3, 4 * SIZE, 4 * SIZE + 7, 5 * SIZE], np.int32)
    after = write_kv(part, *rows, slots, implementation="mosaic_gpu")
    check(whole, KVCache(*fields_of(after)), rows, np.array([3, -1, -1, -1]))
    with pytest.raises(AssertionError):  # the guard band would show it
        check(whole, write_kv(whole, *rows, slots, implementation="mosaic_gpu"), rows, np.array([3, -1, -1, -1]))


@pytest.mark.gpu
def test_many_tokens(hopper):
    cache = KVCache.zeros(4096, 16, 8, 128, "bfloat16")
    rng = np.random.default_rng(4)
    key, value = (jnp.asarray(rng.standard_normal((65531, 8, 128), np.float32), jnp.bfloat16) for _ in range(2))
    slots = rng.permutation(65536)[:65531].astype(np.int32)
    slots[::97] = -1
    slots[-1] = slots[1]
    results = [write_kv(cache, key, value, slots, implementation=name) for name in ("mosaic_gpu", "mosaic_gpu")]
    kept = slots.copy()
    kept[1] = -1
    results.append(write_kv(cache, key, value, kept, implementation="reference"))
    for one in results[1:]:
        assert jnp.array_equal(results[0].key, one.key)
        assert jnp.array_equal(results[0].value, one.value)
