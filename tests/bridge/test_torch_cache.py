"""PyTorch's in-place writes to its caches: the bits that `jaxpaged.write_kv` and its siblings give, and no copy."""

import os
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxpaged
from jaxpaged import KVCache, KVLayout
from jaxpaged.bridge.dlpack import to_numpy
from jaxpaged.bridge.torch_cache import TorchCache, copy_blocks_, quantize, swap_blocks_, write_kv_
from jaxpaged.metadata.layout import CacheDims
from jaxpaged.reference.quantize import quantize as reference_quantize

DIMS = CacheDims(num_blocks=6, block_size=4, num_kv_heads=3, head_size=16, v_head_size=16)
LAYOUTS = [
    "NHD",
    "HND",
    "2NHD",
    "2HND",
    "N2HD",
    "HN2D",
    "NH2D",
    "VLLM_V0",
    KVLayout("n 2 h s d"),
    KVLayout("n s 2 h d"),
]
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def make_cache(layout="NHD", dtype=torch.float32, k_scale=None, v_scale=None, dims=DIMS) -> TorchCache:
    torch.manual_seed(3)
    layout = KVLayout.of(layout)
    shapes = layout.shapes(dims)
    buffers = [None if shape is None else (torch.randn(shape) * 4).to(dtype) for shape in shapes]
    return TorchCache.of(*buffers, layout=layout, k_scale=k_scale, v_scale=v_scale, head_size=dims.head_size)


def jax_copy(cache: TorchCache) -> KVCache:
    """A cache of JAX's own with the same contents, float8 kept as uint8 as in `KVCache.zeros`."""
    float8 = jnp.dtype(str(cache.dtype).removeprefix("torch.")) if cache.dtype in FLOAT8 else None
    arrays = [
        None if x is None else jnp.array(to_numpy(x.view(torch.uint8) if float8 else x))
        for x in (cache.key, cache.value)
    ]
    scales = [None if x is None else jnp.array(to_numpy(x)) for x in (cache.k_scale, cache.v_scale)]
    return KVCache.from_arrays(
        *arrays,
        layout=cache.layout,
        k_scale=scales[0],
        v_scale=scales[1],
        head_size=cache.dims.head_size,
        dtype=float8,
    )


