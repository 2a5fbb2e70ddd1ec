"""Memory of a GPU shared between PyTorch and JAX: no copies, order kept both ways, caches donated where they lie."""

import gc
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from gpu_steps import BLOCK, BLOCKS, KV_HEADS, LAYOUTS, PLAIN, RAGGED, SIZE, new_cache, new_step, ops, unique_slots
from gpu_steps import tokens as new_tokens

from jaxpaged import PagedBatch, paged_attention, write_kv
from jaxpaged.bridge import dlpack_calls, imports, stream_order
from jaxpaged.bridge.dlpack import int64_words, physical_order, tensor_cache, to_jax, to_torch, words_to_slots
from jaxpaged.bridge.torch_cache import TorchCache, write_kv_
from jaxpaged.bridge.torch_call import torch_call

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

CYCLES = 200_000_000
"""About a tenth of a second."""
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "bool"]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_shared_both_ways(dtype: str) -> None:
    tensor = (torch.randn(6, 32, device="cuda") * 3).to(getattr(torch, dtype))
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() and array.dtype == jnp.dtype(dtype)
    back = to_torch(array)
    assert back.data_ptr() == tensor.data_ptr() and back.dtype == tensor.dtype
    made = to_torch(jax.jit(lambda x: x[::-1])(array))
    assert torch.equal(bits(made), bits(tensor).flip(0))


def test_parts_and_transpositions_are_shared_or_refused() -> None:
    whole = torch.randn(8, 4, 16, device="cuda")
    assert to_jax(whole[3:]).unsafe_buffer_pointer() == whole[3:].data_ptr()
    view, _ = physical_order(whole.permute(2, 0, 1))
    assert to_jax(view).unsafe_buffer_pointer() == whole.data_ptr()
    for part, message in (
        (whole[:, :2], r"x: .*compact.*whole tensor"),
        (whole.transpose(1, 2), "x: .*physical_order"),
        (whole.view(-1)[1:], "x: .*a GPU only from a multiple of 16 bytes.* 4 bytes past"),
        (torch.arange(4, device="cuda"), "x: .*int64_words"),
    ):
        with pytest.raises(ValueError, match=message):
            to_jax(part, "x")


def test_int64_slots_are_shared_as_words() -> None:
    slots = torch.tensor([0, 5, -1, 2**31, 7], device="cuda")
    words = to_jax(int64_words(slots))
    assert words.unsafe_buffer_pointer() == slots.data_ptr()
    assert jax.jit(words_to_slots)(words).tolist() == [0, 5, -1, -1, 7]


def write(cache: Any, key: Any, value: Any, words: Any) -> Any:
    return None, write_kv(cache, key, value, words_to_slots(words))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_donated_cache_is_written_where_it_lies(layout: str, dtype: torch.dtype) -> None:
    caches = new_cache(layout, dtype)
    on_cpu = [x.cpu() for x in caches]
    pointers = [x.data_ptr() for x in caches]
    for seed in range(3):
        torch.manual_seed(seed)
        key, value, slots = new_tokens(33), new_tokens(33), unique_slots(33)
        torch_call(write, tensor_cache(*caches), key, value, int64_words(slots), donate=[0])
        write_kv_(TorchCache.of(*on_cpu), key.cpu(), value.cpu(), slots.cpu())
    assert [x.data_ptr() for x in caches] == pointers
    for x, y in zip(caches, on_cpu, strict=True):
        assert torch.equal(bits(x), bits(y))


def test_donation_keeps_the_array_on_its_memory() -> None:
    x = torch.zeros(1024, device="cuda")
    for _ in range(3):
        torch_call(one_more, x, donate=[0])
        assert imports.find(x).unsafe_buffer_pointer() == x.data_ptr()
    assert torch.equal(x, torch.full_like(x, 3))


def one_more(x: Any) -> Any:
    return None, x + 1


