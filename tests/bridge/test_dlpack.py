"""Memory shared between PyTorch, NumPy and JAX: the pointers are equal, or the call raises."""

import ctypes
import gc
import mmap
import subprocess
import sys
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from jaxpaged import KVLayout, gather_kv
from jaxpaged.bridge.cache_views import cache_view
from jaxpaged.bridge.dlpack import (
    int64_words,
    physical_order,
    share_kv_cache,
    to_jax,
    to_numpy,
    to_torch,
    words_to_slots,
)
from jaxpaged.bridge.shared_table import SharedTable
from jaxpaged.testing.compilations import compilations

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "bool"]


def tensor_of(dtype: str, *shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(*shape) * 3).to(getattr(torch, dtype))


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_and_jax_share_memory_both_ways(dtype):
    tensor = tensor_of(dtype, 6, 32)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.dtype == jnp.dtype(dtype)
    assert_same_bits(np.array(array), to_numpy(tensor).copy())
    back = to_torch(array)
    assert back.data_ptr() == tensor.data_ptr() and back.dtype == tensor.dtype
    made_by_jax = jnp.zeros((3, 5), jnp.dtype(dtype))
    assert to_torch(made_by_jax).data_ptr() == made_by_jax.unsafe_buffer_pointer()


def test_a_write_by_torch_shows_in_jax():
    tensor = torch.zeros(64)
    array = to_jax(tensor)
    tensor[7] = 5.0
    assert jnp.sum(array) == 5.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_shares_memory_with_both(dtype):
    tensor = tensor_of(dtype, 4, 16)
    view = to_numpy(tensor)
    assert view.ctypes.data == tensor.data_ptr() and view.dtype == jnp.dtype(dtype)
    assert to_torch(view).data_ptr() == tensor.data_ptr() and to_torch(view).dtype == tensor.dtype
    assert to_jax(view).unsafe_buffer_pointer() == tensor.data_ptr()
    array = jnp.ones((4, 16), jnp.dtype(dtype))
    assert to_numpy(array).ctypes.data == array.unsafe_buffer_pointer()


def test_what_is_of_the_kind_already_is_returned_as_it_is():
    tensor, array = torch.zeros(3), jnp.zeros(3)
    assert to_torch(tensor) is tensor
    assert to_jax(array) is array
    assert to_numpy(view := np.zeros(3)) is view


def test_numpy_sees_strided_tensors():
    tensor = torch.arange(24, dtype=torch.float32).view(4, 6)[1:, ::2].t()
    assert np.array_equal(to_numpy(tensor), tensor.numpy())
    assert to_numpy(tensor).ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("shape", [(0, 4), (), (1,), (1, 1, 16)])
def test_small_and_empty_tensors_are_shared(shape):
    tensor = torch.ones(shape)
    array = to_jax(tensor)
    assert array.shape == shape
    if tensor.numel():
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()


def test_strides_of_axes_of_size_1_do_not_matter():
    tensor = torch.randn(4, 16).as_strided((4, 1, 16), (16, 999, 1))
    assert to_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


def refusals():
    base = torch.zeros(64, 64)
    grown = torch.zeros(4, requires_grad=True)
    return {
        "slice of columns": (base[:, :32], r"my_arg: .*compact.*strides \[64, 1\].*whole tensor"),
        "transposition": (base.t(), r"my_arg: .*physical_order"),
        "broadcast": (torch.zeros(1, 8).expand(4, 8), r"my_arg: .*compact"),
        "misaligned": (torch.zeros(64)[1:], r"my_arg: .*multiple of 64 bytes.* 4 bytes past.*torch.empty"),
        "int64": (torch.zeros(8, dtype=torch.int64), r"my_arg: .*int64.*x64.*int64_words"),
        "float64": (torch.zeros(8, dtype=torch.float64), r"my_arg: .*float64.*x64"),
        "complex": (torch.zeros(8, dtype=torch.complex64), r"my_arg: expected one of float32, .*complex64"),
        "another device": (torch.zeros(8, device="meta"), r"my_arg: .*a tensor on meta"),
        "gradient": (grown, r"my_arg: .*gradients are not supported.*no_grad"),
        "numpy transposition": (np.zeros((4, 6), np.float32).T, r"my_arg: .*compact"),
        "numpy int64": (np.zeros(4, np.int64), r"my_arg: .*int64"),
    }


