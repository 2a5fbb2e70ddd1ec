"""Decode, prefill and mixed batches on a GPU, beside FlashAttention-3, vLLM's Triton attention and ejkernel.

python benchmarks/attention_gpu.py [--only REGEX] [--json PATH] [--write]

The peers are optional: flash-attn3-jax and ejkernel are packages, vLLM's ops need no more than their own files.
"""

import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from attention_cases import CASES, FLASH, READS, TRITON, Case, Target, bytes_read, memory_bound, operations
from attention_measure import OURS, Job, Report, Result, Row, as_json, from_json, measure, measure_all
from rich.box import SIMPLE, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PEERS = (FLASH, TRITON, "ejkernel")


def main(
    only: Annotated[str, typer.Option(help="Measure the cases whose name this regular expression finds.")] = "",
    peers: Annotated[str, typer.Option(help="Peers to measure, of: " + ", ".join(PEERS))] = ",".join(PEERS),
    rounds: Annotated[int, typer.Option(help="Measured calls of each implementation.")] = 20,
    implementation: Annotated[str, typer.Option(help="Which of ours.")] = "mosaic_gpu",
    write: Annotated[bool, typer.Option("--write", help="Write the table to benchmarks/results.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers here, after each case.")] = None,
    load: Annotated[Path | None, typer.Option(help="Measure nothing: show what --json wrote.")] = None,
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
    command = _command()
    if load is not None:
        data = json.loads(load.read_text(encoding="utf-8"))
        report, command = from_json(data), data["command"]
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
    names = tuple(name for name in PEERS if any(name in row.results for row in report.rows))
    table = _table(report, names)
    _print(table, report, kernels)
    if write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "attention_gpu.md").write_text(_markdown(table, report, command), encoding="utf-8")
    ours = [row.results[OURS] for row in report.rows]
    if not ours or any(not result.right or "WRONG" in result.reason for result in ours):
        raise typer.Exit(1)


def _command() -> list[str]:
    """How this program was called, without the places of files."""
    arguments = list(sys.argv[1:])
    for option in ("--json", "--log"):
        while option in arguments:
            place = arguments.index(option)
            del arguments[place : place + 2]
    return ["python", "benchmarks/attention_gpu.py", *arguments]


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


def reached(target: Target, case: Case, rows: dict[str, Row], report: Report) -> bool | None:
    """Whether ours reaches a target; None where that was not measured."""
    ours = rows[case.name].results[OURS]
    if ours.microseconds is None or "WRONG" in ours.reason:
        return None
    if target.against == READS:
        if not report.ceilings:
            return None
        return bytes_read(case) / ours.microseconds / 1e6 >= target.ratio * report.ceilings.read
    if target.against in PEERS:
        other = rows[case.name].results.get(target.against, Result())
    else:
        other = rows[target.against].results[OURS] if target.against in rows else Result()
    if other.microseconds is None or "WRONG" in other.reason:
        return None
    return other.microseconds / ours.microseconds >= target.ratio


SHORT = {FLASH: "FA3"}


def _short(target: Target) -> str:
    """A target in few characters."""
    if target.against == READS:
        return f">={100 * target.ratio:.0f}% reads"
    if target.against in PEERS:
        return f">={target.ratio:.2f}x {SHORT.get(target.against, target.against)}"
    return f"<={1 / target.ratio:.2f}x plain" if target.ratio < 1 else f">={target.ratio:.2f}x bf16"


@dataclasses.dataclass(frozen=True)
class Rendered:
    """The table's cells as text, and notes on cells that need one."""

    headings: list[str]
    cells: list[list[str]]
    notes: list[str]


def _table(report: Report, names: tuple[str, ...]) -> Rendered:
    rows = {row.case: row for row in report.rows}
    by_name = {case.name: case for case in CASES}
    cells, notes = [], list(report.notes)
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        case = by_name[row.case]
        ours = row.results[OURS]
        peers = [row.results.get(name, Result()) for name in names]
        answers = [reached(target, case, rows, report) for target in case.targets]
        cells.append(
            [
                case.name,
                _time_text(ours),
                _rate(case, ours.microseconds, report),
                "-" if ours.launches is None else str(ours.launches),
                *(_peer_text(peer, ours) for peer in peers),
                ", ".join(map(_short, case.targets)),
                ", ".join({True: "yes", False: "no", None: "-"}[answer] for answer in answers),
                f"{_error_text(ours)} {_error_text(row.results.get(FLASH, Result()))}",
            ]
        )
        for name, result in row.results.items():
            if result.reason:
                reasons.setdefault(f"{name}: {result.reason}", []).append(row.case)
    for reason, where in reasons.items():
        few = ", ".join(where) if len(where) <= 4 else f"{', '.join(where[:3])} and {len(where) - 3} more"
        notes.append(f"{reason} [{few}]")
    headings = ["case", "ours µs", "rate", "kernels", *(f"{SHORT.get(name, name)} µs" for name in names)]
    return Rendered([*headings, "should reach", "reached", "error, FA3's"], cells, notes)


