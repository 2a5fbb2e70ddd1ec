"""The kernels under NVIDIA's compute-sanitizer, beside planted faults that it must report.

python benchmarks/sanitize.py [--write] [--logs DIR]

Each run is a process of its own, of `sanitize_suite.py`.
"""

import dataclasses
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import jax
import typer
from pages import command_of, grid
from rich.console import Console
from rich.table import Table
from sanitize_suite import DONE, FAR, SUITE, TORCH_SUITE

PROGRAM = Path(__file__).with_name("sanitize_suite.py")
RESULTS = Path(__file__).parent / "results" / "sanitizer.md"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run under a tool.

    Attributes:
      reports: whether the tool must report something (True), nothing (False), or may do either (None).
    """

    tool: str
    arguments: tuple[str, ...]
    reports: bool | None
    what: str


FIRST_PORT, PORTS = 49152, 16
"""Of the tools: runs side by side must not share any. A run takes up to 10."""
PARTS = 4
"""Processes that the suite is divided among: under a tool a launch takes seconds."""
RUNS = [
    Run("memcheck", ("plant", "far-write"), True, f"planted: a write {FAR:,} rows past a buffer"),
    Run("memcheck", ("plant", "near-write"), None, "planted: a write 1 row past a buffer"),
    Run("memcheck", ("plant", "good-write"), False, "the same write, to the last row"),
    Run("racecheck", ("plant", "race"), True, "planted: shared memory read without a wait"),
    Run("racecheck", ("plant", "awaited"), False, "the same read, after a wait at a barrier"),
    *(
        Run(tool, ("run", "--part", str(part), "--parts", str(PARTS)), False, f"the suite, part {part + 1} of {PARTS}")
        for tool in ("memcheck", "racecheck")
        for part in range(PARTS)
    ),
]

TOOL_OPTIONS = {
    # Errors that CUDA calls return, and that a program may expect, are not what is looked for.
    "memcheck": ("--report-api-errors", "no"),
    # Its default report, an analysis of the hazards, says nothing of the planted race.
    "racecheck": ("--racecheck-report", "all", "--print-limit", "20"),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
      reported: errors, and warnings of racecheck; None where the tool gave no summary.
      finished: whether the program got to its end.
    """

    run: Run
    reported: int | None
    finished: bool
    seconds: float
    log: Path

    @property
    def ok(self) -> bool:
        if self.reported is None:
            return False
        if self.run.reports:
            return self.reported > 0
        return self.run.reports is None or (self.reported == 0 and self.finished)


def reported(output: str) -> int | None:
    """Errors, and warnings of racecheck, by all of a tool's summaries; None when there is none.

    Hazards that racecheck displays may be of severity INFO, and benign then: they don't count.
    """
    hazards = r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)"
    found = re.findall(rf"ERROR SUMMARY: (\d+) error|{hazards}", output)
    return sum(int(count) for counts in found for count in counts if count) if found else None


def find_sanitizer() -> str:
    """The tool's path; SystemExit where there is none."""
    known = shutil.which("compute-sanitizer")
    installed = (p for root in ("/usr/local", "/opt/nvidia", "/opt") for p in Path(root).glob("cuda*"))
    for path in [known, *(str(p) for folder in installed for p in folder.rglob("compute-sanitizer"))]:
        if path and Path(path).is_file() and os.access(path, os.X_OK):
            return path
    raise SystemExit("compute-sanitizer: not found on the PATH or under /usr/local/cuda*; give --sanitizer")


def execute(run: Run, sanitizer: str, logs: Path, timeout: float, port: int) -> Outcome:
    """Run it in a process of its own, with its output in a file; the tool takes ports from `port` on."""
    log = logs / f"{run.tool}-{'-'.join(run.arguments)}.txt"
    tool = [sanitizer, "--tool", run.tool, *TOOL_OPTIONS[run.tool], "--port", str(port)]
    # Compilers that XLA starts are no targets: they would wait for ports.
    command = [*tool, "--target-processes", "application-only", sys.executable, str(PROGRAM), *run.arguments]
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and the program under it
            process.wait()
    output = log.read_text(encoding="utf-8", errors="replace")
    return Outcome(run, reported(output), DONE in output, time.perf_counter() - start, log)