@pytest.mark.parametrize("case", refusals())
def test_memory_that_cannot_be_shared_is_refused(case):
    x, message = refusals()[case]
    with pytest.raises(ValueError, match=message):
        to_jax(x, "my_arg")


def test_misaligned_numpy_memory_is_refused():
    aligned = to_numpy(torch.zeros(64))
    with pytest.raises(ValueError, match=r"x: .*64 bytes"):
        to_jax(aligned[3:], "x")


def test_gradients_are_ignored_under_no_grad():
    tensor = torch.zeros(16, requires_grad=True)
    with torch.no_grad():
        assert to_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()
        assert to_numpy(tensor).ctypes.data == tensor.data_ptr()
    with pytest.raises(ValueError, match="gradients"):
        to_numpy(tensor)


def test_inference_tensors_are_shared():
    with torch.inference_mode():
        tensor = torch.randn(16)
        assert to_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


def test_with_x64_int64_is_shared():
    with jax.enable_x64(True):
        tensor = torch.arange(8)
        array = to_jax(tensor)
        assert array.dtype == jnp.int64 and array.unsafe_buffer_pointer() == tensor.data_ptr()


@pytest.mark.parametrize("permutation", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize("shape", [(3, 4, 5, 16), (3, 1, 5, 16), (1, 4, 1, 16), (2, 3, 4, 1)])
def test_physical_order_makes_transpositions_compact(shape, permutation):
    tensor = torch.randn(shape).permute(permutation)
    view, order = physical_order(tensor)
    assert view.is_contiguous() and view.data_ptr() == tensor.data_ptr()
    assert torch.equal(tensor.permute(order), view)
    assert to_jax(view).unsafe_buffer_pointer() == tensor.data_ptr()


def test_int64_slots_are_read_as_words():
    slots = torch.tensor([0, 5, -1, 2**31 - 1, 2**31, 2**32 + 3, -(2**40), 7])
    words = int64_words(slots)
    assert words.data_ptr() == slots.data_ptr() and words.shape == (8, 2)
    array = to_jax(words)
    assert array.unsafe_buffer_pointer() == slots.data_ptr()
    assert jax.jit(words_to_slots)(array).tolist() == [0, 5, -1, 2**31 - 1, -1, -1, -1, 7]
    assert torch.equal(int64_words(slots[::2])[:, 0], slots[::2].to(torch.int32))
    with pytest.raises(ValueError, match="slots: expected int64, got int32"):
        int64_words(slots.int(), "slots")


read_table = jax.jit(SharedTable.read, static_argnums=(1, 2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "part",
    [
        lambda t: t,
        lambda t: t[3:],
        lambda t: t[1:4, 2:7],
        lambda t: t[::2, 1::3],
        lambda t: t.t()[2:],
        lambda t: t[:, 4:5],
        lambda t: t[1].unsqueeze(0).expand(3, -1),
        lambda t: t[:0],
        lambda t: t[:, :0],
    ],
)
def test_a_table_is_read_where_it_lies(dtype, part):
    whole = torch.arange(7 * 9, dtype=dtype).view(7, 9)
    table = part(whole)
    expected = torch.full((10, 12), -1, dtype=torch.int32)
    expected[: table.shape[0], : table.shape[1]] = table
    shared = SharedTable.of(table)
    assert np.array_equal(read_table(shared, 10, 12), expected.numpy())
    whole += 100  # a view, not a copy
    expected[: table.shape[0], : table.shape[1]] = table
    assert np.array_equal(read_table(shared, 10, 12), expected.numpy())
    assert np.array_equal(read_table(shared, 2, 3), expected[:2, :3].numpy())


def test_a_table_of_int64_that_int32_cannot_hold_is_minus_1():
    table = torch.tensor([[1, 2**31, -5], [2**35, 4, 2**32]])
    assert read_table(SharedTable.of(table), 2, 3).tolist() == [[1, -1, -1], [-1, 4, -1]]


def test_reading_a_table_touches_no_page_beside_it():
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for forbidden in (address, address + 2 * page):
        assert libc.mprotect(ctypes.c_void_p(forbidden), page, 0) == 0
    try:
        words = np.frombuffer(memory, np.int32, count=page // 4, offset=page)
        tables = torch.from_numpy(words)
        tables[:] = torch.arange(page // 4)
        for table in (tables[: 3 * 5].view(3, 5), tables[-3 * 5 :].view(3, 5)):
            assert np.array_equal(read_table(SharedTable.of(table), 3, 5), table.numpy())
    finally:
        for forbidden in (address, address + 2 * page):
            libc.mprotect(ctypes.c_void_p(forbidden), page, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_words", [30, 1024, 1026, 2048, 3070, 7 * 1024, 9 * 1024 + 2])
def test_a_table_is_read_by_one_program_wherever_it_lies(num_words, dtype):
    """Engines make new tables in every step, and these lie on one page of memory more or less."""
    columns = num_words * 4 // dtype.itemsize // 2
    memory = torch.arange(num_words * 4 // dtype.itemsize + 2048, dtype=dtype)
    read_table(SharedTable.of(memory[: 2 * columns].view(2, columns)), 4, columns + 3)
    with compilations() as compiled:
        for start in (1, 7, 300, 511, 512, 1000, 1023, 2047):
            table = memory[start : start + 2 * columns].view(2, columns)
            read = np.asarray(read_table(SharedTable.of(table), 4, columns + 3))
            assert np.array_equal(read[:2, :columns], table.numpy())
            assert (read[2:] == -1).all() and (read[:, columns:] == -1).all()
    assert compiled.count == 0


def test_tensors_are_released_by_threads_of_pythons() -> None:
    """One of XLA's, as runs a computation to its end, would abort a process that is about to exit."""
    slow = jax.jit(lambda x, y: jax.lax.fori_loop(0, 200, lambda _, z: jnp.sin(z @ y), x).sum())
    threads: list[int] = []
    for _ in range(3):
        tensor = torch.ones(300, 300)
        weakref.finalize(tensor, lambda: threads.append(threading.get_ident()))
        out = slow(to_jax(tensor), to_jax(tensor))
        del tensor
        out.block_until_ready()
    time.sleep(0.05)
    jnp.zeros(3).block_until_ready()
    gc.collect()
    assert len(threads) == 3
    assert set(threads) == {threading.get_ident()}


@pytest.mark.parametrize("table", [torch.zeros(4), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2)])
def test_what_is_no_table_is_refused(table):
    with pytest.raises(ValueError, match=r"block_table: expected a table \[rows, columns\] of int32 or int64"):
        SharedTable.of(table, "block_table")


N, S, H, D = 6, 8, 2, 16


def combined(axes: str, permutation: tuple[int, ...] | None = None, heads: int = H) -> torch.Tensor:
    torch.manual_seed(1)
    sizes = {"n": N, "s": S, "h": heads, "d": D, "2": 2, "(2d)": 2 * D}
    return torch.randn([sizes[a] for a in axes.split()])


def keys_and_values():
    """Ways in which engines keep keys and values: the tensors [n, s, h, d] they pass, and the layout that is seen."""
    n2shd, two_nshd, n2hsd = combined("n 2 s h d"), combined("2 n s h d"), combined("n 2 h s d")
    rows, rows_by_head = combined("n s h (2d)"), combined("n h s (2d)").transpose(1, 2)
    return {
        "N2HD": (*n2shd.unbind(1), "N2HD"),
        "2NHD": (*two_nshd.unbind(0), "2NHD"),
        "2HND": (*(x.transpose(1, 2) for x in combined("2 n h s d").unbind(0)), "2HND"),
        "n 2 h s d": (*(x.transpose(1, 2) for x in n2hsd.unbind(1)), "n 2 h s d"),
        "NH2D": (*rows.split(D, -1), "NH2D"),
        "HN2D": (*rows_by_head.split(D, -1), "HN2D"),
        "n s 2 h d": (*combined("n s 2 h d").unbind(2), "n s 2 h d"),
        "one head": (*combined("n 2 s h d", heads=1).unbind(1), "N2HD"),
        "part of the blocks": (*n2shd[2:].unbind(1), "N2HD"),
        "apart": (combined("n s h d"), combined("n s h d") + 1, "NHD"),
        "apart, by head": (*((combined("n h s d") + i).transpose(1, 2) for i in range(2)), "HND"),
        "values first": (*reversed(two_nshd.unbind(0)), "NHD"),
        "differently": (combined("n s h d"), combined("n h s d").transpose(1, 2), "n s h d | n h s d"),
    }


def assert_holds(cache, key, value):
    """The cache's memory holds, where its layout says, the keys and values of the tensors [n, s, h, d]."""
    for which, tensor in (("key", key), ("value", value)):
        blocks = np.asarray(cache.buffer(which))[cache.layout.index(which, cache.dims, np.arange(cache.num_blocks))]
        axes = ("n", *cache.layout.rest(which, "n"))
        assert np.array_equal(blocks.transpose([axes.index(a) for a in "nshd"]), tensor.numpy())


def assert_reads(cache, key, value):
    """JAX reads the keys and values of the tensors [n, s, h, d] from the cache."""
    num_blocks = key.shape[0]
    table, lens = np.arange(num_blocks, dtype=np.int32)[None], np.array([num_blocks * key.shape[1]], np.int32)
    keys, values = gather_kv(cache, table, lens)
    assert np.array_equal(keys, key.flatten(0, 1).numpy())
    assert np.array_equal(values, value.flatten(0, 1).numpy())


@pytest.mark.parametrize("case", keys_and_values())
def test_keys_and_values_are_shared_as_they_lie_in_memory(case):
    key, value, layout = keys_and_values()[case]
    cache = share_kv_cache(key, value)
    assert cache.layout.name == layout
    assert cache.key.unsafe_buffer_pointer() == key.data_ptr()
    if not cache.layout.combined:
        assert cache.value.unsafe_buffer_pointer() == value.data_ptr()
    assert_holds(cache, key, value)
    key[1, 2] = 77.0  # torch's writes show
    value[0, 3] = -55.0
    assert_holds(cache, key, value)


@pytest.mark.parametrize("case", ["N2HD", "HN2D"])
def test_shared_caches_are_read_by_jax(case):
    key, value, _ = keys_and_values()[case]
    assert_reads(share_kv_cache(key, value), key, value)


def test_heads_of_different_sizes_in_a_row_are_seen():
    rows = torch.randn(N, S, H, 16 + 32)
    key, value = rows.split([16, 32], -1)
    cache = share_kv_cache(key, value)
    assert cache.layout.name == "NH2D" and (cache.head_size, cache.v_head_size) == (16, 32)
    assert cache.key.unsafe_buffer_pointer() == rows.data_ptr()
    assert_holds(cache, key, value)


@pytest.mark.parametrize(
    ("tensor", "given", "seen"),
    [
        (combined("n 2 s h d"), "N2HD", "N2HD"),
        (combined("n s h (2d)").transpose(1, 2), "HN2D", "NH2D"),
        (combined("n h s (2d)"), "HN2D", "HN2D"),
        (combined("n 2 s h d").transpose(0, 1), "2NHD", "N2HD"),
        (combined("2 n h s d").permute(1, 0, 3, 2, 4), "N2HD", "2HND"),
    ],
)
def test_one_tensor_for_both_is_shared_as_it_lies_in_memory(tensor, given, seen):
    cache = share_kv_cache(tensor, layout=given)
    assert cache.layout.name == seen and cache.key.unsafe_buffer_pointer() == tensor.data_ptr()
    axes = KVLayout.of(given).axes("key")
    if "2" in axes:
        key, value = tensor.unbind(axes.index("2"))
    else:
        key, value = tensor.split(D, -1)
    order = [[a for a in axes if a != "2"].index(a if a != "d" or "d" in axes else "(2d)") for a in "nshd"]
    assert_holds(cache, key.permute(order), value.permute(order))


@pytest.mark.parametrize("shape", [(1, S, H, D), (N, 1, H, D), (N, S, 1, D), (1, 1, 1, D), (N, S, H, 1)])
@pytest.mark.parametrize("both", ["n 2", "2 n", "row", "apart"])
def test_axes_of_size_1_are_no_trouble(shape, both):
    if both == "row":
        key, value = torch.randn(*shape[:3], 2 * shape[3]).chunk(2, -1)
    elif both == "apart":
        key, value = torch.randn(shape), torch.randn(shape)
    else:
        key, value = torch.randn(2, *shape).unbind(0) if both == "2 n" else torch.randn(
            shape[0], 2, *shape[1:]
        ).unbind(1)  # fmt: skip
    cache = share_kv_cache(key, value)
    assert cache.key.unsafe_buffer_pointer() == key.data_ptr()
    assert_holds(cache, key, value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_caches_are_shared_as_bytes(dtype):
    name = str(dtype).removeprefix("torch.")
    key, value = tensor_of(name, N, 2, S, H, D).unbind(1)
    for tensors, given in (((key, value), None), ((key.view(torch.uint8), value.view(torch.uint8)), dtype)):
        cache = share_kv_cache(*tensors, k_scale=0.5, v_scale=torch.tensor([2.0]), dtype=given)
        assert cache.dtype == jnp.dtype(name) and cache.key.dtype == jnp.uint8
        assert cache.key.unsafe_buffer_pointer() == key.data_ptr()
        assert_reads(cache, key.float() * 0.5, value.float() * 2.0)


def test_scales_are_shared():
    key, value = torch.ones(N, S, H, D, dtype=torch.int8), torch.ones(N, S, H, D, dtype=torch.int8)
    per_head, per_token = torch.rand(H), torch.rand(N, S, H)
    cache = share_kv_cache(key, value, k_scale=per_head, v_scale=per_token)
    assert cache.k_scale.unsafe_buffer_pointer() == per_head.data_ptr()
    assert cache.v_scale.unsafe_buffer_pointer() == per_token.data_ptr()
    assert_reads(cache, (key * per_head[:, None]).float(), (value * per_token[..., None]).float())


def caches_to_refuse():
    buffer = combined("n s h d")
    aligned = torch.zeros(N * S * H * D + 1)[1:].view(N, S, H, D)
    return {
        "part of the heads": ((buffer[:, :, :1], buffer[:, :, :1]), ValueError, r"key_cache: .*compact.*whole tensor"),
        "misaligned": ((aligned, aligned), ValueError, r"key_cache: .*64 bytes"),
        "blocks inside": (
            (combined("n s h d").permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3), buffer),
            ValueError,
            r"key_cache: its axes lie in memory in the order h s n d",
        ),
        "dtypes differ": ((buffer, buffer.bfloat16()), TypeError, r"value_cache: expected dtype float32, got bfloat16"),
        "shapes differ": ((buffer, buffer[:, :4]), ValueError, r"value_cache: block_size is 4, but 8"),
        "no values": ((buffer,), ValueError, r"value_cache: layout NHD keeps values in a tensor of their own"),
        "uint8": ((buffer.to(torch.uint8), buffer.to(torch.uint8)), TypeError, r"dtype: .*uint8"),
        "int8 without scales": ((buffer.to(torch.int8), buffer.to(torch.int8)), ValueError, r"k_scale, v_scale"),
        "three axes": ((buffer[0], buffer[0]), ValueError, r"key_cache: layout NHD expects shape"),
    }


@pytest.mark.parametrize("case", caches_to_refuse())
def test_caches_that_cannot_be_shared_are_refused(case):
    tensors, error, message = caches_to_refuse()[case]
    with pytest.raises(error, match=message):
        share_kv_cache(*tensors)


def test_a_layout_that_holds_both_takes_one_tensor():
    buffer = combined("n 2 s h d")
    with pytest.raises(ValueError, match="value_cache: layout N2HD holds keys and values in key_cache"):
        share_kv_cache(buffer, buffer, layout="N2HD")


def test_views_are_remembered_and_keep_nothing_alive():
    freed = []

    class Watched(np.ndarray):
        def __del__(self):
            freed.append(True)

    memory = np.zeros(2 * N * S * H * D + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    watched = memory[start : start + 2 * N * S * H * D].view(Watched)
    key, value = torch.from_numpy(watched).view(N, 2, S, H, D).unbind(1)
    view = cache_view(key, value, None, None)
    assert view.layout.name == "N2HD" and view.key.unsafe_buffer_pointer() == key.data_ptr()
    assert cache_view(key, value, None, None).key is view.key
    assert cache_view(key[1:], value[1:], None, None).key is not view.key
    key[3] = 4.0
    assert_holds(view, key, value)
    del watched, key, value
    assert freed


def test_ml_dtypes_arrays_become_tensors():
    array = np.arange(8).astype(ml_dtypes.bfloat16)
    tensor = to_torch(array)
    assert tensor.dtype == torch.bfloat16 and tensor.data_ptr() == array.ctypes.data
    assert tensor.tolist() == list(range(8))


@pytest.mark.parametrize("function", [to_jax, to_numpy, share_kv_cache])
def test_what_is_no_array_is_refused(function):
    with pytest.raises(TypeError, match=": expected a tensor or an array, got list"):
        function([1.0, 2.0])


def test_nothing_here_needs_torch_to_be_imported():
    code = "import sys; import jaxpaged.bridge.dlpack, jaxpaged.bridge.shared_table; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
