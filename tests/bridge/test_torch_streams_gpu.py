"""PyTorch's operators on a GPU among its own: in CUDA graphs, in the order of streams, in threads, in its memory."""

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
import torch
from gpu_steps import (
    BLOCK,
    BLOCKS,
    KV_HEADS,
    LAYERS,
    PLAIN,
    RAGGED,
    SIZE,
    Model,
    allocations_of_a_thousand,
    new_cache,
    new_step,
    ops,
    tokens,
    unique_slots,
)

from jaxpaged.bridge import launch
from jaxpaged.bridge.decode_calls import warm_up_decode
from jaxpaged.bridge.write_calls import warm_up_writes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


@pytest.mark.parametrize("num_reqs", [8, 5])
@pytest.mark.parametrize("side", [False, True])
def test_a_graph_of_a_step_has_the_bits_of_eager_calls(num_reqs: int, side: bool) -> None:
    model = Model.new(num_reqs)
    start = model.state()[LAYERS:]

    def restore() -> None:
        for x, old in zip((t for cache in model.caches for t in cache), start, strict=True):
            x.copy_(old)

    model.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream() if side else None):
        model.run()
    for seed in range(5):
        model.set(seed)
        restore()
        model.run()
        expected = model.state()
        for out in model.outs:
            out.fill_(torch.nan)
        restore()
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(model.state(), expected, strict=True)), seed