def cells(outcome: Outcome) -> tuple[str, ...]:
    wanted = {True: "a report", False: "none", None: "either"}[outcome.run.reports]
    found = "no summary" if outcome.reported is None else str(outcome.reported)
    ended = "" if outcome.finished or outcome.run.reports else ", did not finish"
    verdict = "as wanted" if outcome.ok else "NOT as wanted"
    return (outcome.run.what, outcome.run.tool, wanted, found + ended, f"{outcome.seconds:.0f}", verdict)


HEADINGS = ("run", "tool", "wanted", "reported", "s", "verdict")


def main(
    write: Annotated[bool, typer.Option(help="Write the table to benchmarks/results/sanitizer.md.")] = False,
    logs: Annotated[Path | None, typer.Option(help="Folder for the tools' output.")] = None,
    sanitizer: Annotated[str | None, typer.Option(help="Path of compute-sanitizer.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for a run.")] = 170,
    only: Annotated[str, typer.Option(help="A regular expression of tools, arguments and descriptions.")] = "",
    at_once: Annotated[int, typer.Option(help="Runs side by side.")] = 1,
) -> None:
    """Run the suite and the planted faults under both tools; exit 1 unless all is as it should be."""
    path = sanitizer or find_sanitizer()
    folder = logs or Path(tempfile.mkdtemp(prefix="sanitizer-"))
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [one for one in RUNS if re.search(only, f"{one.tool} {' '.join(one.arguments)} {one.what}")]
    outcomes = []
    with ThreadPoolExecutor(at_once) as executor:
        ports = range(FIRST_PORT, 2**16, PORTS)
        for outcome in executor.map(lambda one, port: execute(one, path, folder, timeout, port), chosen, ports):
            outcomes.append(outcome)
            print(*cells(outcome), sep=" | ", flush=True)
    table = Table(*HEADINGS, title=f"compute-sanitizer, logs in {folder}")
    for outcome in outcomes:
        table.add_row(*cells(outcome))
    Console(width=160).print(table)
    for outcome in outcomes:
        if not outcome.ok:
            text = outcome.log.read_text(encoding="utf-8", errors="replace")
            print(f"--- {outcome.log.name}\n{text[:1500]}\n...\n{text[-2500:]}")
    if write:
        RESULTS.write_text(document(outcomes, path), encoding="utf-8")
    raise typer.Exit(0 if outcomes and all(outcome.ok for outcome in outcomes) else 1)


def document(outcomes: list[Outcome], sanitizer: str) -> str:
    lines = [
        "# The kernels under compute-sanitizer",
        "",
        f"- Date: {datetime.date.today().isoformat()}",
        f"- Machine: {_first_line('nvidia-smi', '--query-gpu=name,driver_version', '--format=csv,noheader')}",
        f"- Versions: jax {jax.__version__}, {_first_line(sanitizer, '--version', last=True)}",
        f"- Command: `{' '.join(command_of())}`",
        f"- The suite: {len(SUITE | TORCH_SUITE)} calls: {'; '.join(SUITE | TORCH_SUITE)}.",
        "- Whether memcheck sees a write near a buffer depends on what else lies there; guard bands show those",
        "  (`tests/pallas/test_bounds.py`).",
        "",
        *grid(HEADINGS, map(cells, outcomes)),
    ]
    return "\n".join(lines) + "\n"


def _first_line(*command: str, last: bool = False) -> str:
    """The first, or last, line that a program prints; how it failed when it does."""
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = [line.strip() for line in lines if line.strip()]
    return lines[-1 if last else 0] if lines else "unknown"


if __name__ == "__main__":
    typer.run(main)