def _time_text(result: Result) -> str:
    wrong = " WRONG" if "WRONG" in result.reason else ""
    return f"{'-' if result.microseconds is None else f'{result.microseconds:.1f}'}{wrong}"


def _peer_text(peer: Result, ours: Result) -> str:
    """A peer's time, how many times ours it is, and the variant that was the fastest."""
    text = _time_text(peer)
    if peer.microseconds is not None and ours.microseconds is not None:
        text += f" {peer.microseconds / ours.microseconds:.3f}x"
    return f"{text} {peer.variant}" if peer.microseconds is not None and peer.variant else text


def _error_text(result: Result) -> str:
    return "-" if result.error is None else f"{1e3 * result.error:.2f}e-3"


def _rate(case: Case, microseconds: float | None, report: Report) -> str:
    if microseconds is None:
        return "-"
    if not memory_bound(case):
        return f"{operations(case) / microseconds / 1e6:.0f} TF/s"
    rate = bytes_read(case) / microseconds / 1e6
    share = f" {100 * rate / report.ceilings.read:.1f}%" if report.ceilings else ""
    return f"{rate:.2f} TB/s{share}"


def _ceilings_text(report: Report) -> str:
    if not report.ceilings:
        return "ceilings not measured"
    c = report.ceilings
    return (
        f"reads {c.read:.2f} TB/s ({c.reader}), copy {c.copy:.2f} TB/s (read and written), "
        f"bfloat16 product {c.matmul:.0f} TFLOP/s"
    )


def _print(rendered: Rendered, report: Report, kernels: bool) -> None:
    console = Console(width=220, highlight=False)
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in rendered.headings:
        table.add_column(heading, justify="left" if heading in ("case", "should reach") else "right", no_wrap=True)
    for cells in rendered.cells:
        table.add_row(*cells)
    if kernels:
        for row in report.rows:
            for kernel, microseconds in row.results[OURS].kernels.items():
                print(f"{row.case}: {microseconds:8.1f} us {kernel[:100]}")
    for note in rendered.notes:
        print(f"- {note}")
    print(", ".join(f"{name} {version}" for name, version in report.machine.items()))
    print(_ceilings_text(report))
    console.print(table)


def _markdown(rendered: Rendered, report: Report, command: list[str]) -> str:
    gpu = f"{report.machine.get('GPU', 'none')}, driver {report.machine.get('driver', 'unknown')}"
    versions = ", ".join(f"{k} {v}" for k, v in report.machine.items() if k not in ("GPU", "driver", "date"))
    lines = [
        "# Attention on the GPU",
        "",
        f"- Date: {report.machine.get('date', 'unknown')}",
        f"- GPU: {gpu}",
        f"- Versions: {versions}",
        f"- Command: `{' '.join(command)}`",
        f"- In the same run: {_ceilings_text(report)}. Percentages are of the reads.",
        "- bfloat16, 32 query heads, 8 kv heads of 128, block size 16, causal, unless the case says otherwise; blocks "
        "in random order.",
        "- µs: time during which kernels of one call ran, by CUPTI; median of the rounds, the implementations in "
        "turns, the L2 flushed before each call. For peers the fastest variant that was right counts; then come their "
        "time over ours and that variant.",
        "- Rate: the keys and values that must be read once, or the products of the pairs that are attended to, over "
        "the time.",
        "- Error: of 64 rows against float64, norm of the difference over norm of the result. In ours the slots that "
        "hold no token were NaN, and the block table garbage past each length.",
        "",
        "| " + " | ".join(rendered.headings) + " |",
        "|" + " --- |" * len(rendered.headings),
        *("| " + " | ".join(cells) + " |" for cells in rendered.cells),
        "",
        *(f"- {note}" for note in rendered.notes),
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    typer.run(main)