def test_a_cache_is_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[int] = []
    monkeypatch.setattr(imports, "to_jax", lambda x, name: imported.append(x.data_ptr()) or to_jax(x, name))
    caches = new_cache("NHD")
    key, value, slots = new_tokens(16), new_tokens(16), int64_words(unique_slots(16))
    for _ in range(10):
        torch_call(write, tensor_cache(*caches), key, value, slots, donate=[0])
    assert sorted(imported) == sorted(x.data_ptr() for x in (*caches, key, value, slots))


def attend_and_write(cache: Any, query: Any, key: Any, value: Any, words: Any, batch: PagedBatch) -> Any:
    cache = write_kv(cache, key, value, words_to_slots(words))
    return paged_attention(query, cache, batch), cache


def decode_arguments(caches: Any) -> Any:
    step = new_step([100] * 16)
    batch = PagedBatch(step.table, step.lens, step.starts, None, 1)
    rows = new_tokens(16), new_tokens(16), int64_words(unique_slots(16))
    return tensor_cache(*caches), step.query, *rows, batch


def test_a_thousand_calls_leave_both_allocators_as_they_were() -> None:
    caches = new_cache("N2HD")
    arguments = decode_arguments(caches)
    device = jax.local_devices(backend="gpu")[0]

    def used() -> Any:
        gc.collect()  # what other tests have left
        torch.cuda.synchronize()
        ours = torch.cuda.memory_stats()
        theirs = device.memory_stats() or {}
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current")
        return [ours[name] for name in names], theirs.get("bytes_in_use", 0) >> 20, len(imports._imports)

    def call_often() -> None:
        for _ in range(1000):
            torch_call(attend_and_write, *arguments, donate=[0])

    call_often()  # at first as often: how many calls are on their way at a time, and so the most memory, differs
    before, pointers = used(), [x.data_ptr() for x in caches]
    call_often()
    assert used() == before and [x.data_ptr() for x in caches] == pointers


def kernels(work: Callable[[], Any]) -> dict[str, float]:
    """What a GPU does, in microseconds."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {f"{i} {event.name}": event.time_range.elapsed_us() for i, event in enumerate(events)}


COPY_US = 100.0
"""A copy of the keys below takes longer, 250 µs at an H200's bandwidth; no kernel of the step does."""


def large_caches(layout: str) -> Any:
    numbers = torch.zeros(2, 16384, BLOCK, KV_HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    return LAYOUTS[layout](numbers)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_copies_no_cache(layout: str) -> None:
    arguments = decode_arguments(large_caches(layout))
    found = kernels(lambda: torch_call(attend_and_write, *arguments, donate=[0]))
    assert found and max(found.values()) < COPY_US, found
    assert not [name for name in found if "transpose" in name], found


def new_keys(*arguments: Any) -> Any:
    """A step on a cache that is not donated."""
    return attend_and_write(*arguments)[1].key


def test_a_copy_of_a_cache_would_be_seen() -> None:
    arguments = decode_arguments(large_caches("NHD"))
    found = kernels(lambda: torch_call(new_keys, *arguments))
    assert max(found.values()) > COPY_US, found


def add_to(y: Any, x: Any) -> Any:
    return None, y + x


def raced_by_torch() -> float:
    """What a JAX function sees of a tensor that PyTorch's stream writes late."""
    x, y = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    torch_call(add_to, y, x, donate=[0])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        x.fill_(1.0)
        torch_call(add_to, y, x, donate=[0])
    torch.cuda.synchronize()
    return float(y.mean())


def test_jax_waits_for_the_current_stream() -> None:
    assert raced_by_torch() == 1.0


def test_a_call_that_did_not_wait_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = stream_order.queued_work(torch.device("cuda", torch.cuda.current_device())).block_until_ready()
    monkeypatch.setattr(stream_order, "queued_work", lambda device: stale)
    assert raced_by_torch() == 0.0


def slow(y: Any, x: Any) -> Any:
    """The sum of both, some tenths of a second later: `x` is read last."""
    m = jax.lax.fori_loop(0, 300, lambda _, m: (m @ m) * 1e-4, jnp.full((4096, 4096), 1 + 1e-9 * y[0]))
    start = (m[0, 0] > 2).astype(jnp.int32)
    return None, y + jax.lax.dynamic_slice(x, (start,), y.shape)


def raced_by_jax() -> float:
    """What PyTorch's stream sees of a tensor that a JAX function writes late."""
    x, y = torch.ones((1 << 20) + 1, device="cuda"), torch.zeros(1 << 20, device="cuda")
    torch_call(slow, y, x, donate=[0])
    torch.cuda.synchronize()
    y.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch_call(slow, y, x, donate=[0])
        seen = y.clone()
    torch.cuda.synchronize()
    return float(seen.mean())


def test_the_current_stream_waits_for_jax() -> None:
    assert raced_by_jax() == 1.0


def test_a_stream_that_did_not_wait_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_order, "wait_for", lambda done: None)
    assert raced_by_jax() < 1.0


