"""Times of GPU kernels as CUPTI records them, of JAX and PyTorch functions alike in one process."""

import dataclasses
import functools
import glob
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FLUSH_BYTES = 256 * 2**20
"""Read between calls: several times the L2, so that no call finds its inputs there, nor another's unwritten lines."""

Run = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Record:
    """A kernel, copy or fill that ran on the GPU."""

    name: str
    start_ns: float
    duration_ns: float

    @property
    def end_ns(self) -> float:
        return self.start_ns + self.duration_ns


@dataclasses.dataclass(frozen=True)
class Timing:
    """What the GPU did in one call: medians over the repeats.

    Attributes:
      microseconds: time during which at least one of the call's kernels, copies or fills ran: the sum of their
        durations, but for the part where two of them overlap.
      span_microseconds: from the start of the first to the end of the last, gaps included.
      kernels: total time by name.
      counts: how many there are by name.
      launches: how many of them one call has.
      spread: the largest of the repeats over the smallest.
      repeats: calls measured.
    """

    microseconds: float
    span_microseconds: float
    kernels: dict[str, float]
    counts: dict[str, int]
    launches: int
    spread: float
    repeats: int


def kernel_times(
    calls: Mapping[str, Callable[[], Any]], *, warmup: int = 3, repeats: int = 20, max_seconds: float = 4.0
) -> dict[str, Timing]:
    """GPU time of each call, measured in turns, so that what else the machine does meets all of them alike.

    Args:
      calls: by name, functions that launch work on the current GPU.
      warmup: calls before the first measured one.
      repeats: measured calls of each.
      max_seconds: where they would take longer, fewer calls are measured, but no fewer than 3.

    Raises:
      RuntimeError: a call launched nothing, or the profiler lost records.
    """
    seconds = 0.0
    for call in calls.values():
        for _ in range(warmup):
            begin = time.perf_counter()
            finish(call())
            last = time.perf_counter() - begin
        seconds += last
    repeats = max(3, min(repeats, int(max_seconds / max(seconds, 1e-6))))
    recorder, markers = _recorder(PROFILERS)

    def run() -> None:
        for _ in range(repeats):
            for call in calls.values():
                _between_markers(call)

    for _ in range(2):  # a profiler may lose records once, most of all when it has just been loaded
        parts = cut(recorder(run), markers)
        if len(parts) == repeats * len(calls) and all(parts):
            break
    if len(parts) != repeats * len(calls):
        raise RuntimeError(f"the profiler recorded {len(parts)} calls, expected {repeats * len(calls)}")
    return {name: summarize(name, parts[i :: len(calls)]) for i, name in enumerate(calls)}


def summarize(call: str, parts: Sequence[Sequence[Record]]) -> Timing:
    """The Timing of calls that launched `parts`."""
    if not all(parts):
        raise RuntimeError(f"{call}: a call launched nothing on the GPU")
    busy = [busy_ns(part) / 1e3 for part in parts]
    spans = [(max(r.end_ns for r in part) - min(r.start_ns for r in part)) / 1e3 for part in parts]
    names = dict.fromkeys(record.name for part in parts for record in part)
    by_name = {name: [[r.duration_ns for r in part if r.name == name] for part in parts] for name in names}
    return Timing(
        microseconds=statistics.median(busy),
        span_microseconds=statistics.median(spans),
        kernels={name: statistics.median(sum(times) / 1e3 for times in calls) for name, calls in by_name.items()},
        counts={name: int(statistics.median(len(times) for times in calls)) for name, calls in by_name.items()},
        launches=int(statistics.median(len(part) for part in parts)),
        spread=max(busy) / min(busy),
        repeats=len(parts),
    )


def busy_ns(records: Iterable[Record]) -> float:
    """Time that at least one of the records covers."""
    busy, end = 0.0, float("-inf")
    for record in sorted(records, key=lambda r: r.start_ns):
        busy += max(0.0, record.end_ns - max(record.start_ns, end))
        end = max(end, record.end_ns)
    return busy


