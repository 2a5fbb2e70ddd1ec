"""From an engine's tensors to launches: which addresses go where, what is refused; kernels are recorded, not run."""

import contextlib
import gc
import os
import struct
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from jaxpaged import notices
from jaxpaged.bridge import alike, direct, launch, process, torch_ops, write_calls
from jaxpaged.bridge.copy_calls import block_pairs, copy_on_gpu, swap_on_gpu
from jaxpaged.bridge.decode_calls import by_column, by_query_head, decode_on_gpu
from jaxpaged.bridge.kernel_functions import copy_blocks
from jaxpaged.bridge.mosaic_abi import Kernel, UnavailableError, launched_early
from jaxpaged.bridge.plan_calls import plan_on_gpu
from jaxpaged.bridge.write_calls import pieces, warm_up_writes, write_on_gpu
from jaxpaged.pallas.block_pairs import BlockPairs
from jaxpaged.pallas.block_pairs import block_pairs as numpy_pairs
from jaxpaged.pallas.decode_shape import column_place, per_column
from jaxpaged.pallas.mosaic import kernel

STREAM = 77


class Recorder:
    """Kernels that say what they are launched with."""

    def __init__(self) -> None:
        self.modules: list[bytes] = []
        self.launches: list[tuple[int, tuple[int, ...]]] = []

    def compile(self, module: bytes) -> Any:
        self.modules.append(module)
        number = len(self.modules) - 1

        def run(stream: int, pointers: bytes) -> None:
            assert stream.value == STREAM
            self.launches.append((number, struct.unpack(f"{len(pointers) // 8}Q", pointers)))

        return Kernel(run, (0, 0, 0), launched_early(module))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Within it tensors of the CPU, whose device has the index -1, pass for a GPU's."""
    found = Recorder()
    monkeypatch.setattr(launch, "compile_kernel", found.compile)
    monkeypatch.setattr(launch, "unavailable", lambda: None)
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_stream_of", lambda device: STREAM)
    monkeypatch.setattr(launch, "_prepare_thread", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    forget()
    yield found
    forget()


def forget() -> None:
    for forget_all in process._forgotten:
        forget_all()


def caches(layout: str = "NHD", num_blocks: int = 40, dtype: Any = torch.bfloat16) -> Any:
    numbers = torch.zeros(2, num_blocks, 16, 2, 64, dtype=dtype)
    if layout == "N2HD":
        return numbers.transpose(0, 1).contiguous().unbind(1)
    if layout == "HND":
        return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in numbers)
    return numbers.unbind(0)


def rows(n: int, heads: int = 2) -> torch.Tensor:
    return torch.zeros(n, heads, 64, dtype=torch.bfloat16)


def address(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in tensors)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_a_write_gets_the_tensors_own_memory(recorder: Recorder, slot_dtype: Any) -> None:
    (k_cache, v_cache), key, value = caches(), rows(8), rows(8)
    slots = torch.arange(8, dtype=slot_dtype)
    for _ in range(2):
        write_on_gpu(key, value, k_cache, v_cache, slots, "auto", None, None)
    once = (0, (*address(key, value, slots, k_cache, v_cache), *address(k_cache, v_cache)))
    assert recorder.launches == [once, once]
    assert len(recorder.modules) == 1


def test_views_of_one_buffer_go_as_that_buffer(recorder: Recorder) -> None:
    k_cache, v_cache = caches("N2HD")
    key, slots = rows(8), torch.arange(8)
    write_on_gpu(key, key, k_cache, v_cache, slots, "auto", None, None)
    assert recorder.launches == [(0, (*address(key, key, slots, k_cache), *address(k_cache)))]
    elsewhere, _ = caches("N2HD")
    with pytest.raises(ValueError, match=r"value_cache: expected to begin 4096 bytes after key_cache"):
        write_on_gpu(key, key, elsewhere, v_cache, slots, "auto", None, None)
    assert len(recorder.launches) == 1


