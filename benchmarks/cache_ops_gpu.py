"""Cache writes, block copies, gathers and merges on a GPU, beside vLLM's Triton ops and a plain copy of the same bytes.

python benchmarks/cache_ops_gpu.py [--only REGEX] [--json PATH] [--write]
"""

import dataclasses
import datetime
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import torch
import typer
from cache_ops_cases import (
    BLOCK_SIZE,
    HEAD_SIZE,
    NUM_HEADS,
    NUM_KV_HEADS,
    OURS,
    REFERENCE,
    TRITON,
    Case,
    all_cases,
)
from pages import command_of, grid
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxpaged.pallas.mosaic import interpreted

RESULTS = Path(__file__).parent / "results"


def check(case: Case, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """How far each result is from the reference's: the share of elements that differ, or the largest difference."""
    expected = [np.asarray(x) for x in calls[REFERENCE]()]
    errors = {}
    for name, call in calls.items():
        if name in (REFERENCE, "plain copy"):
            continue
        got = [as_numpy(x) for x in call()]
        if case.floats:
            errors[name] = max(difference(a, b) for a, b in zip(got, expected, strict=True))
        else:
            errors[name] = max(share_that_differs(a, b) for a, b in zip(got, expected, strict=True))
    return errors


def as_numpy(x: Any) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        x = jax.dlpack.from_dlpack(x.contiguous())
    return np.asarray(x)


def share_that_differs(a: np.ndarray, b: np.ndarray) -> float:
    """Of the bytes."""
    bytes_of_a, bytes_of_b = (np.frombuffer(x.tobytes(), np.uint8) for x in (a, b))
    return float(np.mean(bytes_of_a != bytes_of_b))


def difference(a: np.ndarray, b: np.ndarray) -> float:
    a, b = (np.nan_to_num(x.astype(np.float32), neginf=-1e9) for x in (a, b))
    return float(np.abs(a - b).max())


@dataclasses.dataclass(frozen=True)
class Row:
    case: str
    implementation: str
    microseconds: float
    terabytes: float
    error: float | None
    launches: int
    target: str


def measure(case: Case, repeats: int) -> list[Row]:
    """Check, then time. A result of ours that is wrong isn't timed; how the peer rounds is its own affair."""
    from gpu_timing import kernel_times

    calls = case.make(case.size)
    errors = check(case, calls)
    wrong = {name for name, error in errors.items() if not error <= case.tolerance and name != TRITON}
    for name in wrong:
        print(f"{case.name}: {name} differs by {errors[name]:.2e}", file=sys.stderr)
    timings = kernel_times({n: c for n, c in calls.items() if n not in wrong}, repeats=repeats)
    rows = [
        Row(case.name, n, t.microseconds, case.moved / t.microseconds / 1e6, errors.get(n), t.launches, case.target)
        for n, t in timings.items()
    ]
    return rows + [Row(case.name, n, float("nan"), float("nan"), errors[n], 0, case.target) for n in wrong]


def smoke() -> None:
    """Check small cases on the CPU, in the interpreter."""
    with interpreted():
        for case in all_cases():
            calls = case.make(next((n for word, n in (("blocks", 16), ("gather", 256)) if word in case.name), 32))
            errors = check(case, calls)
            print(case.name, errors)
            assert all(error <= case.tolerance for error in errors.values()), case.name


def main(
    only: Annotated[str, typer.Option(help="Measure the cases whose name this regular expression finds.")] = "",
    repeats: Annotated[int, typer.Option(help="Measured calls of each implementation.")] = 20,
    write: Annotated[bool, typer.Option("--write", help="Write the table to benchmarks/results.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers here, after each case.")] = None,
    smoke_test: Annotated[bool, typer.Option("--smoke", help="Check small cases on the CPU; no times.")] = False,
) -> None:
    """Check against the reference, measure, print the table; leave with 1 if a result of ours is wrong."""
    if smoke_test:
        smoke()
        return
    ceiling = copy_ceiling(repeats)
    print(f"copy ceiling: {ceiling:.2f} TB/s", flush=True)
    rows: list[Row] = []
    for case in all_cases():
        if re.search(only, case.name):
            measured = measure(case, repeats)
            rows += measured
            print(
                f"{case.name}: " + ", ".join(f"{r.implementation} {r.microseconds:.1f}" for r in measured), flush=True
            )
            if json_path is not None:
                json_path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1), encoding="utf-8")
    headings, cells = table_of(rows, ceiling)
    table = Table(*headings, box=SIMPLE_HEAD)
    for line in cells:
        table.add_row(*line)
    Console(width=180).print(table)
    if write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "cache_ops_gpu.md").write_text(markdown(headings, cells, ceiling), encoding="utf-8")
    if any(row.launches == 0 and row.implementation.startswith(OURS) for row in rows):
        raise typer.Exit(1)


def copy_ceiling(repeats: int) -> float:
    """TB/s, read and written, of a copy of 1 GiB."""
    from gpu_timing import kernel_times

    source = torch.zeros(2**28, device="cuda")
    target = torch.empty_like(source)
    timing = kernel_times({"copy": lambda: target.copy_(source)}, repeats=repeats)["copy"]
    return 2 * source.nbytes / timing.microseconds / 1e6


def table_of(rows: list[Row], ceiling: float) -> tuple[list[str], list[list[str]]]:
    headings = [
        "case",
        "implementation",
        "µs",
        "TB/s",
        "of a copy",
        "kernels",
        "time of Triton / time",
        "differs",
        "target",
    ]
    cells = []
    for row in rows:
        peer = next((r.microseconds for r in rows if r.case == row.case and r.implementation == TRITON), None)
        cells.append(
            [
                row.case,
                row.implementation,
                f"{row.microseconds:.1f}",
                f"{row.terabytes:.2f}",
                f"{100 * row.terabytes / ceiling:.0f}%",
                str(row.launches),
                "" if peer is None else f"{peer / row.microseconds:.2f}",
                "" if row.error is None else f"{row.error:.1e}",
                row.target if row.implementation == OURS else "",
            ]
        )
    return headings, cells


def markdown(headings: list[str], cells: list[list[str]], ceiling: float) -> str:
    lines = [
        "# Cache operations on the GPU",
        "",
        f"- Date: {datetime.date.today().isoformat()}",
        f"- GPU: {torch.cuda.get_device_name()}",
        f"- Versions: Python {sys.version.split()[0]}, jax {jax.__version__}, torch {torch.__version__}",
        f"- Command: `{' '.join(command_of())}`",
        f"- In the same run a copy of 1 GiB: {ceiling:.2f} TB/s, read and written.",
        f"- bfloat16, {NUM_KV_HEADS} kv heads of {HEAD_SIZE}, block size {BLOCK_SIZE}, NHD, unless the case says "
        f"otherwise; merges have {NUM_HEADS} heads. Random slots and blocks.",
        "- µs: time during which kernels of one call ran, by CUPTI; median, the L2 flushed before each call.",
        "- Differs: share of bytes that are not the reference's; of merges the largest difference.",
        "",
        *grid(headings, cells),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