def test_the_host_waits_for_neither() -> None:
    x, y = torch.ones((1 << 20) + 1, device="cuda"), torch.zeros(1 << 20, device="cuda")
    torch_call(slow, y, x, donate=[0])
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(CYCLES)
    torch_call(slow, y, x, donate=[0])
    called = time.perf_counter() - start
    torch.cuda.synchronize()
    done = time.perf_counter() - start
    assert called < done / 2, (called, done)


def test_imports_and_exports_by_hand_are_ordered_too() -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    double = jax.jit(lambda x: x * 2)
    double(to_jax(x)).block_until_ready()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        x.fill_(1.0)
        result = to_torch(double(to_jax(x)))
        seen = result.clone()
    torch.cuda.synchronize()
    assert float(seen.mean()) == 2.0


def freed_while_it_is_read(other_stream: bool) -> tuple[float, bool]:
    """The result of a function whose argument was freed at once, and whether its memory was taken for new numbers."""
    y = torch.zeros(1 << 20, device="cuda")
    x = torch.ones((1 << 20) + 1, device="cuda")
    torch_call(slow, y, x, donate=[0])
    torch.cuda.synchronize()
    y.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if other_stream else torch.cuda.current_stream()):
        torch_call(slow, y, x, donate=[0])
    start, end = x.data_ptr(), x.data_ptr() + x.nbytes
    del x
    garbage = [torch.full(((1 << 20) + 1,), 9.0, device="cuda") for _ in range(32)]
    taken = any(g.data_ptr() < end and start < g.data_ptr() + g.nbytes for g in garbage)
    torch.cuda.synchronize()
    return float(y.mean()), taken


@pytest.mark.parametrize("other_stream", [False, True])
def test_memory_may_be_freed_right_after_a_call(other_stream: bool) -> None:
    result, taken = freed_while_it_is_read(other_stream)
    assert result == 1.0
    assert taken != other_stream  # the stream that has the memory is the one that waits, or it gets other memory


def test_memory_that_was_taken_too_early_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_order, "keep_until_done", lambda *tensors: None)
    result, taken = freed_while_it_is_read(True)
    assert taken and result != 1.0


