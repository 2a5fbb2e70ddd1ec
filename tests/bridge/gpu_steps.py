"""A step of decodes, and a model of some layers, on a GPU by PyTorch's operators."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from jaxpaged.bridge import torch_ops
from jaxpaged.bridge.decode_calls import by_column
from jaxpaged.bridge.decode_shapes import ScoreOptions

assert torch_ops.set_fallback  # registers the operators
ops = torch.ops.jaxpaged

BLOCKS, BLOCK, HEADS, KV_HEADS, SIZE = 64, 16, 32, 8, 128
LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "NHD": lambda x: (x[0].clone(), x[1].clone()),
    "HND": lambda x: tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in x),
    "2NHD": lambda x: x.contiguous().unbind(0),
    "N2HD": lambda x: x.transpose(0, 1).contiguous().unbind(1),
    "HN2D": lambda x: torch.cat([x[0], x[1]], -1).transpose(1, 2).contiguous().transpose(1, 2).chunk(2, -1),
}


def new_cache(layout: str = "NHD", dtype: Any = torch.bfloat16, head_size: int = SIZE) -> Any:
    numbers = torch.randn(2, BLOCKS, BLOCK, KV_HEADS, head_size, device="cuda")
    if dtype in (torch.uint8, torch.int8):
        return LAYOUTS[layout]((numbers * 40).to(torch.int8).view(dtype))
    if dtype.itemsize == 1:
        return tuple(x.view(dtype) for x in LAYOUTS[layout](numbers.to(dtype).view(torch.uint8)))
    return LAYOUTS[layout](numbers.to(dtype))


def unique_slots(n: int, dtype: Any = torch.int64) -> torch.Tensor:
    slots = torch.randperm(BLOCKS * BLOCK)[:n].to(dtype)
    if n > 4:
        slots[1], slots[3] = -1, BLOCKS * BLOCK + 5
    return slots.cuda()


def tokens(n: int, dtype: Any = torch.bfloat16, heads: int = KV_HEADS, size: int = SIZE) -> torch.Tensor:
    return torch.randn(n, heads, size, device="cuda").to(dtype)


@dataclasses.dataclass
class Step:
    """A batch of decodes, its tensors, and what scores go through."""

    query: torch.Tensor
    caches: Any
    table: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    max_query_len: int = 1
    batch_invariant: bool = False
    scores: ScoreOptions = ScoreOptions(SIZE**-0.5, True, -1, -1, 0.0)  # noqa: RUF009
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def plan(self, calls: Any = ops) -> Any:
        tensors = (self.query, *self.caches, self.table, self.lens, self.starts)
        how = (self.max_query_len, self.batch_invariant, *self.scores, self.k_scale, self.v_scale)
        return calls.plan_decode(*tensors, *how)

    def attend(
        self, plan: Any, out: torch.Tensor | None = None, lse: torch.Tensor | None = None, calls: Any = ops
    ) -> torch.Tensor:
        out = torch.full_like(self.query, torch.nan) if out is None else out
        how = (self.slopes, self.sinks, self.max_query_len, self.batch_invariant, *self.scores)
        calls.decode(self.query, *self.caches, self.table, *plan, *how, out, self.k_scale, self.v_scale, lse)
        return out

    def new_lse(self) -> torch.Tensor:
        return self.query.new_full(self.query.shape[:2], torch.nan, dtype=torch.float32)

    def on_cpu(self) -> "Step":
        cpu = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved = {n: x.cpu() for n, x in cpu.items() if isinstance(x, torch.Tensor)}
        return dataclasses.replace(self, **moved, caches=[x.cpu() for x in self.caches])


def new_step(
    lens: Any,
    query_lens: Any = None,
    layout: str = "NHD",
    dtype: Any = torch.bfloat16,
    cache_dtype: Any = None,
    **how: Any,
) -> Step:
    query_lens = [1] * len(lens) if query_lens is None else query_lens
    width = -(-max(lens) // BLOCK) + 1
    table = torch.randint(0, BLOCKS, (len(lens), width), dtype=torch.int32)
    for row, n in zip(table, lens, strict=True):
        row[-(-n // BLOCK) :] = -7  # never looked up
    starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    return Step(
        tokens(int(starts[-1]) + how.pop("padding", 0), dtype, HEADS),
        new_cache(layout, cache_dtype or dtype),
        table.cuda(),
        torch.tensor(lens, dtype=torch.int32, device="cuda"),
        starts.cuda(),
        **how,
    )


def scaled(by: str, lens: Any, cache_dtype: Any, **how: Any) -> Step:
    """A step over an 8-bit cache with scales by "tensor", "head" or "token"."""
    shape = {"tensor": (), "head": (KV_HEADS,), "token": (BLOCKS, BLOCK, KV_HEADS)}[by]
    factor = 0.05 if cache_dtype == torch.int8 else 1.0
    scales = [(torch.rand(shape, device="cuda") + 0.1) * factor for _ in range(2)]
    return new_step(lens, cache_dtype=cache_dtype, k_scale=scales[0], v_scale=scales[1], **how)


def per_head(step: Step, slopes: bool = False, sinks: bool = False) -> Step:
    how = {"num_kv_heads": KV_HEADS, "max_query_len": step.max_query_len}
    if slopes:
        step.slopes = by_column(torch.rand(HEADS, device="cuda"), **how)
    if sinks:
        step.sinks = by_column(torch.randn(HEADS, device="cuda"), **how)
    return step


PLAIN = ScoreOptions(SIZE**-0.5, True, -1, -1, 0.0)
RAGGED = [1, 40, 700, 0, 333, 64, 65, 900]
LAYERS = 4


@dataclasses.dataclass
class Model:
    """Layers that write to their caches and attend, with static inputs, as an engine captures them."""

    step: Step
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    caches: list[Any]
    outs: list[torch.Tensor]

    @classmethod
    def new(cls, num_reqs: int) -> "Model":
        step = new_step([500] * num_reqs)
        caches = [new_cache("N2HD") for _ in range(LAYERS)]
        outs = [torch.zeros_like(step.query) for _ in range(LAYERS)]
        return cls(step, tokens(num_reqs), tokens(num_reqs), unique_slots(num_reqs), caches, outs)

    def run(self) -> None:
        plan = self.step.plan()
        for cache, out in zip(self.caches, self.outs, strict=True):
            ops.reshape_and_cache(self.key, self.value, *cache, self.slots, "auto", None, None)
            dataclasses.replace(self.step, caches=cache).attend(plan, out)

    def set(self, seed: int) -> None:
        """New inputs in the same memory."""
        rng = np.random.default_rng(seed)
        lens = rng.integers(0, 500, len(self.step.lens)).astype(np.int32)
        self.step.lens.copy_(torch.from_numpy(lens))
        self.step.table.copy_(torch.from_numpy(rng.integers(0, BLOCKS, self.step.table.shape).astype(np.int32)))
        self.slots.copy_(torch.from_numpy(rng.permutation(BLOCKS * BLOCK)[: len(lens)]))
        for x in (self.step.query, self.key, self.value):
            x.copy_(torch.from_numpy(rng.standard_normal(x.shape).astype(np.float32)))

    def state(self) -> list[torch.Tensor]:
        return [x.clone() for x in (*self.outs, *(t for cache in self.caches for t in cache))]


def allocations_of_a_thousand(run: Callable[[], Any]) -> int:
    """How many allocations a thousand calls make, after which the allocator must hold what it held before."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(1000):
        run()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for name in ("allocated_bytes.all.current", "reserved_bytes.all.current", "segment.all.allocated"):
        assert after[name] == before[name], name
    return after["allocation.all.allocated"] - before["allocation.all.allocated"]