def test_scales_are_read_or_renewed(recorder: Recorder) -> None:
    k_cache, v_cache = caches(dtype=torch.float8_e4m3fn)
    key, slots, scale = rows(8), torch.arange(8), torch.ones(2, 1)
    write_on_gpu(key, key, k_cache, v_cache, slots, "fp8", scale[0], scale[1])
    ((_, got),) = recorder.launches
    assert {*address(*scale)} < set(got)
    recorder.launches.clear()
    integers = [x.view(torch.int8) for x in (k_cache, v_cache)]
    each = torch.ones(2, 40, 16, 2)
    write_on_gpu(key, key, *integers, slots, "int8", each[0], each[1])
    ((_, got),) = recorder.launches
    assert got[-4:].count(each[0].data_ptr()) == got[-4:].count(each[1].data_ptr()) == 1


def test_other_sizes_are_written_by_two_launches(recorder: Recorder) -> None:
    k_cache, v_cache = caches()
    key, value, slots = rows(23), rows(23), torch.arange(23)
    write_on_gpu(key, value, k_cache, v_cache, slots, "auto", None, None)
    first, second = (got[:3] for _, got in recorder.launches)
    row = 2 * 64 * 2
    assert first == address(key, value, slots)
    assert second == (key.data_ptr() + 15 * row, value.data_ptr() + 15 * row, slots.data_ptr() + 15 * 8)
    recorder.launches.clear()
    warm_up_writes([23], key, value, k_cache, v_cache, slots, "auto", None, None)
    assert recorder.launches == []
    write_on_gpu(key, value, k_cache, v_cache, slots, "auto", None, None)
    assert [got[:3] for _, got in recorder.launches] == [address(key, value, slots)]


def test_pieces_cover_all_tokens_with_few_sizes() -> None:
    sizes = set()
    for n in range(1, 3000):
        found = pieces(n)
        sizes |= {size for _, size in found}
        assert {t for first, size in found for t in range(first, first + size)} == set(range(n))
        assert sum(size for _, size in found) <= 1.34 * n + 1
        assert len(found) <= 2
    assert sizes == {2**i for i in range(12)}
    assert pieces(0) == []
    assert pieces(23, {23}) == [(0, 23)]


def test_fewer_slots_than_tokens_write_the_first_ones(recorder: Recorder) -> None:
    k_cache, v_cache = caches()
    key, slots = rows(9), torch.arange(4)
    write_on_gpu(key, key, k_cache, v_cache, slots, "auto", None, None)
    write_on_gpu(key, key, k_cache, v_cache, slots[:0], "auto", None, None)
    assert [got[0] for _, got in recorder.launches] == [key.data_ptr()]


def test_rows_with_gaps_are_copied_and_caches_never(recorder: Recorder) -> None:
    k_cache, v_cache = caches("HND")
    qkv, slots = rows(8, 12), torch.arange(8)
    write_on_gpu(qkv[:, 8:10], qkv[:, 10:], k_cache, v_cache, slots, "auto", None, None)
    ((_, got),) = recorder.launches
    assert got[2:] == (*address(slots, k_cache, v_cache), *address(k_cache, v_cache))
    assert got[0] != qkv[:, 8:10].data_ptr()


MISALIGNED = rows(9).view(-1)[4:1028].view(8, 2, 64)
BAD_WRITES: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "key dtype": (TypeError, "key: a cache of bfloat16", {"key": rows(8).half(), "value": rows(8).half()}),
    "value dtype": (TypeError, "value: expected torch.bfloat16", {"value": rows(8).float()}),
    "key shape": (ValueError, "key: expected shape", {"key": rows(8, 3)}),
    "value shape": (ValueError, "value: expected shape", {"value": rows(7)}),
    "slots dtype": (TypeError, "slot_mapping: expected", {"slot_mapping": torch.zeros(8)}),
    "slots shape": (ValueError, "slot_mapping: expected shape", {"slot_mapping": torch.zeros(8, 1, dtype=torch.int32)}),
    "slots stride": (ValueError, "slot_mapping: expected slots side by side", {"slot_mapping": torch.arange(16)[::2]}),
    "8 bits as auto": (TypeError, "kv_cache_dtype", dict.fromkeys(("key_cache", "value_cache"), caches()[0].char())),
    "unknown dtype": (ValueError, "kv_cache_dtype: expected 'auto'", {"kv_cache_dtype": "fp4"}),
    "another dtype": (TypeError, "key_cache: expected torch.float8_e4m3fn", {"kv_cache_dtype": "fp8"}),
    "cache stride": (ValueError, "strides", {"key_cache": caches()[0][:, ::2], "value_cache": caches()[1][:, ::2]}),
    "value cache": (ValueError, "value_cache: num_blocks", {"value_cache": caches(num_blocks=20)[1]}),
    "device": (ValueError, "slot_mapping: expected a tensor on cpu", {"slot_mapping": torch.arange(8, device="meta")}),
    "grad": (ValueError, "key: it requires grad", {"key": rows(8).requires_grad_()}),
    "address": (ValueError, "key: expected memory from a multiple of 16", {"key": MISALIGNED}),
}  # fmt: skip


