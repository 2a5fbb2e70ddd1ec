"""Prompts, chunks of them and decodes in one step by PyTorch's operators on a GPU: results, bits, CUDA graphs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gpu_steps import (
    BLOCK,
    BLOCKS,
    HEADS,
    KV_HEADS,
    PLAIN,
    SIZE,
    Step,
    allocations_of_a_thousand,
    new_cache,
    new_step,
    ops,
    scaled,
    tokens,
)

import jaxpaged
from jaxpaged import KVCache, PagedBatch
from jaxpaged.bridge import launch
from jaxpaged.bridge.decode_calls import by_column

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIXED = ([9, 700, 64, 300, 1, 0, 90, 1000], [1, 200, 1, 300, 1, 0, 5, 4])
"""All and new tokens of 8 requests: 512 new ones."""
CHUNKS = ([600, 1000, 900], [100, 400, 12])
"""Three requests, which prefill takes alone, of 512 new tokens."""


@dataclasses.dataclass
class Heads:
    """Values per head, as the operators take them."""

    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        by_head = (self.slopes, self.sinks)
        how = {"num_kv_heads": KV_HEADS, "max_query_len": 1}
        return (*by_head, *(None if x is None else by_column(x, **how) for x in by_head))

    def on_cpu(self) -> "Heads":
        return Heads(*(None if x is None else x.cpu() for x in (self.slopes, self.sinks)))


def plan_of(step: Step) -> Any:
    tensors = (step.query, *step.caches, step.table, step.lens, step.starts)
    return ops.plan_prefill(*tensors, step.batch_invariant, *step.scores, step.k_scale, step.v_scale)


def attended(step: Step, plan: Any, heads: Heads = Heads(), lse: bool = False, out: Any = None) -> Any:  # noqa: B008
    out = torch.full_like(step.query, torch.nan) if out is None else out
    sums = torch.full((HEADS, len(step.query)), torch.nan, device=step.query.device) if lse else None
    how = (*heads.arguments(), step.batch_invariant, *step.scores, out, step.k_scale, step.v_scale, sums)
    ops.prefill(step.query, *step.caches, step.table, step.starts, *plan, *how)
    return (out, sums) if lse else out


def per_head(requests: int | None = None) -> Heads:
    slopes = torch.rand(1 if requests is None else requests, HEADS, device="cuda") / 10
    return Heads(slopes, torch.randn(HEADS, device="cuda"))


def mixed_of_8_bits(by: str, cache_dtype: Any, **how: Any) -> Step:
    return scaled(by, MIXED[0], cache_dtype, query_lens=MIXED[1], **how)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


STEPS: dict[str, Callable[[], tuple[Step, Heads]]] = {
    "mixed": lambda: (new_step(*MIXED), Heads()),
    "float16": lambda: (new_step(*MIXED, dtype=torch.float16), Heads()),
    "chunks": lambda: (new_step(*CHUNKS), Heads()),
    "no decodes": lambda: (new_step([64] * 8, [64] * 8), Heads()),
    "all decodes": lambda: (new_step([64, 9, 1000, 1, 333, 0, 77, 12], [1] * 8), Heads()),
    "rows of no request": lambda: (new_step(*MIXED, padding=512), Heads()),
    "few tiles, in parts": lambda: (new_step([1000], [16]), per_head()),
    "few tiles, in parts, rows of no request": lambda: (new_step([900, 40], [7, 20], padding=5), per_head()),
    "N2HD": lambda: (new_step(*MIXED, layout="N2HD"), Heads()),
    "HN2D": lambda: (new_step(*MIXED, layout="HN2D"), Heads()),
    "HND": lambda: (new_step(*CHUNKS, layout="HND"), Heads()),
    "window": lambda: (new_step(*MIXED, scores=PLAIN._replace(window_left=99)), Heads()),
    "not causal": lambda: (new_step(*MIXED, scores=PLAIN._replace(causal=False)), Heads()),
    "soft cap": lambda: (new_step(*MIXED, scores=PLAIN._replace(soft_cap=20.0)), Heads()),
    "slopes and sinks": lambda: (new_step(*MIXED), per_head()),
    "slopes of each": lambda: (new_step(*MIXED), per_head(8)),
    "batch invariant": lambda: (new_step(*CHUNKS, batch_invariant=True), Heads()),
    "no power of two": lambda: (new_step([500, 70, 1, 90, 64], [300, 70, 1, 5, 1]), per_head()),
    "e4m3 without scales": lambda: (new_step(*MIXED, cache_dtype=E4M3), Heads()),
    "e4m3 by tensor": lambda: (mixed_of_8_bits("tensor", E4M3, layout="N2HD"), Heads()),
    "e4m3 by head, float16": lambda: (mixed_of_8_bits("head", E4M3, dtype=torch.float16), Heads()),
    "e5m2 by tensor": lambda: (mixed_of_8_bits("tensor", E5M2), Heads()),
    "e5m2 by head": lambda: (mixed_of_8_bits("head", E5M2, layout="HN2D"), Heads()),
    "int8 by tensor": lambda: (mixed_of_8_bits("tensor", torch.int8, layout="HND"), Heads()),
    "int8 by head": lambda: (mixed_of_8_bits("head", torch.int8), Heads()),
    "int8, everything": lambda: (
        mixed_of_8_bits("head", torch.int8, scores=PLAIN._replace(window_left=99, soft_cap=20.0)),
        per_head(8),
    ),
    "e4m3, slopes and sinks": lambda: (mixed_of_8_bits("head", E4M3), per_head()),
    "e4m3, chunks": lambda: (scaled("head", CHUNKS[0], E4M3, query_lens=CHUNKS[1]), Heads()),
    "int8, not causal": lambda: (mixed_of_8_bits("head", torch.int8, scores=PLAIN._replace(causal=False)), Heads()),
    "int8, in parts": lambda: (scaled("head", [1000], torch.int8, query_lens=[16]), per_head()),
    "e5m2, batch invariant": lambda: (mixed_of_8_bits("tensor", E5M2, batch_invariant=True), Heads()),
    "e4m3, no power of two": lambda: (
        scaled("tensor", [500, 70, 1, 90, 64], E4M3, query_lens=[300, 70, 1, 5, 1]),
        Heads(),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_prefill_is_what_the_reference_computes(name: str) -> None:
    step, heads = STEPS[name]()
    out, lse = attended(step, plan_of(step), heads, lse=True)
    assert torch.equal(attended(step, plan_of(step), heads), out)
    reference = step.on_cpu()
    expected, expected_lse = attended(reference, plan_of(reference), heads.on_cpu(), lse=True)
    # Weights of 8-bit values are rounded, and values are larger there.
    atol, lse_atol = (2e-2, 2e-3) if step.caches[0].dtype.itemsize == 1 else (4e-3, 1e-4)
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=atol)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=lse_atol, atol=lse_atol)


def jax_cache(here: Step) -> KVCache:
    """The cache of a step on the CPU, compact, and 8-bit numbers as PyTorch's operators see them."""
    scales = {n: None if x is None else x.numpy() for n, x in (("k_scale", here.k_scale), ("v_scale", here.v_scale))}
    key, value = (x.contiguous() for x in here.caches)
    if key.dtype in (E4M3, E5M2):
        name = str(key.dtype).removeprefix("torch.")
        key, value = (jnp.asarray(x.view(torch.uint8).numpy()) for x in (key, value))
        return KVCache.from_arrays(key, value, **scales, dtype=name)
    dtype = jnp.int8 if key.dtype == torch.int8 else jnp.bfloat16
    key, value = (jnp.asarray(x.float().numpy(), dtype) for x in (key, value))
    return KVCache.from_arrays(key, value, **scales)


