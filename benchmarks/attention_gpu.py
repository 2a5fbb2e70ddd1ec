"""Decode, prefill and mixed batches on a GPU, beside FlashAttention-3, vLLM's Triton attention and ejkernel.

python benchmarks/attention_gpu.py [--only REGEX] [--json PATH] [--write]

With --write the cases that were measured take the place of older ones in benchmarks/results. The peers are optional:
flash-attn3-jax and ejkernel are packages, vLLM's ops need no more than their own files.
"""

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Annotated

import typer
from attention_cases import CASES, Case, bytes_read, memory_bound, operations
from attention_measure import Job, measure
from attention_process import measure_all
from attention_results import OURS, Report, as_json, from_json, joined, renewed
from attention_table import PEERS, Source, markdown, print_table, render
from pages import command_of
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PAGE, RUNS = RESULTS / "attention_gpu.md", RESULTS / "attention_gpu.json"


def main(
    only: Annotated[str, typer.Option(help="Measure the cases whose name this regular expression finds.")] = "",
    peers: Annotated[str, typer.Option(help="Peers to measure, of: " + ", ".join(PEERS))] = ",".join(PEERS),
    rounds: Annotated[int, typer.Option(help="Measured calls of each implementation.")] = 20,
    implementation: Annotated[str, typer.Option(help="Which of ours.")] = "mosaic_gpu",
    write: Annotated[bool, typer.Option("--write", help="Put the cases into the table in benchmarks/results.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers here, after each case.")] = None,
    load: Annotated[Path | None, typer.Option(help="Measure nothing: take what --json wrote.")] = None,
    log: Annotated[Path | None, typer.Option(help="File for what the measuring process prints.")] = None,
    minutes: Annotated[float, typer.Option(help="Leave out the cases that aren't done by then.")] = 9.0,
    case_seconds: Annotated[float, typer.Option(help="After so long without a result a case has hung.")] = 120.0,
    profiler: Annotated[str, typer.Option(help="Try these profilers in turn: torch, jax.")] = "torch,jax",
    kernels: Annotated[bool, typer.Option("--kernels", help="Show the time of each kernel of ours.")] = False,
    show_cases: Annotated[bool, typer.Option("--list", help="Show the cases alone.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Check small cases on the CPU; no times.")] = False,
) -> None:
    """Measure, print the table, and leave with 1 if a result of ours is wrong or missing."""
    cases = tuple(case for case in CASES if re.search(only, case.name))
    if show_cases:
        _list(cases)
        return
    command = command_of()
    if load is not None:
        run = json.loads(load.read_text(encoding="utf-8"))
        report, command = from_json(run), run["command"]
    else:
        names = tuple(name for name in PEERS if name in peers.split(","))
        job = Job(cases, names, rounds, implementation, "cuda", tuple(profiler.split(",")))
        if smoke:
            report = _smoke(dataclasses.replace(job, implementation=None, device="cpu"))
        else:
            report = measure_all(
                job,
                log=None if log is None else str(log),
                deadline=time.monotonic() + 60 * minutes,
                case_seconds=case_seconds,
                show=lambda report: _show_progress(report, json_path, command),
            )
        if json_path is not None:
            _dump(report, json_path, command)
    print_table(render(report), report, kernels)
    if write:
        _write(report, command)
    ours = [row.results[OURS] for row in report.rows]
    if not ours or any(not result.right or "WRONG" in result.reason for result in ours):
        raise typer.Exit(1)


def _write(report: Report, command: list[str]) -> None:
    """Put a run's cases in the place of older ones, in the numbers that are kept and in the page made of them."""
    RESULTS.mkdir(exist_ok=True)
    older = json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.exists() else []
    runs = renewed(older, as_json(report, command))
    RUNS.write_text(json.dumps(runs, separators=(",", ":")) + "\n", encoding="utf-8")
    reports = [from_json(run) for run in runs]
    whole = joined(reports)
    order = {case.name: i for i, case in enumerate(CASES)}
    whole.rows.sort(key=lambda row: order[row.case])
    sources = [
        Source(report, sum(of is report for of in whole.runs.values()), run["command"])
        for report, run in zip(reports, runs, strict=True)
    ]
    PAGE.write_text(markdown(render(whole), whole, sources), encoding="utf-8")


def _list(cases: tuple[Case, ...]) -> None:
    table = Table("case", "tokens", "read MB", "GFLOP", "bound by", "should reach", box=SIMPLE)
    for case in cases:
        table.add_row(
            case.name,
            str(case.num_tokens),
            f"{bytes_read(case) / 1e6:.0f}",
            f"{operations(case) / 1e9:.0f}",
            "reads" if memory_bound(case) else "products",
            "; ".join(map(str, case.targets)),
        )
    Console(width=150).print(table)


def _smoke(job: Job) -> Report:
    report = Report()
    for case in job.cases:
        report.rows.append(measure(job, case.tiny(), lambda name: None))
    return report


def _show_progress(report: Report, json_path: Path | None, command: list[str]) -> None:
    row = report.rows[-1]
    times = " ".join("-" if r.microseconds is None else f"{r.microseconds:.1f}" for r in row.results.values())
    print(f"{row.case}: {times} ({row.seconds:.0f} s)", flush=True)
    if json_path is not None:
        _dump(report, json_path, command)


def _dump(report: Report, path: Path, command: list[str]) -> None:
    path.write_text(json.dumps(as_json(report, command), indent=1), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