@pytest.mark.parametrize("after", ["nothing", "a call", "a call, looked up by name"])
@pytest.mark.parametrize("name", BAD_WRITES)
def test_what_does_not_fit_is_refused(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, name: str, after: str
) -> None:
    error, words, given = BAD_WRITES[name]
    arguments = {"key": rows(8), "value": rows(8), "key_cache": caches()[0], "value_cache": caches()[1]}
    arguments |= {"slot_mapping": torch.arange(8), "kv_cache_dtype": "auto", "k_scale": None, "v_scale": None}
    if after == "a call, looked up by name":
        monkeypatch.setattr(alike, "_guards", lambda: None)
    if after != "nothing":
        for _ in range(2):
            write_on_gpu(**arguments)
        recorder.launches.clear()
    with pytest.raises(error, match=words):
        write_on_gpu(**{**arguments, **given})
    assert recorder.launches == []


def test_tensors_that_were_changed_in_place_are_checked_anew(recorder: Recorder) -> None:
    key, slots, (k_cache, v_cache) = rows(8), torch.arange(8), caches()
    arguments = (key, rows(8), k_cache, v_cache, slots, "auto", None, None)
    write_on_gpu(*arguments)
    for x, bad, good in ((key, rows(8, 3), rows(8)), (slots, torch.zeros(8), torch.arange(8))):
        x.data = bad
        with pytest.raises((TypeError, ValueError), match="expected"):
            write_on_gpu(*arguments)
        x.data = good
    k_cache.transpose_(1, 3)
    with pytest.raises(ValueError, match="key"):
        write_on_gpu(*arguments)
    assert len(recorder.launches) == 1


