"""Host time of one call from PyTorch, beside its own operators and Triton's: least of five runs of 1,000 calls.

Run on a machine with a Hopper GPU: `python benchmarks/torch_calls.py`. The Triton attention is measured where vLLM's,
or a copy of its operators, can be imported.
"""

import ctypes
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pages import grid, head
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxpaged.bridge import direct, launch, native, torch_ops

try:
    import triton
    import triton.language as tl
except ImportError:
    nothing = None
else:

    @triton.jit
    def nothing(a, b, c, d, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # tl must be a global of its module
        pass


assert torch_ops.set_fallback  # registers the operators
ops = torch.ops.jaxpaged
RESULTS = Path(__file__).parent / "results" / "torch_calls.md"

NUM_REQS, CONTEXT, BLOCK_SIZE = 16, 64, 16  # few: the GPU is to be done before the host
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 8, 128
RUNS, CALLS, WARM_UPS = 5, 1000, 20
SCORES = (HEAD_SIZE**-0.5, True, -1, -1, 0.0)
ADD, EMPTY_TRITON = "torch add_", "Triton, 4 pointers, no work"
WRITE, DECODE = "jaxpaged.reshape_and_cache", "jaxpaged.decode, out given"
DIRECT_WRITE, DIRECT_DECODE = (f"{name} without the dispatcher" for name in ("reshape_and_cache", "decode, out given"))
NATIVE = ", launched natively"
ELSEWHERE = ", on other memory each time"
BOUNDS = {
    WRITE + NATIVE: (ADD, 1.1),
    DECODE + NATIVE: (EMPTY_TRITON, 1.0),
    DIRECT_WRITE: (ADD, 1.1),
    DIRECT_DECODE: (EMPTY_TRITON, 1.0),
    DIRECT_WRITE + NATIVE: (ADD, 1.1),
    DIRECT_DECODE + NATIVE: (EMPTY_TRITON, 1.0),
}
"""What is to be reached: at most so many times another call's time."""


@dataclasses.dataclass(frozen=True)
class Row:
    call: str
    microseconds: float
    runs: list[float]


def host_time(call: Callable[[], Any]) -> list[float]:
    """Microseconds a call in each run, without waiting for the GPU in between."""
    for _ in range(WARM_UPS):
        call()
    runs = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        runs.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return runs


@dataclasses.dataclass
class Inputs:
    """A step of decode, small enough that the GPU keeps up with the host."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    out: torch.Tensor

    @classmethod
    def new(cls, num_reqs: int, context: int) -> "Inputs":
        width = context // BLOCK_SIZE
        rows = [torch.randn(num_reqs, n, HEAD_SIZE, device="cuda").bfloat16() for n in (NUM_HEADS, *[NUM_KV_HEADS] * 2)]
        shape = (2, num_reqs * width, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
        blocks = torch.randperm(num_reqs * width, device="cuda")
        return cls(
            *rows,
            cache=torch.randn(shape, device="cuda").bfloat16(),
            slots=torch.arange(num_reqs, device="cuda") * context,
            table=blocks.int().view(num_reqs, width),
            lens=torch.full((num_reqs,), context, dtype=torch.int32, device="cuda"),
            starts=torch.arange(num_reqs + 1, dtype=torch.int32, device="cuda"),
            out=torch.empty_like(rows[0]),
        )


def our_calls(x: Inputs) -> dict[str, Callable[[], Any]]:
    key_cache, value_cache = x.cache.unbind(0)
    plan = ops.plan_decode(x.query, key_cache, value_cache, x.table, x.lens, x.starts, 1, False, *SCORES)
    lse = torch.empty(x.query.shape[:2], device="cuda")
    return {
        WRITE: lambda: ops.reshape_and_cache(x.key, x.value, key_cache, value_cache, x.slots, "auto", None, None),
        "jaxpaged.reshape_and_cache, views made": lambda: ops.reshape_and_cache(
            x.key, x.value, *x.cache.unbind(0), x.slots, "auto", None, None
        ),
        DECODE: lambda: ops.decode(
            x.query, key_cache, value_cache, x.table, *plan, None, None, 1, False, *SCORES, x.out
        ),
        DIRECT_WRITE: lambda: direct.reshape_and_cache(
            x.key, x.value, key_cache, value_cache, x.slots, "auto", None, None
        ),
        DIRECT_DECODE: lambda: direct.decode(
            x.query, key_cache, value_cache, x.table, *plan, None, None, 1, False, *SCORES, x.out
        ),
        "jaxpaged.decode, lse too": lambda: ops.decode(
            x.query, key_cache, value_cache, x.table, *plan, None, None, 1, False, *SCORES, x.out, None, None, lse
        ),
        "jaxpaged.decode, out made": lambda: ops.decode(
            x.query, key_cache, value_cache, x.table, *plan, None, None, 1, False, *SCORES, torch.empty_like(x.query)
        ),
        "jaxpaged.plan_decode, once a step": lambda: ops.plan_decode(
            x.query, key_cache, value_cache, x.table, x.lens, x.starts, 1, False, *SCORES
        ),
        "plan_decode without the dispatcher": lambda: direct.plan_decode(
            x.query, key_cache, value_cache, x.table, x.lens, x.starts, 1, False, *SCORES
        ),
    }


def calls_elsewhere(x: Inputs) -> dict[str, Callable[[], Any]]:
    """Calls whose kernels all get some memory that they never had before, so that no launch is one of the driver's."""
    key_cache, value_cache = x.cache.unbind(0)
    plan = ops.plan_decode(x.query, key_cache, value_cache, x.table, x.lens, x.starts, 1, False, *SCORES)
    slots, table, out = (new_memory(tensor) for tensor in (x.slots, x.table, x.out))
    return {
        WRITE: lambda: ops.reshape_and_cache(x.key, x.value, key_cache, value_cache, slots(), "auto", None, None),
        DECODE: lambda: ops.decode(
            x.query, key_cache, value_cache, table(), *plan, None, None, 1, False, *SCORES, out()
        ),
    }


def new_memory(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Tells a copy of a tensor, another one in each call that is measured."""
    copies = x.expand(WARM_UPS + RUNS * CALLS, *x.shape).contiguous()
    return itertools.cycle(copies.unbind(0)).__next__


def launches_alone() -> dict[str, Callable[[], Any]]:
    """The functions that Mosaic compiled, without anything of ours around them."""
    found: dict[str, Callable[[], Any]] = {}
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    for program in launch._programs.values():
        for i, (kernel, call) in enumerate(zip(program.kernels, program.calls.calls, strict=True)):
            memory = [torch.zeros(program.calls.sizes[b], dtype=torch.uint8, device="cuda") for b in call.buffers]
            addresses = b"".join(x.data_ptr().to_bytes(8, "little") for x in memory)
            name = f"launch function alone, {len(call.buffers)} buffers, kernel {i + 1} of {len(program.kernels)}"
            run = kernel.launch
            found.setdefault(name, lambda run=run, memory=memory, addresses=addresses: run(stream, addresses))
    return found


def torch_calls() -> dict[str, Callable[[], Any]]:
    x = torch.zeros(1024, device="cuda")
    return {
        ADD: lambda: x.add_(1.0),
        "torch.empty": lambda: torch.empty(1024, device="cuda"),
        "torch.cuda.current_stream": torch.cuda.current_stream,
        "raw stream": lambda: torch._C._cuda_getCurrentRawStream(0),
    }


def triton_calls(x: Inputs) -> dict[str, Callable[[], Any]]:
    if nothing is None:
        return {}
    calls = {EMPTY_TRITON: lambda: nothing[(64,)](x.query, x.key, x.cache, x.out, SIZE=64)}
    return calls | triton_peers(x)


def triton_peers(x: Inputs) -> dict[str, Callable[[], Any]]:
    try:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.v1.kv_cache_interface import KVQuantMode
    except Exception as error:  # whatever stands in its way, there is no peer then
        print(f"no Triton peer: {type(error).__name__}: {error}")
        return {}
    key_cache, value_cache = x.cache.unbind(0)
    scale = torch.ones((), device="cuda")
    arguments: dict[str, Any] = {
        "q": x.query, "k": key_cache, "v": value_cache, "out": x.out, "cu_seqlens_q": x.starts, "max_seqlen_q": 1,
        "seqused_k": x.lens, "max_seqlen_k": CONTEXT, "softmax_scale": SCORES[0], "causal": True,
        "window_size": (-1, -1), "block_table": x.table, "softcap": 0.0, "q_descale": None, "k_descale": None,
        "v_descale": None, "alibi_slopes": None, "sinks": None, "kv_quant_mode": KVQuantMode.NONE,
        "k_scale_cache": None, "v_scale_cache": None,
    }  # fmt: skip
    return {
        "Triton unified attention": lambda: unified_attention(**arguments),
        "Triton reshape_and_cache_flash": lambda: triton_reshape_and_cache_flash(
            x.key, x.value, key_cache, value_cache, x.slots, "auto", scale, scale
        ),
    }


def measure(calls: dict[str, Callable[[], Any]]) -> list[Row]:
    rows = []
    for name, call in calls.items():
        try:
            runs = host_time(call)
        except Exception as error:  # a peer whose interface has changed
            print(f"{name}: {type(error).__name__}: {error}")
            continue
        rows.append(Row(name, min(runs), runs))
    return rows


HEADER = ("call", "µs, least", "µs, most", "x add_", "to be")


def cells(rows: list[Row]) -> list[list[str]]:
    times = {row.call: row.microseconds for row in rows}
    found = []
    for row in rows:
        bound = ""
        if row.call in BOUNDS and BOUNDS[row.call][0] in times:
            other, factor = BOUNDS[row.call]
            bound = f"<= {factor * times[other]:.1f} µs, {factor} x {other}"
        ratio = f"{row.microseconds / times[ADD]:.2f}" if ADD in times else ""
        found.append([row.call, f"{row.microseconds:.1f}", f"{max(row.runs):.1f}", ratio, bound])
    return found


def page(rows: list[Row]) -> str:
    lines = [
        *head("Host time of calls from PyTorch", "python benchmarks/torch_calls.py --write"),
        f"The least and the most of {RUNS} runs of {CALLS} calls each, without waiting for the GPU in between. An "
        f"attention call is one launch: {NUM_REQS}",
        f"requests of {CONTEXT} tokens, {NUM_HEADS} heads on {NUM_KV_HEADS} kv heads of {HEAD_SIZE}, bfloat16.",
        "Where nothing else is said, calls are on the same memory, as an engine's are: those launched natively then "
        "skip Mosaic's launch function.",
        "",
        *grid(HEADER, cells(rows)),
    ]
    return "\n".join(lines) + "\n"


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers here.")] = None,
    write: Annotated[bool, typer.Option("--write", help=f"Write {RESULTS.name}.")] = False,
) -> None:
    """Measure and print the table."""
    x = Inputs.new(NUM_REQS, CONTEXT)
    with torch.inference_mode():
        rows = measure(torch_calls() | triton_calls(x) | our_calls(x))
        rows += measure(launches_alone())
        native.launch_natively()
        calls = {name: call for name, call in our_calls(x).items() if "reshape" in name or "decode, " in name}
        natively = {name + NATIVE: call for name, call in calls.items() if "plan" not in name}
        natively |= {name + NATIVE + ELSEWHERE: call for name, call in calls_elsewhere(x).items()}
        rows += measure(natively)
    table = Table(*HEADER, box=SIMPLE_HEAD)
    for row in cells(rows):
        table.add_row(*row)
    Console(width=140).print(table)
    if json_path is not None:
        json_path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1), encoding="utf-8")
    if write:
        RESULTS.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
