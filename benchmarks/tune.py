"""Finds the kernels' tiles for this GPU: class by class of shapes, what is right first, and then what is fastest.

python benchmarks/tune.py [--only REGEX] [--minutes N] [--write jaxpaged/pallas/tuned.json]

It can be run in parts: a file that is there is the start, and what is found is merged into it after each class.
"""

import dataclasses
import os
import re
import time
import traceback
from pathlib import Path
from typing import Annotated

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs the memory, too

import jax
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from tune_classes import CLASSES, Kernel, Tiles, TunedClass
from tune_search import Bench, Found, search

from jaxpaged.implementations import SUITABLE_GPUS
from jaxpaged.pallas import tuned_file
from jaxpaged.pallas.tuning import Gpu, Rule, ShapeClass

SMOKE = {"decode": {"fewest_tiles": (1, 4)}, "prefill": {"l2_bytes": (1 << 20, 24 << 20)}}


def main(
    only: Annotated[str, typer.Option(help="Tune the classes whose name this regular expression finds.")] = "",
    minutes: Annotated[float, typer.Option(help="Begin nothing after so long.")] = 8.0,
    write: Annotated[Path | None, typer.Option(help="File to start from, and to merge what is found into.")] = None,
    show_classes: Annotated[bool, typer.Option("--list", help="Show the classes alone.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Interpret small cases on the CPU; times mean nothing.")
    ] = False,
) -> None:
    """Tune, print the table, and leave with 1 if a class could not be tuned."""
    deadline = time.monotonic() + 60 * minutes
    classes = [tuned for tuned in CLASSES if re.search(only, tuned.name)]
    if show_classes:
        _list(classes)
        return
    table = tuned_file.load(write) if write is not None and write.exists() else tuned_file.packaged()
    gpu = dataclasses.replace(table.gpu(None), kind="interpreter", num_sms=2) if smoke else _this_gpu(table)
    if smoke:
        firsts = {tuned.kernel: tuned for tuned in reversed(classes)}
        classes = [firsts[kernel].tiny(SMOKE[kernel]) for kernel in SMOKE if kernel in firsts]
    all_found: list[Found] = []
    left: list[str] = []
    for tuned in classes:
        if time.monotonic() >= deadline:
            left.append(f"{tuned.name}: not begun")
            continue
        try:
            bench = Bench(tuned, gpu, "cpu" if smoke else "cuda")
            found = search(tuned, gpu, bench.times, deadline, lambda line: print(line, flush=True))
        except Exception as error:
            traceback.print_exc()
            left.append(f"{tuned.name}: {type(error).__name__}: {error}")
            continue
        all_found.append(found)
        if found.best != found.before:
            table = merged(table, gpu, tuned.kernel, tuned.when, found.best)
        if write is not None:
            write.write_text(tuned_file.text_of(table), encoding="utf-8")
    _show(gpu, all_found, left)
    if not all_found or any("not begun" not in line for line in left):
        raise typer.Exit(1)


def merged(table: tuned_file.Table, gpu: Gpu, kernel: Kernel, when: ShapeClass, tiles: Tiles) -> tuned_file.Table:
    """A table in which a class has these tiles on a GPU, before all rules that it had."""
    known = table.gpus.get(gpu.kind, gpu)
    others = tuple(rule for rule in getattr(known, kernel) if rule.when != when)
    changed = dataclasses.replace(known, **{kernel: (Rule(when, tiles), *others)})
    like = {kind: other for kind, other in table.like.items() if kind != gpu.kind}
    table = tuned_file.Table(table.default, {**table.gpus, gpu.kind: changed}, like)
    return tuned_file.parse(tuned_file.text_of(table))  # GPUs that are like this one have its new rules then


def _this_gpu(table: tuned_file.Table) -> Gpu:
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) not in SUITABLE_GPUS:
        raise typer.BadParameter(f"needs a GPU of compute capability {' or '.join(SUITABLE_GPUS)}, got {device}")
    return table.gpu(device.device_kind, getattr(device, "core_count", None))


def _list(classes: list[TunedClass]) -> None:
    table = Table("class", "when", "cases", box=SIMPLE)
    for tuned in classes:
        table.add_row(tuned.name, _changes(tuned.when, ShapeClass()), "; ".join(case.name for case in tuned.cases))
    Console(width=150).print(table)


def _changes(new: object, old: object) -> str:
    """The attributes of a dataclass that are not as in another."""
    names = [field.name for field in dataclasses.fields(new)]  # type: ignore[arg-type]
    return ", ".join(f"{n} {getattr(new, n)}" for n in names if getattr(new, n) != getattr(old, n))


def _show(gpu: Gpu, all_found: list[Found], left: list[str]) -> None:
    table = Table("class", "tried", "before, µs", "best, µs", "gain", "changed", box=SIMPLE)
    for found in all_found:
        before, best = (" ".join(f"{us:.1f}" for us in times) for times in zip(*found.microseconds, strict=True))
        tried = f"{found.tried}{'' if found.finished else ', not all'}"
        table.add_row(found.tuned.name, tried, before, best, f"{found.gain:.3f}", _changes(found.best, found.before))
    console = Console(width=150)
    console.print(f"{gpu.kind}, {gpu.num_sms} multiprocessors")
    console.print(table)
    for line in [note for found in all_found for note in found.notes] + left:
        console.print(line, highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