BITS = ["mixed", "no decodes", "window", "HN2D", "rows of no request", "few tiles, in parts"]
BITS += ["e4m3 by tensor", "e5m2 by head", "int8 by head", "e4m3, slopes and sinks", "int8, in parts"]


@pytest.mark.parametrize("name", BITS)
def test_bits_are_those_of_jax(name: str) -> None:
    """The same kernels through the other door: tokens and requests are powers of two, so tiles are the same, too."""
    step, heads = STEPS[name]()
    here = step.on_cpu()
    query = jnp.asarray(here.query.float().numpy(), jnp.bfloat16)
    left = step.scores.window_left
    by_head = [None if x is None else jnp.asarray(x.cpu().numpy()) for x in (heads.slopes, heads.sinks)]
    expected, expected_lse = jaxpaged.paged_attention(
        query,
        jax_cache(here),
        PagedBatch.create(here.table.numpy(), here.lens.numpy(), here.starts.numpy()),
        window=None if left < 0 else (left, None),
        alibi_slopes=None if by_head[0] is None else by_head[0][0],
        sinks=by_head[1],
        return_lse=True,
        implementation="mosaic_gpu",
    )
    out, lse = attended(step, plan_of(step), heads, lse=True)
    np.testing.assert_array_equal(out.cpu().float().numpy(), np.asarray(expected.astype(jnp.float32)))
    # PyTorch's and XLA's products with a constant may differ in the last bit.
    np.testing.assert_allclose(lse.cpu().numpy(), np.asarray(expected_lse), rtol=3e-7)


