"""Our kernels of several revisions side by side in one process: what a change is worth, on one GPU at one time.

    python benchmarks/attention_revisions.py copy build/revisions before=main after=.
    python benchmarks/attention_revisions.py measure build/revisions --only "^decode 64x4096"

The GPU's machine needs the copies alone, no repository. "." is the working tree. Times are of one layer, kernel by
kernel, without the plan.
"""

import importlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from attention_cases import CASES, Case
from gpu_timing import Timing, kernel_times

PACKAGE = "jaxpaged"
ROOT = Path(__file__).parents[1]
MOST_ERROR = 5e-3
app = typer.Typer(help=__doc__)


@app.command("copy")
def copy_revisions(
    target: Annotated[Path, typer.Argument(help="Folder for the copies; what it held goes.")],
    revisions: Annotated[list[str], typer.Argument(help="NAME=REVISION, of git's, or . for the working tree.")],
) -> None:
    """Copy the package as it was, under other names, so that one process can import all of them."""
    shutil.rmtree(target, ignore_errors=True)
    for given in revisions:
        name, _, revision = given.partition("=")
        if not re.fullmatch(r"[a-z]\w*", name) or not revision:
            raise typer.BadParameter(f"expected NAME=REVISION, got {given!r}")
        rename(revision_of(revision, target), target / f"{PACKAGE}_{name}")


def revision_of(revision: str, target: Path) -> Path:
    """The package's folder as a revision has it."""
    unpacked = target / "unpacked"
    if revision == ".":
        shutil.copytree(ROOT / PACKAGE, unpacked / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        packed = subprocess.run(["git", "archive", revision, PACKAGE], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(unpacked, filter="data")
    return unpacked / PACKAGE


def rename(package: Path, target: Path) -> None:
    """Move a package and have it call itself by its new name, in whatever it says or registers.

    The demo's weights, most of its bytes and of no use to a kernel, stay behind.
    """
    shutil.rmtree(package / "demo" / "weights", ignore_errors=True)
    for path in package.rglob("*"):
        if path.is_file():
            path.write_bytes(re.sub(rb"\b%b\b" % PACKAGE.encode(), target.name.encode(), path.read_bytes()))
    shutil.move(package, target)


@contextmanager
def imported(name: str) -> Iterator[None]:
    """Within it, a copy is what is imported as the package."""
    before = {n: m for n, m in sys.modules.items() if n == PACKAGE or n.startswith(f"{PACKAGE}.")}
    for n in before:
        del sys.modules[n]
    sys.modules[PACKAGE] = importlib.import_module(name)
    try:
        yield
    finally:
        del sys.modules[PACKAGE]
        sys.modules.update(before)


@app.command()
def measure(
    copies: Annotated[Path, typer.Argument(help="Folder of the copies.")],
    only: Annotated[str, typer.Option(help="Measure the cases whose name this regular expression finds.")] = "^decode",
    rounds: Annotated[int, typer.Option(help="Measured calls of each.")] = 20,
) -> None:
    """Check each revision's results, time them in turns, and print their kernels' microseconds."""
    import torch

    sys.path.insert(0, str(copies))
    names = sorted(path.name for path in copies.glob(f"{PACKAGE}_*"))
    torch.set_grad_enabled(False)
    for case in CASES:
        if re.search(only, case.name):
            for name, timing in _measure(case, names, rounds).items():
                print(f"{case.name:40} {name:24} {kernels_of(timing)}", flush=True)
            torch.cuda.empty_cache()


def _measure(case: Case, names: list[str], rounds: int) -> dict[str, Timing]:
    from attention_inputs import make_inputs, sample_rows
    from gpu_timing import finish
    from ours import Ours
    from peers import as_torch

    inputs = make_inputs(case, "cuda")
    inputs.fill_unused(poison=True)
    sample, calls = sample_rows(inputs), dict[str, Callable[[], Any]]()
    for name in names:
        with imported(name):
            program = Ours(inputs)
            result = finish(program.one())
            error, _ = sample.errors(as_torch(result[0] if isinstance(result, tuple | list) else result))
            if not error <= MOST_ERROR:
                raise RuntimeError(f"{case.name}: {name} is wrong, error {error:.1e}")
            calls[name] = program.compiled()
    return kernel_times(calls, repeats=rounds)


def kernels_of(timing: Timing) -> str:
    """The times of our kernels in a call, but the plan's, and their sum."""
    ours = [t for kernel, t in timing.kernels.items() if "paged_" in kernel and "plan" not in kernel]
    return f"{sum(ours):9.1f} = {' + '.join(f'{t:.1f}' for t in ours)}"


if __name__ == "__main__":
    app()
