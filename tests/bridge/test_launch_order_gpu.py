"""Kernels that are launched before the one before them has ended, on a GPU: nothing is seen or overwritten too soon.

Each check is shown to find the fault it is for: kernels that don't wait, or let the next one start before they have.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_steps import BLOCK, BLOCKS, HEADS, KV_HEADS, SIZE, Step, new_cache, new_step, ops, tokens
from jax import lax
from jax.experimental import pallas as pl
from late import copy_late

from jaxpaged.bridge import launch, native, process
from jaxpaged.pallas import cache_write, decode
from jaxpaged.pallas.mosaic import let_next_kernel_start, wait_for_previous_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

KERNELS = {cache_write: "tile", decode: "share"}
"""By module, an axis of the kernel's grid."""


def forget() -> None:
    torch.cuda.synchronize()
    for forget_all in process._forgotten:
        forget_all()
    for served in native._served.values():
        served.forget()
    launch._lowered.clear()


@contextlib.contextmanager
def begun_by(begin: Callable[[str], Callable[[Any], None]], *modules: Any) -> Iterator[None]:
    """Within it these modules' kernels begin with something else than `follow_previous_kernel`."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "follow_previous_kernel", begin(KERNELS[module]))
        forget()
        yield
    forget()


def without_a_wait(axis: str) -> Callable[[Any], None]:
    """Launched early, as there is a wait in the kernel, but no thread comes there."""

    def begin(interpret: Any) -> None:
        pl.when(lax.axis_index(axis) < 0)(lambda: wait_for_previous_kernel(interpret))
        let_next_kernel_start(interpret)

    return begin


def one_after_the_other(axis: str) -> Callable[[Any], None]:
    """Not launched early, and letting nobody start early."""
    return lambda interpret: None


def write(key: torch.Tensor, caches: Any, slots: torch.Tensor) -> None:
    ops.reshape_and_cache(key, key, *caches, slots, "auto", None, None)


def late_keys() -> tuple[torch.Tensor, torch.Tensor]:
    """What is written, and what the kernel before has made at last."""
    caches, slots = new_cache(), torch.arange(64, device="cuda")
    fresh, key = tokens(64), torch.zeros(64, KV_HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):  # nothing is compiled in the second turn
        key.zero_()
        torch.cuda.synchronize()
        copy_late(fresh, key)
        write(key, caches, slots)
    return caches[0].view(-1, KV_HEADS, SIZE)[:64].clone(), fresh


def late_slots() -> tuple[torch.Tensor, torch.Tensor]:
    caches, key = new_cache(), tokens(64)
    slots, fresh = torch.full((64,), -1, device="cuda"), torch.arange(64, device="cuda")
    for _ in range(2):
        slots.fill_(-1)
        caches[0].zero_()
        torch.cuda.synchronize()
        copy_late(fresh, slots)
        write(key, caches, slots)
    return caches[0].view(-1, KV_HEADS, SIZE)[:64].clone(), key


def late_reader_of_the_cache() -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel before a write has read of the cache, and what was there for it."""
    caches, key, slots = new_cache(), tokens(64), torch.arange(64, device="cuda")
    old, seen = caches[0].clone(), torch.zeros_like(caches[0])
    for _ in range(2):
        caches[0].copy_(old)
        torch.cuda.synchronize()
        copy_late(caches[0], seen)
        write(key, caches, slots)
    return seen, old


WRITES = [late_keys, late_slots, late_reader_of_the_cache]