def test_a_call_with_tensors_like_the_last_ones_is_not_looked_up(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(n: int) -> None:
        write_on_gpu(rows(n), rows(n), *caches(), torch.arange(n), "auto", None, None)

    write(8)
    found: list[Any] = []
    look_up = write_calls._writer_of
    monkeypatch.setattr(write_calls, "_writer_of", lambda *args: found.append(look_up(*args)) or found[-1])
    write(8)
    assert found == []
    for n in (16, 8, 8, 16):
        write(n)
    assert [id(x) for x in found] == [id(found[0]), id(found[1]), id(found[0])]
    assert len(recorder.launches) == 6


SCORES = (0.125, True, -1, -1, 0.0)


def test_a_step_goes_by_the_plans_memory(recorder: Recorder) -> None:
    (k_cache, v_cache), query, out = caches(), rows(3, 8), rows(3, 8)
    table, lens, starts = torch.zeros(3, 6, dtype=torch.int32), torch.ones(3).int(), torch.arange(4).int()
    requests, shares, workspace = plan_on_gpu(query, k_cache, v_cache, table, lens, starts, 1, False, *SCORES)
    assert recorder.launches == [(0, address(table, lens, starts, requests, shares))]
    sinks = by_column(torch.zeros(8), num_kv_heads=2, max_query_len=1)
    workspace = torch.empty(1 << 25, dtype=torch.uint8)
    decode_on_gpu(query, k_cache, v_cache, table, requests, shares, workspace, None, sinks, 1, False, *SCORES, out)
    ((_, decode),) = recorder.launches[1:]
    read = address(requests, shares, table, query, k_cache, v_cache, sinks, out)
    assert decode[: len(read)] == read
    parts = decode[len(read) : -1]
    base = workspace.data_ptr()
    assert parts[0] == base
    assert [x % 256 for x in parts] == [base % 256] * 3
    assert decode[-1] == out.data_ptr()


def decode_arguments(cache: Any = None, max_query_len: int = 1, **scales: Any) -> dict[str, Any]:
    """Of a call of three requests, by a plan made for it."""
    (k_cache, v_cache), query = cache or caches(), rows(3 * max_query_len, 8)
    table, lens, starts = torch.zeros(3, 6, dtype=torch.int32), torch.ones(3).int(), torch.arange(4).int()
    tensors = (query, k_cache, v_cache, table, lens, starts * max_query_len)
    requests, shares, _ = plan_on_gpu(*tensors, max_query_len, False, *SCORES, **scales)
    names = ("query", "key_cache", "value_cache", "block_table", "requests", "shares", "workspace", "slopes", "sinks")
    workspace = torch.empty(1 << 25, dtype=torch.uint8)
    values = (query, k_cache, v_cache, table, requests, shares, workspace, None, None)
    how = {"max_query_len": max_query_len, "batch_invariant": False, "out": torch.empty_like(query)}
    options = dict(zip(("scale", "causal", "window_left", "window_right", "soft_cap"), SCORES, strict=True))
    return dict(zip(names, values, strict=True)) | how | options | scales


FLOAT8 = [torch.zeros(40, 16, 2, 64, dtype=torch.float8_e4m3fn) for _ in range(2)]
BAD_DECODES: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "query dtype": (NotImplementedError, "query's dtype", {"query": rows(3, 8).half()}),
    "query shape": (ValueError, "query: expected shape", {"query": rows(3, 8)[..., :32]}),
    "query heads": (ValueError, "query: expected a multiple of 2", {"query": rows(3, 7)}),
    "query strides": (ValueError, "query: expected the heads", {"query": rows(3, 16)[:, ::2]}),
    "query address": (ValueError, "query: expected memory", {"query": rows(4, 8).view(-1)[4:1540].view(3, 8, 64)}),
    "query grad": (ValueError, "query: it requires grad", {"query": rows(3, 8).requires_grad_()}),
    "cache dtype": (TypeError, "value_cache: expected torch.bfloat16", {"value_cache": caches()[1].half()}),
    "cache strides": (ValueError, "strides", {"key_cache": caches()[0][:, ::2], "value_cache": caches()[1][:, ::2]}),
    "uint8": (TypeError, "uint8", dict.fromkeys(("key_cache", "value_cache"), FLOAT8[0].view(torch.uint8))),
    "scales of bfloat16": (ValueError, "scale", {"k_scale": torch.ones(()), "v_scale": torch.ones(())}),
    "table dtype": (TypeError, "block_table: expected torch.int32", {"block_table": torch.zeros(3, 6).long()}),
    "table strides": (ValueError, "block_table: expected rows", {"block_table": torch.zeros(6, 3).int().T}),
    "table device": (
        ValueError,
        "block_table: expected a tensor on",
        {"block_table": torch.zeros(3, 6, device="meta")},
    ),
    "requests": (ValueError, "requests: expected a plan", {"requests": torch.zeros(9, 9).int()}),
    "shares dtype": (ValueError, "shares: expected a plan", {"shares": torch.zeros(132, 4)}),
    "workspace": (ValueError, "workspace: expected", {"workspace": torch.empty(16)}),
    "workspace strides": (ValueError, "workspace: expected", {"workspace": torch.empty(1 << 24, 2).T}),
    "workspace address": (ValueError, "workspace: expected memory", {"workspace": torch.empty(1 << 25).int()[1:]}),
    "sinks shape": (ValueError, "sinks: expected what by_column", {"sinks": torch.zeros(1, 2, 4)}),
    "slopes dtype": (ValueError, "slopes: expected what by_column", {"slopes": torch.zeros(1, 2, 8).half()}),
    "out shape": (ValueError, "out: expected shape", {"out": rows(2, 8)}),
    "out dtype": (TypeError, "out: expected a compact", {"out": rows(3, 8).half()}),
    "out strides": (TypeError, "out: expected a compact", {"out": rows(3, 16)[:, ::2]}),
    "out address": (ValueError, "out: expected memory", {"out": rows(4, 8).view(-1)[4:1540].view(3, 8, 64)}),
    "lse shape": (ValueError, "lse: expected shape", {"lse": torch.zeros(8, 3)}),
    "lse dtype": (TypeError, "lse: expected a compact", {"lse": torch.zeros(3, 8).half()}),
    "lse strides": (TypeError, "lse: expected a compact", {"lse": torch.zeros(8, 3).T}),
    "lse device": (ValueError, "lse: expected a tensor on", {"lse": torch.zeros(3, 8, device="meta")}),
    "new tokens": (ValueError, "max_query_len: expected 1 to", {"max_query_len": 9}),
    "scale": (ValueError, "scale: expected a finite number", {"scale": float("nan")}),
}