def test_a_capture_is_refused_with_a_reason() -> None:
    x, array = torch.zeros(64, device="cuda"), jnp.zeros(64)
    torch_call(one_more, x, donate=[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        for refused in (
            lambda: torch_call(one_more, x, donate=[0]),
            lambda: to_jax(x),
            lambda: to_torch(array),
        ):
            with pytest.raises(RuntimeError, match=r"no CUDA graph .* outside of the graph"):
                refused()
    graph.replay()
    torch_call(one_more, x, donate=[0])
    assert float(x[0]) == 3.0


def test_threads_with_streams_and_caches_of_their_own() -> None:
    tensors = [torch.zeros(1 << 16, device="cuda") for _ in range(8)]
    torch_call(one_more, tensors[0], donate=[0])
    tensors[0].zero_()
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work(x: torch.Tensor) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(100):
                    torch_call(one_more, x, donate=[0])
                    x.add_(1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(x,)) for x in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors
    assert all(torch.equal(x, torch.full_like(x, 200)) for x in tensors)


def test_a_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    caches = [x.to("cuda:1") for x in new_cache("N2HD")]
    on_cpu = [x.cpu() for x in caches]
    key, value, slots = new_tokens(33).to("cuda:1"), new_tokens(33).to("cuda:1"), unique_slots(33).to("cuda:1")
    pointers = [x.data_ptr() for x in caches]
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        torch_call(write, tensor_cache(*caches), key, value, int64_words(slots), donate=[0])
    write_kv_(TorchCache.of(*on_cpu), key.cpu(), value.cpu(), slots.cpu())
    assert torch.cuda.current_device() == 0 and [x.data_ptr() for x in caches] == pointers
    assert all(torch.equal(x.cpu(), y) for x, y in zip(caches, on_cpu, strict=True))
    result = torch_call(lambda x: x * 2, key)
    assert result.device == torch.device("cuda:1") and torch.equal(result, key * 2)
    with pytest.raises(ValueError, match=r"args\[1\]: expected a tensor on cuda:1"):
        torch_call(jnp.add, key, key.to("cuda:0"))


def test_operators_by_dlpack_are_those_by_kernels() -> None:
    step = new_step(RAGGED)
    caches = [tuple(x.clone() for x in step.caches) for _ in range(2)]
    rows, slots = new_tokens(37), unique_slots(37)[:35]
    pairs = torch.tensor([[1, 2], [2, 5], [7, 5], [-1, 3], [BLOCKS, 0]], device="cuda")
    dlpack_calls.write_by_dlpack(rows, rows, *caches[0], slots, "auto", None, None)
    ops.reshape_and_cache(rows, rows, *caches[1], slots, "auto", None, None)
    dlpack_calls.copy_by_dlpack([caches[0][0]], [caches[0][1]], pairs)
    ops.copy_blocks([caches[1][0]], [caches[1][1]], pairs)
    dlpack_calls.swap_by_dlpack(*caches[0], pairs)
    ops.swap_blocks(*caches[1], pairs)
    assert all(torch.equal(x, y) for x, y in zip(*caches, strict=True))
    expected = step.attend(step.plan())
    tensors = (step.query, *step.caches, step.table)
    plan = dlpack_calls.plan_by_dlpack(*tensors, step.lens, step.starts, 1, False, *PLAIN)
    out = torch.full_like(step.query, torch.nan)
    dlpack_calls.decode_by_dlpack(*tensors, *plan, None, None, 1, False, *PLAIN, out)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-3)


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)


def test_operators_where_kernels_cannot_be_launched() -> None:
    done = run("""
        import warnings, torch
        from jaxpaged.bridge import mosaic_abi
        mosaic_abi.unavailable = lambda: "the library lacks MosaicGpuCompile"
        from jaxpaged.bridge import torch_ops
        caches, rows = [torch.zeros(4, 16, 2, 64, device="cuda").bfloat16() for _ in range(2)], torch.ones(3, 2, 64)
        rows, slots = rows.cuda().bfloat16(), torch.tensor([0, 5, 63], device="cuda")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                torch.ops.jaxpaged.reshape_and_cache(rows, rows, *caches, slots, "auto", None, None)
            torch.ops.jaxpaged.swap_blocks(*caches, torch.tensor([[0, 1]], device="cuda"))
        print(len([w for w in caught if "MosaicGpuCompile" in str(w.message)]))
        print(int(caches[0].sum()), int(caches[1].sum()))
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1", f"{3 * 2 * 64} {3 * 2 * 64 + 2 * 2 * 64}"]


def test_a_process_exits_cleanly_with_imports_at_hand() -> None:
    done = run("""
        import torch
        from jaxpaged.bridge.torch_call import torch_call
        x, y = torch.zeros(1 << 20, device="cuda"), torch.ones(1 << 20, device="cuda")
        def add(x, y): return y * 2, x + y
        for _ in range(3): result = torch_call(add, x, y, donate=[0])
        print(float(x.mean()), float(result.mean()))
    """)
    assert (done.returncode, done.stdout) == (0, "3.0 2.0\n"), done.stderr
    assert not re.search("exception|traceback|fatal|terminate", done.stderr, re.IGNORECASE), done.stderr