@pytest.mark.parametrize("case", WRITES)
def test_a_write_waits(case: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    seen, expected = case()
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("case", WRITES)
def test_a_write_that_does_not_wait_would_be_seen(case: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    with begun_by(without_a_wait, cache_write):
        seen, expected = case()
        assert not torch.equal(seen, expected)


LENS = [500, 300, 0, 64, 1, 900, 0, 77]


def late(step: Step, target: torch.Tensor, stale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of decode where one of its inputs comes late, and where all was there."""
    plan, fresh, out = step.plan(), target.clone(), torch.empty_like(step.query)
    expected = step.attend(plan).clone()
    for _ in range(2):
        target.copy_(stale)
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        copy_late(fresh, target)
        step.attend(plan, out)
    torch.cuda.synchronize()
    assert torch.equal(target, fresh)
    return out, expected


def late_cache() -> tuple[torch.Tensor, torch.Tensor]:
    step = new_step(LENS)
    return late(step, step.caches[1], torch.zeros_like(step.caches[1]))


def late_queries() -> tuple[torch.Tensor, torch.Tensor]:
    step = new_step(LENS)
    return late(step, step.query, torch.zeros_like(step.query))


def late_table() -> tuple[torch.Tensor, torch.Tensor]:
    step = new_step(LENS)
    return late(step, step.table, torch.zeros_like(step.table))


def late_plan() -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the requests without a token are cleared, if they are known."""
    step = new_step(LENS, batch_invariant=True)
    requests, *others = step.plan()
    expected = step.attend((requests, *others)).clone()
    count = requests.numel()
    numbers = torch.nn.functional.pad(requests.flatten(), (0, -count % 4))
    held, out = torch.zeros_like(numbers), torch.empty_like(step.query)
    plan = (held[:count].view_as(requests), *others)
    for _ in range(2):
        held.zero_()
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        copy_late(numbers, held)
        step.attend(plan, out)
    return out, expected


def late_reader_of_the_output() -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel before decode has read of the memory that decode writes, and what was there for it."""
    step = new_step(LENS)
    plan, old, out = step.plan(), tokens(len(LENS), heads=HEADS), torch.empty_like(step.query)
    seen = torch.zeros_like(out)
    for _ in range(2):
        out.copy_(old)
        torch.cuda.synchronize()
        copy_late(out, seen)
        step.attend(plan, out)
    return seen, old


DECODES = [late_cache, late_queries, late_table, late_plan, late_reader_of_the_output]


@pytest.mark.parametrize("case", DECODES)
def test_decode_waits(case: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    seen, expected = case()
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("case", DECODES)
def test_decode_that_does_not_wait_would_be_seen(case: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    with begun_by(without_a_wait, decode):
        seen, expected = case()
        assert not torch.equal(seen, expected)


def last_token() -> tuple[torch.Tensor, torch.Tensor]:
    """What requests with one token attend to when that comes late, is written, and read: its value."""
    step = new_step([1] * 8)
    step.table[:, 0] = torch.arange(8, device="cuda")
    slots = step.table[:, 0].long() * BLOCK
    plan, fresh, out = step.plan(), tokens(8), torch.empty_like(step.query)
    value = torch.zeros_like(fresh)
    for _ in range(2):
        for x in (value, *step.caches):
            x.zero_()
        torch.cuda.synchronize()
        copy_late(fresh, value)
        write(value, step.caches, slots)
        step.attend(plan, out)
    return out, fresh.repeat_interleave(HEADS // KV_HEADS, dim=1)


def test_a_token_that_comes_late_is_attended_to() -> None:
    seen, expected = last_token()
    assert torch.equal(seen, expected)


def test_a_write_that_lets_decode_start_and_does_not_wait_would_be_seen() -> None:
    with begun_by(without_a_wait, cache_write, decode):
        seen, expected = last_token()
        assert not torch.equal(seen, expected)


LAYERS = 16


@dataclasses.dataclass
class Chain:
    """Layers that write, and ask, what the layer before has left, with no kernel of another's in between."""

    step: Step
    slots: torch.Tensor
    caches: list[Any]
    outs: list[torch.Tensor]

    @classmethod
    def new(cls, num_reqs: int) -> "Chain":
        step = new_step([500] * num_reqs)
        written = num_reqs * HEADS // KV_HEADS
        caches = [new_cache() for _ in range(LAYERS)]
        slots = torch.zeros(written, dtype=torch.int64, device="cuda")
        return cls(step, slots, caches, [torch.empty_like(step.query) for _ in caches])

    def set(self, seed: int) -> None:
        """New inputs in the same memory."""
        torch.manual_seed(seed)
        self.step.lens.copy_(torch.randint(0, 500, self.step.lens.shape))
        self.step.table.copy_(torch.randint(0, BLOCKS, self.step.table.shape))
        self.slots.copy_(torch.randperm(BLOCKS * BLOCK)[: len(self.slots)])
        self.step.query.normal_()
        for x in (x for cache in self.caches for x in cache):
            x.normal_()
        for out in self.outs:
            out.fill_(torch.nan)

    def run(self, after: Callable[[], None] = lambda: None) -> None:
        plan, x = self.step.plan(), self.step.query
        after()
        for cache, out in zip(self.caches, self.outs, strict=True):
            write(x.view(-1, KV_HEADS, SIZE), cache, self.slots)
            after()
            dataclasses.replace(self.step, caches=cache, query=x).attend(plan, out)
            after()
            x = out

    def state(self) -> list[torch.Tensor]:
        return [x.clone() for x in (*self.outs, *(t for cache in self.caches for t in cache))]


SEEDS = range(6)


def states(chain: Chain, run: Callable[[], None]) -> list[list[torch.Tensor]]:
    found = []
    for seed in SEEDS:
        chain.set(seed)
        run()
        found.append(chain.state())
    return found


def assert_same(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for seed in SEEDS:
        assert not any(x.isnan().any() for x in expected[seed])
        assert all(torch.equal(x, y) for x, y in zip(found[seed], expected[seed], strict=True)), seed


@pytest.mark.parametrize("num_reqs", [8, 5])
def test_many_layers_have_the_bits_of_kernels_one_after_the_other(num_reqs: int) -> None:
    chain = Chain.new(num_reqs)
    with begun_by(one_after_the_other, *KERNELS):
        expected = states(chain, lambda: chain.run(torch.cuda.synchronize))
    assert_same(states(chain, lambda: chain.run(torch.cuda.synchronize)), expected)
    assert_same(states(chain, chain.run), expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain.run()
    assert_same(states(chain, graph.replay), expected)


def test_a_graph_in_which_copies_and_other_streams_come_before_a_write_and_decode() -> None:
    """A kernel can follow early on a kernel alone; what else is before it must have ended."""
    step, source = new_step([1] * 8), [tokens(8) for _ in range(2)]
    step.table[:, 0] = torch.arange(8, device="cuda")
    slots, value = step.table[:, 0].long() * BLOCK, torch.zeros_like(source[0])
    plan, out, seen = step.plan(), torch.empty_like(step.query), [torch.empty_like(step.query) for _ in range(2)]
    side = torch.cuda.Stream()

    def run() -> None:
        for i in range(2):
            value.copy_(source[i])  # no kernel
            write(value, step.caches, slots)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step.attend(plan, out)  # the first one on its stream
                seen[i].copy_(out)
            torch.cuda.current_stream().wait_stream(side)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        for x in (*source, *seen, out):
            x.normal_()
        graph.replay()
        for x, y in zip(seen, source, strict=True):
            assert torch.equal(x, y.repeat_interleave(HEADS // KV_HEADS, dim=1))
