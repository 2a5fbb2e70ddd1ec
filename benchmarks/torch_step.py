"""A decode step of many layers from PyTorch, eager and as a CUDA graph, beside the same step of Triton kernels and FA3.

    python benchmarks/torch_step.py [--layers N] [--requests N] [--context N] [--block-size N] [--json PATH] [--write]

In each layer keys and values of one new token a request are written to that layer's cache, and the tokens attend to it.
FlashAttention-3 has no binding for PyTorch here: its attention, without the writes, runs in one jitted function of JAX
on the same caches. Operators of vLLM's Triton kernels are measured where they can be imported.
"""

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too

import jax
import torch
import typer
from gpu_timing import Timing, kernel_times
from pages import grid, head
from peers import as_torch, shared
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxpaged.bridge import direct

RESULTS = Path(__file__).parent / "results" / "torch_step.md"
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 8, 128
SCALE = HEAD_SIZE**-0.5
SCORES = (SCALE, True, -1, -1, 0.0)
OURS, TRITON, FA3 = "jaxpaged", "Triton (vLLM's)", "FlashAttention-3's attention"
GRAPH, EAGER = "CUDA graph", "eager"
STEPS = 20
"""Steps that are launched before the host waits for them."""


@dataclasses.dataclass
class Step:
    """A step's inputs, and every layer's cache and output."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    outs: list[torch.Tensor]

    @classmethod
    def new(cls, layers: int, requests: int, context: int, block_size: int) -> "Step":
        torch.manual_seed(0)
        width = context // block_size
        rows = [torch.randn(requests, n, HEAD_SIZE, device="cuda").bfloat16() for n in (NUM_HEADS, *[NUM_KV_HEADS] * 2)]
        table = torch.randperm(requests * width, device="cuda").int().view(requests, width)
        shape = (2, requests * width, block_size, NUM_KV_HEADS, HEAD_SIZE)
        return cls(
            *rows,
            table=table,
            lens=torch.full((requests,), context, dtype=torch.int32, device="cuda"),
            starts=torch.arange(requests + 1, dtype=torch.int32, device="cuda"),
            slots=table[:, -1].long() * block_size + block_size - 1,
            caches=[torch.randn(shape, device="cuda", dtype=torch.bfloat16).unbind(0) for _ in range(layers)],
            outs=[torch.full_like(rows[0], torch.nan) for _ in range(layers)],
        )

    def spoil(self) -> None:
        """Make outputs, and what is to be written, something else."""
        for out, cache in zip(self.outs, self.caches, strict=True):
            out.fill_(torch.nan)
            for x in cache:
                x.flatten(0, 1)[self.slots] = torch.nan


def ours(step: Step) -> list[torch.Tensor]:
    plan = direct.plan_decode(step.query, *step.caches[0], step.table, step.lens, step.starts, 1, False, *SCORES)
    for cache, out in zip(step.caches, step.outs, strict=True):
        direct.reshape_and_cache(step.key, step.value, *cache, step.slots, "auto", None, None)
        direct.decode(step.query, *cache, step.table, *plan, None, None, 1, False, *SCORES, out)
    return step.outs


def triton(step: Step, scale: torch.Tensor, mode: Any, context: int) -> list[torch.Tensor]:
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    for cache, out in zip(step.caches, step.outs, strict=True):
        triton_reshape_and_cache_flash(step.key, step.value, *cache, step.slots, "auto", scale, scale)
        unified_attention(
            q=step.query, k=cache[0], v=cache[1], out=out, cu_seqlens_q=step.starts, max_seqlen_q=1,
            seqused_k=step.lens, max_seqlen_k=context, softmax_scale=SCALE, causal=True, window_size=(-1, -1),
            block_table=step.table, softcap=0.0, q_descale=None, k_descale=None, v_descale=None, alibi_slopes=None,
            sinks=None, kv_quant_mode=mode, k_scale_cache=None, v_scale_cache=None,
        )  # fmt: skip
    return step.outs


def triton_step(step: Step, context: int) -> Callable[[], Any]:
    from vllm.v1.kv_cache_interface import KVQuantMode

    return functools.partial(triton, step, torch.ones((), device="cuda"), KVQuantMode.NONE, context)


def flash_steps(step: Step) -> dict[str, Callable[[], Any]]:
    """By the ways to tile a single query that are worth it."""
    from flash_attn3_jax import flash_mha_with_kvcache

    def attend(causal: bool, query: Any, table: Any, lens: Any, caches: Any) -> Any:
        how = {"cache_seqlens": lens, "page_table": table, "softmax_scale": SCALE, "num_splits": 1}
        how |= {"window_size": (-1, -1), "is_causal": causal}
        return [flash_mha_with_kvcache(query, *cache, **how) for cache in caches]

    arrays = [shared(x) for x in (step.query[:, None], step.table, step.lens)]
    caches = [tuple(shared(x) for x in cache) for cache in step.caches]
    return {
        f"{FA3}{'' if causal else ', tiled as not causal'}": functools.partial(
            jax.jit(functools.partial(attend, causal)), *arrays, caches
        )
        for causal in (True, False)
    }


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay() -> Any:
        graph.replay()
        return results

    return replay


def back_to_back(run: Callable[[], Any]) -> float:
    """Microseconds a step, where the host waits for many together; least of five."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / STEPS * 1e6)
    return min(found)