def cut(records: Iterable[Record], markers: tuple[str, str]) -> list[list[Record]]:
    """The records of each call: those between a kernel of the first name and the next one of the second."""
    parts: list[list[Record]] = []
    inside = False
    for record in sorted(records, key=lambda r: r.start_ns):
        if record.name == markers[0]:
            inside = True
            parts.append([])
        elif record.name == markers[1]:
            inside = False
        elif inside:
            parts[-1].append(record)
    return parts


def finish(result: Any) -> Any:
    """Wait for the arrays of a result, of any framework, and for the GPU."""
    import torch

    for leaf in result if isinstance(result, tuple | list) else (result,):
        if hasattr(leaf, "block_until_ready"):
            leaf.block_until_ready()
    torch.cuda.synchronize()
    return result


def _between_markers(call: Callable[[], Any]) -> None:
    import torch

    flush, small = _buffers()
    flush.sum()
    small.erfinv_()
    torch.cuda.synchronize()
    finish(call())
    small.logit_()
    torch.cuda.synchronize()


@functools.cache
def _buffers() -> tuple[Any, Any]:
    import torch

    return torch.zeros(FLUSH_BYTES // 4, device="cuda"), torch.zeros(32, device="cuda")


PROFILERS = ("torch", "jax")
"""In the order in which they are tried. Only one of them can hold CUPTI in a process."""


@functools.cache
def _recorder(profilers: tuple[str, ...]) -> tuple[Callable[[Run], list[Record]], tuple[str, str]]:
    """The first profiler that sees the work of both frameworks, and the names of the marker kernels under it."""
    reasons = []
    for profiler in profilers:
        recorder = {"torch": record_with_torch, "jax": record_with_jax}[profiler]
        try:
            return recorder, _calibrate(recorder)
        except Exception as error:
            reasons.append(f"{profiler}: {type(error).__name__}: {error}")
            warnings.warn(f"gpu_timing: {reasons[-1]}", stacklevel=2)
    raise RuntimeError("no profiler records GPU kernels here: " + "; ".join(reasons))


def _calibrate(recorder: Callable[[Run], list[Record]]) -> tuple[str, str]:
    """The markers' names under a recorder, after a check that it sees what PyTorch and JAX launch, and at what speed.

    Raises:
      RuntimeError: it doesn't.
    """
    import jax
    import torch

    _, small = _buffers()
    add = jax.jit(lambda x: x + 1)
    ours = jax.numpy.zeros(2**20)
    source = torch.zeros(2**28, device="cuda")
    target = torch.empty_like(source)

    def marker(run: Callable[[], Any]) -> str:
        run()  # compiled and loaded before it is recorded
        records = recorder(lambda: finish(run()))
        if len(records) != 1:
            raise RuntimeError(f"a marker kernel left {len(records)} records, expected 1")
        return records[0].name

    recorder(lambda: finish(small.erfinv_()))  # the first recording loads CUPTI, and may miss what it should record
    markers = marker(small.erfinv_), marker(small.logit_)
    if markers[0] == markers[1]:
        raise RuntimeError(f"both marker kernels are called {markers[0]}")

    def run() -> None:
        for call in (lambda: add(ours), lambda: target.copy_(source)):
            _between_markers(call)

    finish(add(ours))
    parts = cut(recorder(run), markers)
    if len(parts) != 2 or not all(parts):
        raise RuntimeError(f"of a JAX and a PyTorch call it recorded {[len(part) for part in parts]} kernels")
    bandwidth = 2 * source.nbytes / busy_ns(parts[1]) / 1e3
    if not 0.1 < bandwidth < 12:
        raise RuntimeError(f"a copy of 1 GiB at {bandwidth:.2f} TB/s is not to be believed")
    return markers


def record_with_torch(run: Run) -> list[Record]:
    """What ran on the GPU during `run`, by PyTorch's profiler, which sees the whole process."""
    import torch

    # CUDA graphs, which XLA uses, need CUPTI to stay loaded between two recordings.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return [
        Record(event["name"], event["ts"] * 1e3, event["dur"] * 1e3)
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def record_with_jax(run: Run) -> list[Record]:
    """What ran on the GPU during `run`, by JAX's profiler, which sees the whole process."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
        return [
            Record(event.name, event.start_ns, event.duration_ns)
            for plane in data.planes
            if plane.name.startswith("/device:GPU:")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