def test_queries_that_end_with_their_memory_and_others_give_the_same_bits() -> None:
    """The first are copied to a tensor of as many rows as the program has room for."""
    step, _ = STEPS["no power of two"]()
    expected = attended(step, plan_of(step))
    larger = torch.full((512, HEADS, SIZE), torch.nan, device="cuda", dtype=torch.bfloat16)
    larger[: len(step.query)] = step.query
    behind = dataclasses.replace(step, query=larger[: len(step.query)])
    out = torch.full_like(expected, torch.nan)
    assert torch.equal(attended(behind, plan_of(behind), out=out), expected)
    qkv = torch.randn(len(expected), HEADS + 2 * KV_HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    qkv[:, :HEADS] = step.query
    parted = dataclasses.replace(step, query=qkv[:, :HEADS])
    out = torch.full_like(expected, torch.nan)
    assert torch.equal(attended(parted, plan_of(parted), out=out), expected)


def test_a_table_that_is_part_of_a_wider_one() -> None:
    step, _ = STEPS["mixed"]()
    expected = attended(step, plan_of(step))
    wide = torch.full((len(step.lens) + 5, step.table.shape[1] + 30), -3, dtype=torch.int32, device="cuda")
    wide[: len(step.lens), : step.table.shape[1]] = step.table
    parted = dataclasses.replace(step, table=wide[: len(step.lens), : step.table.shape[1]])
    assert torch.equal(attended(parted, plan_of(parted)), expected)


@pytest.mark.parametrize("cache_dtype", [None, E4M3])
@pytest.mark.parametrize("last", [300, 309, 311, 400, 2**30])
def test_nothing_beside_the_output_is_written(last: int, cache_dtype: Any) -> None:
    """Whatever the starts promise; 309 tokens, 300 of which are requests', in programs for 512."""
    step = new_step([500, 200, 64], [200, 99, 1], padding=9, cache_dtype=cache_dtype)
    rows = len(step.query) * HEADS * SIZE
    memory = torch.full((3 * rows,), 7.0, device="cuda", dtype=torch.bfloat16)
    step.starts[-1] = last
    attended(step, plan_of(step), out=memory[rows : 2 * rows].view_as(step.query))
    assert (memory[:rows] == 7).all()
    assert (memory[2 * rows :] == 7).all()
    written = memory[rows : 2 * rows].view_as(step.query)
    if last == 300:
        assert (written[300:] == 0).all()
        assert (written[:300] != 7).all()


def test_one_program_serves_steps_of_many_sizes() -> None:
    for sizes in (
        ([400, 500, 80], [200, 60, 3]),
        ([64, 500, 80, 9], [64, 190, 20, 9]),
        ([500, 500, 70], [400, 30, 70]),
    ):
        step = new_step(*sizes)
        count = len(launch._programs)
        out = attended(step, plan_of(step))
        reference = step.on_cpu()
        expected = attended(reference, plan_of(reference))
        torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=4e-3)
        added = len(launch._programs) - count
    assert added == 0


LAYERS = 4