def test_what_was_not_compiled_before_a_capture_is_refused_there() -> None:
    caches = new_cache()
    rows, slots = tokens(16), unique_slots(16)
    odd = caches[0][:47], caches[1][:47]
    with pytest.raises(RuntimeError, match="warm it up"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ops.reshape_and_cache(rows, rows, *odd, slots, "auto", None, None)
    warm_up_writes([16, 19], rows, rows, *odd, slots, "auto", None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.reshape_and_cache(rows, rows, *odd, slots, "auto", None, None)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(caches[0].view(-1, KV_HEADS, SIZE)[slots[0]], rows[0])


def test_decode_can_be_warmed_up() -> None:
    step = new_step([100] * 8)
    warm_up_decode([4], step.query, *step.caches, step.table, 1, False, step.scores)
    four = dataclasses.replace(
        step, query=step.query[:4], table=step.table[:4], lens=step.lens[:4], starts=step.starts[:5]
    )
    out = torch.zeros_like(four.query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        four.attend(four.plan(), out)
    graph.replay()
    assert torch.equal(out, four.attend(four.plan()))


def test_a_thousand_steps_leave_the_allocator_as_it_was() -> None:
    model = Model.new(8)
    pointers = [x.data_ptr() for cache in model.caches for x in cache]
    # A plan's three tensors and nothing else.
    assert allocations_of_a_thousand(model.run) == 3000
    assert [x.data_ptr() for cache in model.caches for x in cache] == pointers


def test_a_step_launches_our_kernels_and_no_other() -> None:
    model = Model.new(8)
    model.run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model.run()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == 1 + 2 * LAYERS, names
    assert not [name for name in names if "emcpy" in name or "emset" in name or "at::" in name], names


CYCLES = 200_000_000
"""About a tenth of a second."""


def raced() -> tuple[torch.Tensor, torch.Tensor]:
    """What a consumer sees of keys that a slow producer made just before the write, on a stream of its own."""
    caches, slots = new_cache(), torch.arange(64, device="cuda")
    key, fresh = tokens(64), tokens(64)
    ops.reshape_and_cache(key, key, *caches, slots, "auto", None, None)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        key.copy_(fresh)
        ops.reshape_and_cache(key, key, *caches, slots, "auto", None, None)
        seen = caches[0].clone()
        caches[0].zero_()
    torch.cuda.synchronize()
    return seen.view(-1, KV_HEADS, SIZE)[:64], fresh


def test_the_order_of_a_stream_is_kept() -> None:
    seen, fresh = raced()
    assert torch.equal(seen, fresh)


@pytest.mark.skipif("JAXPAGED_TEST_NATIVE" in os.environ, reason="the fault is planted in Python's launches")
def test_a_launch_on_another_stream_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.cuda.Stream()
    monkeypatch.setattr(launch, "_stream_of", lambda device: other.cuda_stream)
    seen, fresh = raced()
    assert not torch.equal(seen, fresh)


def freed(wait: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cache holds after a write whose keys were freed, and their memory written to, right after the call.

    Args:
      wait: whether whoever writes to that memory waits for the stream of the write, as PyTorch's allocator expects.
    """
    caches, slots = new_cache(), torch.arange(256, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        key = tokens(256)
        expected = key.clone()
        ops.reshape_and_cache(key, key, *caches, slots, "auto", None, None)
        stream.synchronize()
        caches[0].zero_()
        torch.cuda._sleep(CYCLES)
        address = key.data_ptr()
        ops.reshape_and_cache(key, key, *caches, slots, "auto", None, None)
        del key
        kept = [torch.empty_like(expected)]
        while kept[-1].data_ptr() != address and len(kept) < 1000:  # other blocks of the size may be free, too
            kept.append(torch.empty_like(expected))
    garbage = kept[-1]
    assert garbage.data_ptr() == address
    with torch.cuda.stream(stream if wait else torch.cuda.Stream()):
        garbage.fill_(9.0)
    torch.cuda.synchronize()
    return caches[0].view(-1, KV_HEADS, SIZE)[:256].clone(), expected


def test_memory_may_be_freed_right_after_a_call() -> None:
    written, expected = freed()
    assert torch.equal(written, expected)


def test_a_write_to_freed_memory_that_does_not_wait_would_be_seen() -> None:
    written, expected = freed(wait=False)
    assert torch.equal(written, torch.full_like(expected, 9.0))


def test_threads_that_cuda_has_not_seen() -> None:
    caches, slots = new_cache(), torch.arange(64, device="cuda")
    rows = [tokens(64) for _ in range(8)]
    targets = [new_cache() for _ in rows]
    ops.reshape_and_cache(rows[0], rows[0], *caches, slots, "auto", None, None)
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work(row: torch.Tensor, target: Any) -> None:
        try:
            for _ in range(200):
                ops.reshape_and_cache(row, row, *target, slots, "auto", None, None)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(rows, targets, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors
    for row, target in zip(rows, targets, strict=True):
        assert all(torch.equal(x.view(-1, KV_HEADS, SIZE)[:64], row) for x in target)


def test_compiled_by_torch_without_a_copy_of_a_cache() -> None:
    model = Model.new(8)
    model.run()
    model.set(1)
    start = model.state()[LAYERS:]
    model.run()
    expected = model.state()
    for x, old in zip((t for cache in model.caches for t in cache), start, strict=True):
        x.copy_(old)

    scores = tuple(PLAIN)

    def layer(query: Any, key: Any, value: Any, cache: Any, slots: Any, table: Any, lens: Any, starts: Any) -> Any:
        caches = cache.unbind(1)
        plan = ops.plan_decode(query, *caches, table, lens, starts, 1, False, *scores)
        ops.reshape_and_cache(key, value, *caches, slots, "auto", None, None)
        out = torch.empty_like(query)
        ops.decode(query, *caches, table, *plan, None, None, 1, False, *scores, out)
        return out

    block = (BLOCK * KV_HEADS * SIZE, KV_HEADS * SIZE, SIZE, 1)
    whole = model.caches[0][0].as_strided((BLOCKS, 2, BLOCK, KV_HEADS, SIZE), (2 * block[0], *block))
    step = model.step
    arguments = (step.query, model.key, model.value, whole, model.slots, step.table, step.lens, step.starts)
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.equal(compiled(*arguments), expected[0])
    assert torch.equal(model.caches[0][0], expected[LAYERS])
    torch.cuda.synchronize()
    before = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    current = torch.cuda.memory_allocated()
    compiled(*arguments)
    assert torch.cuda.max_memory_allocated() - current < whole.nbytes, before


def test_jax_leaves_the_memory_to_torch() -> None:
    program = """
        import torch, jaxpaged.bridge.torch_ops, jax
        free, total = torch.cuda.mem_get_info()
        jax.devices()
        jax.numpy.ones(3).block_until_ready()
        assert jax.default_backend() == "gpu"
        left, _ = torch.cuda.mem_get_info()
        assert free - left < 2 * 2**30, (free - left) / 2**30
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLA_PYTHON_CLIENT")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    step = new_step(RAGGED)
    expected = step.attend(step.plan())
    there = {f.name: getattr(step, f.name) for f in dataclasses.fields(step)}
    moved = {n: x.to("cuda:1") for n, x in there.items() if isinstance(x, torch.Tensor)}
    other = dataclasses.replace(step, **moved, caches=[x.to("cuda:1") for x in step.caches])
    assert torch.cuda.current_device() == 0
    assert torch.equal(other.attend(other.plan()).to("cuda:0"), expected)
    assert torch.cuda.current_device() == 0
