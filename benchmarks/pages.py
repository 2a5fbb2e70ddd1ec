"""What pages of results have in common: what a measurement ran on, and tables in Markdown."""

import datetime
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def machine() -> dict[str, str]:
    """The date, the GPU, its driver, and the versions of what runs on it."""
    import torch

    names = {"date": datetime.date.today().isoformat(), "Python": platform.python_version()}
    for package in ("jax", "torch", "triton", "flash-attn3-jax", "ejkernel", "numpy"):
        try:
            names[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            names[package] = "none"
    if torch.cuda.is_available():
        names["GPU"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            names["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            names["driver"] = "unknown"
    return names


def command_of() -> list[str]:
    """How this program of `benchmarks` was called, without the places that files were asked for at."""
    arguments = list(sys.argv[1:])
    for option in ("--json", "--log", "--logs"):
        while option in arguments:
            place = arguments.index(option)
            del arguments[place : place + 2]
    return ["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]


def gpu_of(machine: Mapping[str, str]) -> str:
    return f"{machine.get('GPU', 'none')}, driver {machine.get('driver', 'unknown')}"


def versions_of(machine: Mapping[str, str]) -> str:
    return ", ".join(f"{k} {v}" for k, v in machine.items() if k not in ("GPU", "driver", "date"))


def head(title: str, command: str) -> list[str]:
    """The first lines of a page of results."""
    found = machine()
    about = f"{found['date']}, {gpu_of(found)}; {versions_of(found)}."
    return [f"# {title}", "", about, "", f"    {command}", ""]


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}", *(f"| {' | '.join(row)} |" for row in rows)]