@dataclasses.dataclass
class Model:
    """Layers with static inputs, as an engine captures them: writes, and attention by one plan."""

    step: Step
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    caches: list[Any]
    outs: list[torch.Tensor]
    kv_cache_dtype: str

    @classmethod
    def new(cls, kv_cache_dtype: str = "auto") -> "Model":
        step = new_step([1000] * 8, [64] * 8)
        dtype = torch.bfloat16 if kv_cache_dtype == "auto" else E4M3
        if dtype == E4M3:
            step.k_scale = torch.full((), 0.02, device="cuda")
            step.v_scale = torch.rand(KV_HEADS, device="cuda") / 9 + 0.02
        caches = [new_cache("N2HD", dtype) for _ in range(LAYERS)]
        outs = [torch.zeros_like(step.query) for _ in range(LAYERS)]
        slots = torch.randperm(BLOCKS * BLOCK)[:512].cuda()
        return cls(step, tokens(512), tokens(512), slots, caches, outs, kv_cache_dtype)

    def run(self) -> None:
        plan = plan_of(dataclasses.replace(self.step, caches=self.caches[0]))
        how = (self.kv_cache_dtype, self.step.k_scale, self.step.v_scale)
        for caches, out in zip(self.caches, self.outs, strict=True):
            ops.reshape_and_cache(self.key, self.value, *caches, self.slots, *how)
            attended(dataclasses.replace(self.step, caches=caches), plan, out=out)

    def set(self, seed: int) -> None:
        """New inputs in the same memory: other lengths, prompts and decodes in another order, rows of no request."""
        rng = np.random.default_rng(seed)
        new = rng.choice([0, 1, 1, 2, 30, 100, 200], 8)
        new[np.cumsum(new) > 512] = 0
        lens = np.where(new > 0, new + rng.integers(0, 700, 8), 0)
        starts = np.concatenate([[0], np.cumsum(new)])
        table = rng.integers(0, BLOCKS, self.step.table.shape)
        for x, values in ((self.step.lens, lens), (self.step.starts, starts), (self.step.table, table)):
            x.copy_(torch.from_numpy(values.astype(np.int32)))
        self.slots.copy_(torch.from_numpy(rng.permutation(BLOCKS * BLOCK)[:512]))
        for x in (self.step.query, self.key, self.value):
            x.copy_(torch.from_numpy(rng.standard_normal(x.shape).astype(np.float32)))

    def state(self) -> list[torch.Tensor]:
        return [x.clone() for x in (*self.outs, *self.stored())]

    def stored(self) -> list[torch.Tensor]:
        return [bits(x) for caches in self.caches for x in caches]

    def restore(self, start: list[torch.Tensor]) -> None:
        for x, old in zip(self.stored(), start[LAYERS:], strict=True):
            x.copy_(old)


@pytest.mark.parametrize(("side", "kv_cache_dtype"), [(False, "auto"), (True, "auto"), (True, "fp8")])
def test_a_graph_of_a_mixed_step_has_the_bits_of_eager_calls(side: bool, kv_cache_dtype: str) -> None:
    model = Model.new(kv_cache_dtype)
    start = model.state()
    model.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream() if side else None):
        model.run()
    for seed in range(5):
        model.set(seed)
        model.restore(start)
        model.run()
        expected = model.state()
        for out in model.outs:
            out.fill_(torch.nan)
        model.restore(start)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(model.state(), expected, strict=True)), seed
        assert not any(torch.isnan(out).any() for out in model.outs)


def test_what_was_not_planned_before_a_capture_is_refused_there() -> None:
    step = new_step([500, 90], [400, 60], scores=PLAIN._replace(window_left=77))
    with pytest.raises(RuntimeError, match="warm it up"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        plan_of(step)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_mixed_step_launches_our_kernels_and_clears_its_plan(kv_cache_dtype: str) -> None:
    model = Model.new(kv_cache_dtype)
    model.run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model.run()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == 3 + 3 * LAYERS, names
    assert not [name for name in names if "emcpy" in name], names


def test_a_thousand_mixed_steps_leave_the_allocator_as_it_was() -> None:
    model = Model.new()
    assert allocations_of_a_thousand(model.run) == 2000
