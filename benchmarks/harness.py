"""Measure implementations side by side in one run, after checking each against the first, and write the table down."""

import dataclasses
import datetime
import gc
import importlib.metadata
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pages import command_of, grid
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation's figures for one case.

    Attributes:
      milliseconds: median over the rounds of the least time of each round.
      spread: the largest of the rounds over the smallest.
      peak_bytes: most memory beyond what was held before the call, sampled while it ran.
      ratio: the first implementation's time over this one's.
      error: largest difference from the first implementation's result.
    """

    case: str
    implementation: str
    milliseconds: float
    spread: float
    peak_bytes: int
    ratio: float
    error: float


def compare(
    case: str, calls: Mapping[str, Callable[[], Any]], *, tolerance: float, rounds: int = 9, repeats: int = 3
) -> list[Row]:
    """Check and time `calls`, in turns, so that what else the machine does meets all of them alike.

    Args:
      calls: by name, functions that return a finished array; the first is the peer that ratios refer to.
      tolerance: largest difference allowed from the first one's result.

    Raises:
      AssertionError: a result is off; nothing is timed then.
    """
    results = {name: _float32(call()) for name, call in calls.items()}
    first = next(iter(results.values()))
    errors = {name: float(np.abs(result - first).max()) for name, result in results.items()}
    for name, error in errors.items():
        if not error <= tolerance:
            raise AssertionError(f"{case}: {name} is off by {error:.2e}, more than {tolerance:.2e}; not timed")
    del results, first
    peaks = {name: _peak_memory(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(min(_seconds(call) for _ in range(repeats)))
    medians = {name: statistics.median(t) * 1e3 for name, t in times.items()}
    peer = next(iter(medians.values()))
    return [
        Row(case, name, medians[name], max(t) / min(t), peaks[name], peer / medians[name], errors[name])
        for name, t in times.items()
    ]


def _float32(x: Any) -> np.ndarray:
    """A finished array of any framework as NumPy float32, which has no bfloat16 of its own."""
    return np.asarray(x.float() if hasattr(x, "float") else x.astype("float32"))


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _peak_memory(call: Callable[[], Any]) -> int:
    """Growth of the process's memory while a call runs, its result included."""
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    peak, done = before, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.0005)

    sampler = threading.Thread(target=sample)
    sampler.start()
    call()
    done.set()
    sampler.join()
    return peak - before


def versions(*packages: str) -> str:
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)


def report(title: str, rows: list[Row], *, packages: tuple[str, ...], notes: list[str], file: str | None) -> None:
    """Print the rows; with `file` write them to `results/` as Markdown, with date, machine, versions and command."""
    table = Table(title=title)
    headings = ("case", "implementation", "ms", "max/min", "extra peak MB", "speed against the first", "difference")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("case", "implementation") else "right")
    cells = [
        (
            row.case,
            row.implementation,
            f"{row.milliseconds:.1f}",
            f"{row.spread:.2f}",
            f"{row.peak_bytes / 1e6:.0f}",
            f"{row.ratio:.2f}",
            f"{row.error:.1e}",
        )
        for row in rows
    ]
    for cell in cells:
        table.add_row(*cell)
    Console().print(table)
    if file is None:
        return
    lines = [
        f"# {title}",
        "",
        f"- Date: {datetime.date.today().isoformat()}",
        f"- Machine: {_processor()}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB",
        f"- Versions: Python {platform.python_version()}, {versions(*packages)}",
        f"- Command: `{' '.join(command_of())}`",
        *(f"- {note}" for note in notes),
        "",
        *grid(headings, cells),
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