def all_calls(step: Step, context: int) -> dict[str, Callable[[], Any]]:
    """What there is to measure; each result is checked against the first one."""
    made: dict[str, Callable[[], Any]] = {OURS: functools.partial(ours, step)}
    for name, peer in ((TRITON, lambda: {TRITON: triton_step(step, context)}), (FA3, lambda: flash_steps(step))):
        try:
            made |= peer()
        except Exception as error:  # whatever stands in its way, there is no peer then
            print(f"no {name}: {type(error).__name__}: {error}")
    calls: dict[str, Callable[[], Any]] = {}
    expected: list[torch.Tensor] = []
    for name, run in made.items():
        from_torch = name in (OURS, TRITON)
        ways = {f"{name}, {GRAPH}": captured(run), f"{name}, {EAGER}": run} if from_torch else {name: run}
        for way, call in ways.items():
            if from_torch:
                step.spoil()
            got = [as_torch(x).reshape(step.query.shape).clone() for x in call()]
            torch.cuda.synchronize()
            expected = expected or got
            for x, y in zip(got, expected, strict=True):
                torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-3, msg=lambda m, w=way: f"{w}: {m}")
            calls[way] = call
    return calls


def flash_sum(timings: dict[str, Timing]) -> float:
    """Microseconds of FlashAttention-3's kernels in a step, by its faster way."""
    found = [t.microseconds for name, t in timings.items() if name.startswith(FA3)]
    return min(found, default=float("nan"))


def write_sum(timings: dict[str, Timing]) -> float:
    """Microseconds of the writes of a step of Triton's, which FlashAttention-3's lacks."""
    triton = timings.get(f"{TRITON}, {EAGER}")
    kernels = {} if triton is None else triton.kernels
    found = [microseconds for name, microseconds in kernels.items() if "reshape_and_cache" in name]
    return sum(found) if found else float("nan")


def rows_of(timings: dict[str, Timing], steps: dict[str, float]) -> list[list[str]]:
    flash, writes = flash_sum(timings), write_sum(timings)
    return [
        [name, f"{t.microseconds:.0f}", str(t.launches), f"{steps[name]:.0f}", f"{flash / t.microseconds:.3f}",
         f"{flash / steps[name]:.3f}", f"{(flash + writes) / t.microseconds:.3f}"]
        for name, t in timings.items()
    ]  # fmt: skip


HEADER = ("step", "kernels, µs", "launches", "back to back, µs", "FA3's kernels / kernels", "FA3's kernels / step")
HEADER += ("FA3's kernels and Triton's writes / kernels",)


def page(rows: list[list[str]], sizes: str) -> str:
    lines = [
        *head("A decode step from PyTorch", "python benchmarks/torch_step.py --write"),
        f"{sizes}, {NUM_HEADS} heads on {NUM_KV_HEADS} kv heads of {HEAD_SIZE}, bfloat16. Every layer writes the new "
        "token and attends, on a cache of its own; the plan is made once a step,",
        "by ours alone. Kernels: time in which one of a step's kernels runs, medians of turns. Back to back: a step's "
        f"share of {STEPS} launched in a row. FlashAttention-3",
        "runs from JAX, on the same caches, without writes; in the last column with those of Triton's step. Results",
        "were compared first.",
        "",
        *grid(HEADER, rows),
    ]
    return "\n".join(lines) + "\n"


def main(
    layers: Annotated[int, typer.Option()] = 32,
    requests: Annotated[int, typer.Option()] = 64,
    context: Annotated[int, typer.Option(help="Tokens of each request.")] = 4096,
    block_size: Annotated[int, typer.Option()] = 16,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers here.")] = None,
    write: Annotated[bool, typer.Option(help=f"Write {RESULTS.name}.")] = False,
) -> None:
    """Check, measure and print the table."""
    step = Step.new(layers, requests, context, block_size)
    with torch.inference_mode():
        calls = all_calls(step, context)
        steps = {name: back_to_back(call) for name, call in calls.items()}
        timings = kernel_times(calls, repeats=10)
    rows = rows_of(timings, steps)
    table = Table(*HEADER, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    Console(width=190).print(table)
    sizes = f"{layers} layers, {requests} requests of {context} tokens, block size {block_size}"
    if json_path is not None:
        data = {name: dataclasses.asdict(t) | {"back_to_back": steps[name]} for name, t in timings.items()}
        json_path.write_text(json.dumps({"sizes": sizes, "steps": data}, indent=1), encoding="utf-8")
    if write:
        RESULTS.write_text(page(rows, sizes), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