@pytest.mark.parametrize("after", ["nothing", "a call"])
@pytest.mark.parametrize("name", BAD_DECODES)
def test_what_does_not_fit_decode_is_refused(recorder: Recorder, name: str, after: str) -> None:
    error, words, given = BAD_DECODES[name]
    arguments = decode_arguments()
    if after == "a call":
        for _ in range(2):
            decode_on_gpu(**arguments)
    recorder.launches.clear()
    with pytest.raises(error, match=words):
        decode_on_gpu(**{**arguments, **given})
    assert recorder.launches == []


SCALES: dict[str, Any] = {
    "none": {},
    "values alone": {"v_scale": torch.ones(1)},
    "tensor": {"k_scale": torch.ones(()), "v_scale": torch.ones(1)},
    "head": {"k_scale": torch.ones(2), "v_scale": torch.ones(2)},
}


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_8_bit_caches_go_to_decode_as_they_are(recorder: Recorder, dtype: Any, name: str) -> None:
    cache = [x.view(dtype) for x in FLOAT8]
    if dtype == torch.int8 and name in ("none", "values alone"):
        with pytest.raises(ValueError, match="an int8 cache needs both scales"):
            decode_arguments(cache, **SCALES[name])
        return
    arguments = decode_arguments(cache, **SCALES[name])
    recorder.launches.clear()
    decode_on_gpu(**arguments, lse=None)
    ((_, decode),) = recorder.launches
    names = ("requests", "shares", "block_table", "query", "key_cache", "value_cache")
    scales = [arguments[n] for n in ("k_scale", "v_scale") if n in arguments]
    read = address(*(arguments[n] for n in names), *scales, arguments["out"])
    assert decode[: len(read)] == read


ROW_SCALES = {"k_scale": torch.ones(40, 16, 2), "v_scale": torch.ones(40, 16, 2)}
BAD_SCALES: dict[str, tuple[type[Exception], str, Any, dict[str, Any]]] = {
    "dtype": (TypeError, "k_scale", torch.float8_e5m2, {"k_scale": torch.ones(2).half(), "v_scale": torch.ones(2)}),
    "shape": (ValueError, "v_scale", torch.float8_e5m2, {"k_scale": torch.ones(2), "v_scale": torch.ones(3)}),
    "gaps": (ValueError, "k_scale", torch.float8_e5m2, {"k_scale": torch.ones(4)[::2], "v_scale": torch.ones(2)}),
    "device": (ValueError, "k_scale", torch.int8, {"k_scale": torch.ones(2, device="meta"), "v_scale": torch.ones(2)}),
    "float8 by token": (NotImplementedError, "int8 caches and bfloat16", torch.float8_e4m3fn, ROW_SCALES),
    "few heads by token": (NotImplementedError, "rows of 32", torch.int8, {n: x[:, :8] for n, x in ROW_SCALES.items()}),
}


@pytest.mark.parametrize("name", BAD_SCALES)
def test_scales_that_do_not_fit_are_refused(recorder: Recorder, name: str) -> None:
    error, words, dtype, scales = BAD_SCALES[name]
    cache = [x.view(dtype) for x in FLOAT8]
    if name == "few heads by token":
        cache = [x[:, :8].contiguous() for x in cache]
        scales = {n: x.contiguous() for n, x in scales.items()}
    with pytest.raises(error, match=words):
        decode_arguments(cache, **scales)
    assert recorder.launches == []


def test_scales_by_token_go_to_decode(recorder: Recorder) -> None:
    arguments = decode_arguments([x.view(torch.int8) for x in FLOAT8], **ROW_SCALES)
    recorder.launches.clear()
    decode_on_gpu(**arguments)
    assert {*address(*ROW_SCALES.values())} < {*recorder.launches[0][1]}


def test_lses_are_written_to_memory_of_the_callers(recorder: Recorder) -> None:
    arguments, lse = decode_arguments(), torch.zeros(3, 8)
    sinks = by_column(torch.zeros(8), num_kv_heads=2, max_query_len=1)
    recorder.launches.clear()
    decode_on_gpu(**{**arguments, "sinks": sinks}, lse=lse)
    ((_, decode),) = recorder.launches
    written = address(arguments["out"], lse)
    assert decode[-7:-5] == decode[-2:] == written
    assert sinks.data_ptr() in decode