def assert_same(cache: TorchCache, expected: KVCache) -> None:
    for name in ("key", "value", "k_scale", "v_scale"):
        ours, theirs = getattr(cache, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert to_numpy(ours).tobytes() == np.asarray(theirs).tobytes(), name


def bits(cache: TorchCache) -> list[bytes]:
    tensors = (cache.key, cache.value, cache.k_scale, cache.v_scale)
    return [to_numpy(x).tobytes() for x in tensors if x is not None]


def new_tokens(num_tokens: int, dtype=torch.float32, dims=DIMS) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as slices of one fused projection, with numbers that a cast may stumble over."""
    torch.manual_seed(4)
    heads = dims.num_kv_heads
    qkv = torch.randn(num_tokens, heads * (2 * dims.head_size + dims.v_head_size)) * 30
    qkv[0, :] = torch.linspace(-1e-5, 1e-5, qkv.shape[1])
    qkv[1, ::3] = float("nan")
    qkv[1, 1::3] = float("inf")
    qkv[2, ::2], qkv[2, 1::2] = -0.0, 70000.0
    _, key, value = qkv.to(dtype).split([heads * d for d in (dims.head_size, dims.head_size, dims.v_head_size)], -1)
    return key.view(num_tokens, heads, -1), value.view(num_tokens, heads, -1)


SLOTS = [5, 0, 23, 11, -1, 8, 24, 1000, 2**31 - 1, 17, -7, 2]


def written(cache: TorchCache, dtype: torch.dtype, slots: torch.Tensor) -> None:
    """Write to the cache and compare with what JAX writes to a copy."""
    expected = jax_copy(cache)
    key, value = new_tokens(len(SLOTS), dtype)
    pointers = [x.data_ptr() for x in (cache.key, cache.value, slots) if x is not None]
    write_kv_(cache, key, value, slots)
    assert pointers == [x.data_ptr() for x in (cache.key, cache.value, slots) if x is not None]
    jax_key, jax_value = (jnp.array(to_numpy(x.contiguous())) for x in (key, value))
    expected = jaxpaged.write_kv(expected, jax_key, jax_value, slots.numpy())
    assert_same(cache, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_is_written_as_by_jax(layout):
    written(make_cache(layout), torch.float32, torch.tensor(SLOTS))


@pytest.mark.parametrize("slots", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float16, torch.float32)]
)
def test_float_dtypes_are_written_as_by_jax(dtype, stored, slots):
    written(make_cache(dtype=stored), dtype, torch.tensor(SLOTS, dtype=slots))


EIGHT_BITS = [
    (stored, scales) for stored in (*FLOAT8, torch.int8) for scales in ("none", "tensor", "head", "token_head")
]


@pytest.mark.parametrize(("stored", "scales"), [case for case in EIGHT_BITS if case != (torch.int8, "none")])
def test_8_bit_caches_are_written_as_by_jax(stored, scales):
    shape = {"tensor": (), "head": (3,), "token_head": (6, 4, 3)}.get(scales)
    k_scale, v_scale = (None, None) if shape is None else (torch.rand(shape) + 0.1, torch.rand(shape) + 0.1)
    before = None if k_scale is None else k_scale.clone()
    cache = make_cache("N2HD", stored, k_scale, v_scale)
    written(cache, torch.bfloat16, torch.tensor(SLOTS))
    if scales == "token_head":
        assert cache.k_scale.data_ptr() == k_scale.data_ptr() and not torch.equal(k_scale, before)


@pytest.mark.parametrize("stored", FLOAT8)
def test_float8_may_be_kept_as_uint8(stored):
    cache = make_cache(dtype=stored)
    other = TorchCache.of(cache.key.view(torch.uint8).clone(), cache.value.view(torch.uint8).clone(), dtype=stored)
    key, value = new_tokens(4)
    for c in (cache, other):
        write_kv_(c, key, value, torch.arange(4))
    assert bits(cache) == bits(other)


@pytest.mark.parametrize("dtype", [*FLOAT8, torch.int8])
@pytest.mark.parametrize("scale", [1.0, 0.37, 3e-3, 7.1])
def test_quantisation_is_the_reference_bit_for_bit(dtype, scale):
    torch.manual_seed(5)
    x = torch.randn(100_000) * 10 ** torch.empty(100_000).uniform_(-6, 4)
    x[:14] = torch.tensor(
        [0, -0.0, torch.nan, -torch.nan, torch.inf, -torch.inf, 1e-45, 448, 464, 480, 57344, 61440, 65536, 0.5]
    )
    ours = quantize(x, dtype, torch.tensor(scale))
    theirs = reference_quantize(jnp.array(x.numpy()), jnp.dtype(str(dtype).removeprefix("torch.")), jnp.float32(scale))
    assert ours.numpy().tobytes() == np.asarray(theirs).tobytes()


def test_views_of_one_buffer_and_transpositions_are_written_in_place():
    for buffer, views in (
        (torch.zeros(6, 2, 4, 3, 16), lambda b: b.unbind(1)),
        (torch.zeros(6, 3, 4, 32), lambda b: (x.transpose(1, 2) for x in b.chunk(2, -1))),
        (torch.zeros(6, 8, 4, 3, 16), lambda b: (b[:, 5], b[:, 7])),  # not compact at all
    ):
        key_cache, value_cache = views(buffer)
        key, value = new_tokens(3)
        write_kv_(TorchCache.of(key_cache, value_cache), key, value, torch.tensor([6, 1, 23]))
        for cache, x in ((key_cache, key), (value_cache, value)):
            rows = cache.reshape(24, 3, 16)
            assert torch.equal(rows[[6, 1, 23]].nan_to_num(), x.nan_to_num())
        assert buffer.count_nonzero() == key.count_nonzero() + value.count_nonzero()


def test_heads_of_different_sizes_are_written():
    dims = CacheDims(6, 4, 3, 16, 24)
    for layout in ("NHD", "HN2D"):
        cache = make_cache(layout, dims=dims)
        key, value = new_tokens(5, dims=dims)
        expected = jaxpaged.write_kv(
            jax_copy(cache), *(jnp.array(x.contiguous().numpy()) for x in (key, value)), np.arange(5, dtype=np.int32)
        )
        write_kv_(cache, key, value, torch.arange(5))
        assert_same(cache, expected)


@pytest.mark.parametrize("num_slots", [0, 2, 9])
def test_tokens_and_slots_may_differ_in_number(num_slots):
    cache = make_cache()
    before = cache.key.clone()
    key, value = new_tokens(5)
    write_kv_(cache, key, value, torch.arange(num_slots))
    count = min(num_slots, 5)
    rows = cache.key.reshape(24, 3, 16)
    assert torch.equal(rows[:count].nan_to_num(), key[:count].nan_to_num())
    assert torch.equal(rows[count:], before.reshape(24, 3, 16)[count:])


def test_of_tokens_with_one_slot_the_last_is_kept():
    cache = make_cache()
    key = torch.arange(200.0)[:, None, None].expand(200, 3, 16)
    write_kv_(cache, key, -key, torch.arange(200) % 7 + 2)
    last = torch.tensor([max(t for t in range(200) if t % 7 == i) for i in range(7)])
    assert torch.equal(cache.key.reshape(24, 3, 16)[2:9, 0, 0], last.float())
    assert torch.equal(cache.value.reshape(24, 3, 16)[2:9, 2, 5], -last.float())


def test_gradients_are_ignored_under_no_grad():
    cache = make_cache()
    key, value = (x.clone().requires_grad_() for x in new_tokens(3))
    with torch.no_grad():
        write_kv_(cache, key, value, torch.arange(3))
    assert torch.equal(cache.value.reshape(24, 3, 16)[0], value[0].detach())
    with pytest.raises(ValueError, match="key: it requires grad"):
        write_kv_(cache, key, value, torch.arange(3))


def bad_writes():
    key, value = torch.ones(4, 3, 16), torch.ones(4, 3, 16)
    slots = torch.arange(4)
    return {
        "dtype": ((key.double(), value.double(), slots), TypeError, "key: expected one of torch.float32"),
        "other dtype": ((key.bfloat16(), value.bfloat16(), slots), TypeError, "key: a cache of torch.float16"),
        "value dtype": ((key.half(), value, slots), TypeError, "value: expected torch.float16"),
        "heads": ((key.half()[:, :2], value.half(), slots), ValueError, r"key: expected shape \[num_tokens, 3, 16\]"),
        "value heads": ((key.half(), value.half()[:, :2], slots), ValueError, r"value: expected shape \[4, 3, 16\]"),
        "value tokens": ((key.half(), value.half()[:2], slots), ValueError, r"value: expected shape \[4, 3, 16\]"),
        "slots dtype": ((key.half(), value.half(), slots.float()), TypeError, "slot_mapping: expected torch.int32 or"),
        "slots shape": (
            (key.half(), value.half(), slots[None]),
            ValueError,
            r"slot_mapping: expected shape \[num_slots",
        ),
        "no tensor": ((key.half(), value.half(), [1, 2]), TypeError, "slot_mapping: expected a tensor, got list"),
        "device": ((key.half().to("meta"), value.half(), slots), ValueError, "key: expected a tensor on the CPU"),
    }


@pytest.mark.parametrize("case", bad_writes())
def test_bad_writes_are_refused_and_write_nothing(case):
    arguments, error, message = bad_writes()[case]
    cache = make_cache(dtype=torch.float16)
    before = bits(cache)
    with pytest.raises(error, match=message):
        write_kv_(cache, *arguments)
    assert bits(cache) == before


def bad_caches():
    x = torch.zeros(6, 4, 3, 16)
    int8 = x.to(torch.int8)
    return {
        "dtype": ((x.int(), x.int()), {}, TypeError, "key_cache: expected one of torch.float32"),
        "dtypes": ((x, x.half()), {}, TypeError, "value_cache: expected torch.float32"),
        "uint8": ((x.byte(), x.byte()), {}, TypeError, "dtype: a cache of uint8 holds numbers of torch.float8_e4m3fn"),
        "other float8": ((x.to(FLOAT8[0]),) * 2, {"dtype": FLOAT8[1]}, TypeError, "key_cache: expected torch.float8"),
        "axes": ((x[0], x[0]), {}, ValueError, "key_cache: layout NHD expects shape"),
        "no values": ((x,), {}, ValueError, "value_cache: layout NHD keeps values"),
        "both": ((x[None].expand(2, -1, -1, -1, -1), x), {"layout": "2NHD"}, ValueError, "value_cache: layout 2NHD"),
        "no scale": ((int8, int8), {"k_scale": 1.0}, ValueError, "k_scale, v_scale: an int8 cache needs both"),
        "scale": ((x, x), {"k_scale": 1.0}, ValueError, "k_scale: scales belong to 8-bit caches"),
        "scale shape": ((int8,) * 2, {"k_scale": torch.ones(2), "v_scale": 1.0}, ValueError, "k_scale: expected sh"),
        "scale dtype": ((int8,) * 2, {"k_scale": x[0, 0, 0].half(), "v_scale": 1.0}, TypeError, "k_scale: expected"),
        "no tensor": ((x.numpy(), x), {}, TypeError, "key_cache: expected a tensor, got ndarray"),
    }  # fmt: skip


@pytest.mark.parametrize("case", bad_caches())
def test_bad_caches_are_refused(case):
    buffers, options, error, message = bad_caches()[case]
    with pytest.raises(error, match=message):
        TorchCache.of(*buffers, **options)


PAIRS = [[0, 3], [3, 0], [1, 4], [5, 2], [6, 1], [1, -1], [-2, 5], [4, 5]]


@pytest.mark.parametrize("layout", ["HND", "2NHD", "N2HD", "HN2D", "VLLM_V0"])
def test_blocks_are_copied_and_swapped_as_by_jax(layout):
    cache, other = make_cache(layout), make_cache(layout, dims=CacheDims(9, 4, 3, 16, 16))
    expected = jaxpaged.copy_blocks(jax_copy(cache), np.array(PAIRS))
    copy_blocks_(cache, torch.tensor(PAIRS))
    assert_same(cache, expected)
    swapped = jaxpaged.swap_blocks(jax_copy(cache), jax_copy(other), np.array([[5, 8], [0, 7], [2, 9]]))
    swap_blocks_(cache, other, torch.tensor([[5, 8], [0, 7], [2, 9]], dtype=torch.int32))
    assert_same(other, swapped)
    assert_same(cache, expected)


def test_scales_travel_with_their_blocks():
    k_scale, v_scale = torch.rand(6, 4, 3), torch.rand(6, 4, 3)
    cache = make_cache("N2HD", torch.float8_e4m3fn, k_scale, v_scale)
    expected = jaxpaged.copy_blocks(jax_copy(cache), np.array(PAIRS))
    copy_blocks_(cache, torch.tensor(PAIRS))
    assert_same(cache, expected)


def test_of_pairs_with_one_target_the_last_counts():
    cache = make_cache()
    source = cache.key[4].clone()
    copy_blocks_(cache, torch.tensor([[1, 0], [2, 0], [4, 0]]))
    assert torch.equal(cache.key[0], source)


@pytest.mark.parametrize(
    ("other", "pairs", "error", "message"),
    [
        (make_cache("HND"), torch.zeros(1, 2, dtype=torch.int64), ValueError, "dst: expected the layout of src"),
        (
            make_cache(dtype=torch.half),
            torch.zeros(1, 2, dtype=torch.int64),
            ValueError,
            "dst: expected the dtype of src",
        ),
        (
            make_cache(dims=CacheDims(6, 4, 2, 16, 16)),
            torch.zeros(1, 2).int(),
            ValueError,
            "dst: expected the block shape",
        ),
        (make_cache(), torch.zeros(1, 3, dtype=torch.int64), ValueError, r"src_to_dst: expected shape \[n, 2\]"),
        (make_cache(), torch.zeros(1, 2), TypeError, "src_to_dst: expected torch.int32 or torch.int64"),
        (make_cache(), [[0, 1]], TypeError, "src_to_dst: expected a tensor"),
    ],
)
def test_bad_swaps_are_refused_and_write_nothing(other, pairs, error, message):
    before = bits(other)
    with pytest.raises(error, match=message):
        swap_blocks_(make_cache(), other, pairs)
    assert bits(other) == before


MEMORY_SCRIPT = """
    import resource
    import jax, torch
    from jaxpaged.backends import functional

    torch.set_num_threads(1)
    block = (16, 8, 64)
    num_blocks = 640 * 2**20 // (2 * 4 * 16 * 8 * 64)
    cache = torch.zeros(num_blocks, 2, *block)  # 640 MB, written to throughout
    key_cache, value_cache = cache.unbind(1)
    key, value, q = torch.ones(33, 8, 64), torch.ones(33, 8, 64), torch.ones(2, 1, 16, 64)
    slots = torch.arange(33) * 17
    pairs = torch.tensor([[1, 5], [2, 700]])
    table = torch.arange(40, dtype=torch.int32).view(4, 10)[1:3]
    lens = torch.tensor([160, 37], dtype=torch.int32)
    other = torch.zeros(8, 2, *block)

    def everything():
        functional.reshape_and_cache_flash(key, value, key_cache, value_cache, slots, "auto", 1.0, 1.0)
        functional.copy_blocks([key_cache], [value_cache], pairs)
        functional.swap_blocks(key_cache, other[:, 0], torch.tensor([[4, 1]]))
        functional.flash_attn_with_kvcache(
            q, key_cache, value_cache, q[:, :, :8], q[:, :, :8], cache_seqlens=lens, block_table=table, causal=True)
        return functional.flash_attn_varlen_func(
            q[:, 0], key_cache, value_cache, torch.arange(3, dtype=torch.int32), seqused_k=lens, block_table=table,
            causal=True)

    everything()  # compiles, starts threads
    jitted = jax.jit(lambda x: x + 1)
    small = jitted(jax.numpy.zeros(8))
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 400 * 2**20,) * 2)
    assert everything().isfinite().all()
    assert cache[0, 0, 0, 0, 0] == 1
    print("in place")
    for copy in (lambda: cache.clone(), lambda: jax.block_until_ready(jitted(jax.dlpack.from_dlpack(cache)))):
        try:
            copy()
        except (RuntimeError, MemoryError) as error:
            print("a copy fails")
"""


def test_nothing_copies_a_cache():
    """A cache of 640 MB under a limit of memory that a copy exceeds; copies, by torch and by JAX, do fail there."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY_SCRIPT)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )
    assert done.stdout.splitlines() == ["in place", "a copy fails", "a copy fails"], done.stderr[-2000:]