def test_direct_functions_spare_the_dispatcher(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (rows(8), rows(8), *caches(), torch.arange(8), "auto", None, None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    direct.reshape_and_cache(*arguments)
    assert [got[:2] for _, got in recorder.launches] == [address(*arguments[:2])]
    monkeypatch.setattr(direct, "is_compiling", lambda: True)
    direct.reshape_and_cache(*arguments)  # by the CPU's operator
    monkeypatch.setattr(direct, "is_compiling", lambda: False)
    direct.reshape_and_cache(torch.nn.Parameter(arguments[0], requires_grad=False), *arguments[1:])
    assert len(recorder.launches) == 1


def test_numbers_of_new_tokens_share_programs(recorder: Recorder) -> None:
    """Also where a request has several: none of the kernels reads past its own rows."""
    arguments = decode_arguments(max_query_len=3)
    decode_on_gpu(**arguments)
    compiled = len(recorder.modules)
    decode_on_gpu(**{**arguments, "query": rows(11, 8), "out": rows(11, 8)})
    assert len(recorder.modules) == compiled


@pytest.mark.parametrize("max_query_len", [1, 3])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("group", [1, 4, 5])
def test_by_column_is_what_the_kernels_make_of_it(group: int, num_kv_heads: int, max_query_len: int) -> None:
    class Shape:
        heads, dims = 1, type("Dims", (), {"num_kv_heads": num_kv_heads})

    Shape.group, Shape.max_query_len, Shape.rows = group, max_query_len, group * max_query_len
    kind = {"num_kv_heads": num_kv_heads, "max_query_len": max_query_len}
    n = group * num_kv_heads
    for x in (torch.arange(1.0 * n), torch.arange(3.0 * n).reshape(3, n)):
        ours = by_column(x, **kind)
        expected = per_column(jnp.asarray(x.numpy()), Shape)
        assert ours.numpy().tolist() == expected.tolist()
        assert per_column(expected, Shape) is expected
        assert torch.equal(by_query_head(ours, num_heads=n, **kind), x.reshape(-1, n))
        flat = ours[0].flatten().tolist()
        for head in range(num_kv_heads):
            which, start = map(int, column_place(head, Shape))
            place = which * ours.shape[2] + start
            assert place % 2 == 0  # registers load pairs
            members = list(range(head * group, (head + 1) * group))
            assert flat[place : place + Shape.rows] == members * max_query_len
            assert which * ours.shape[2] <= place <= (which + 1) * ours.shape[2] - -(-Shape.rows // 8) * 8


@pytest.mark.parametrize("within", [True, False])
def test_pairs_are_those_of_numpy(within: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (1, 3, 8, 30):
        pairs = torch.randint(-1, 9, (n, 2), generator=generator)
        ours = block_pairs(pairs, 8, 8, within=within)
        expected = numpy_pairs(pairs.numpy(), 8, 8, within=within)
        assert ours.target[:n].tolist() == expected.target.tolist()
        assert (ours.target[n:] == -1).all()
        kept = expected.target >= 0
        assert ours.source[:n].numpy()[kept].tolist() == expected.source[kept].tolist()
        if within and expected.overwritten is not None:
            assert ours.overwritten[:n].tolist() == expected.overwritten.tolist()
            assert int(ours.any_overwritten) == expected.any_overwritten


def test_copies_take_a_layers_blocks_whole(recorder: Recorder) -> None:
    layers = [caches("NHD"), caches("N2HD"), caches("HND")]
    pairs = torch.tensor([[1, 2], [2, 3], [-1, 5]])
    copy_on_gpu([k for k, _ in layers], [v for _, v in layers], pairs)
    # Two launches, to set aside and to copy, for each of two tensors, or for the one buffer that they are views of.
    written = [got[-1] for _, got in recorder.launches[1::2]]
    assert len(recorder.launches) == 10
    assert written == [*address(*layers[0]), layers[1][0].data_ptr(), *address(*layers[2])]


def test_swaps_read_one_tensor_and_write_the_other(recorder: Recorder) -> None:
    (source, target), pairs = caches(), torch.tensor([[1, 2], [2, 3]])
    swap_on_gpu(source, target, pairs)
    ((_, got),) = recorder.launches
    assert got[-3:] == address(source, target, target)
    with pytest.raises(ValueError, match="dst: expected blocks strided as those of src"):
        swap_on_gpu(source, caches("HND")[0], pairs)


def test_many_threads_may_call_at_once(recorder: Recorder) -> None:
    (k_cache, v_cache), slots = caches(), torch.arange(8)
    keys = [rows(8) for _ in range(4)]
    write_on_gpu(keys[0], keys[0], k_cache, v_cache, slots, "auto", None, None)
    recorder.launches.clear()

    def work(key: torch.Tensor) -> None:
        for _ in range(500):
            write_on_gpu(key, key, k_cache, v_cache, slots, "auto", None, None)

    threads = [threading.Thread(target=work, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {(*address(key, key, slots, k_cache, v_cache), *address(k_cache, v_cache)) for key in keys}
    assert {got for _, got in recorder.launches} == expected
    assert len(recorder.launches) == 2000


def test_while_a_graph_is_captured_nothing_is_compiled(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"write_rows was not compiled yet .* warm it up"):
        write_on_gpu(rows(8), rows(8), *caches(), torch.arange(8), "auto", None, None)


def test_a_child_of_a_fork_is_turned_away(recorder: Recorder) -> None:
    arguments = (rows(8), rows(8), *caches(), torch.arange(8), "auto", None, None)
    write_on_gpu(*arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks, too
        child = os.fork()
    if child == 0:
        try:
            write_on_gpu(*arguments)
        except RuntimeError as error:
            os._exit(3 if "spawn" in str(error) else 4)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    write_on_gpu(*arguments)


def test_where_kernels_can_not_be_launched_the_fallback_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_given", set())
    monkeypatch.setattr(torch_ops, "_fallbacks", dict(torch_ops._fallbacks))
    call = torch_ops._fallback("swap_blocks", "the library lacks MosaicGpuCompile")
    torch_ops.set_fallback("swap_blocks", lambda *arguments: arguments)
    with pytest.warns(RuntimeWarning, match="lacks MosaicGpuCompile.*no CUDA graph"):
        assert call(1, 2) == (1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has been said
        assert call(1, 2) == (1, 2)
    torch_ops.set_fallback("swap_blocks", None)
    with pytest.raises(NotImplementedError, match="swap_blocks: the library lacks MosaicGpuCompile"):
        call(1, 2)
    with pytest.raises(ValueError, match="name: expected one of reshape_and_cache"):
        torch_ops.set_fallback("nothing", None)


def test_an_unavailable_abi_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "unavailable", lambda: "no plugin")
    forget()
    with pytest.raises(UnavailableError, match="no plugin"):
        write_on_gpu(rows(8), rows(8), *caches(), torch.arange(8), "auto", None, None)


def test_constants_and_results_have_their_places(recorder: Recorder) -> None:
    def copied(x: Any, y: Any) -> None:
        y[...] = x[...]

    def function(x: Any) -> Any:
        return tuple(kernel(copied, interpret=None, out_type=x)(y) for y in (jnp.full(128, 3.0), x))

    made = launch.program(function, jax.ShapeDtypeStruct((128,), jnp.float32), device=-1)
    ((constant,),) = [made.constants.values()]
    assert constant.tolist() == [3.0] * 128
    bound = made.bind(2, results=(0, 1))
    bound((0x10, 0x20, 0x30))
    assert [got for _, got in recorder.launches] == [(constant.data_ptr(), 0x10), (0x30, 0x20)]
    gone = weakref.ref(constant)
    del made, constant
    forget()
    assert gone() is not None  # while it may be launched
    del bound
    gc.collect()
    assert gone() is None


def test_binding_checks_its_places(recorder: Recorder) -> None:
    cache = write_calls.engine_cache(*caches(), "auto", None, None).cache
    each = jax.ShapeDtypeStruct((8,), jnp.int32)
    some = jax.ShapeDtypeStruct((), jnp.int32)
    made = launch.program(copy_blocks, cache, BlockPairs(each, each, each, some), device=-1)
    with pytest.raises(ValueError, match="expected 6 and 0 places, got 2 and 0"):
        made.bind(0, 1)
    with pytest.raises(ValueError, match="workspace: expected the place of"):
        made.bind(0, 1, 2, 3, 4, 5)
