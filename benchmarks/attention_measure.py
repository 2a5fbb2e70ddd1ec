"""Measure attention cases in a process of its own, so that one that hangs or dies takes nothing else with it."""

import dataclasses
import datetime
import gc
import importlib.metadata
import multiprocessing
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from attention_cases import Case

OURS = "jaxpaged"
INPUTS, CEILINGS = "inputs", "ceilings"
TOLERANCE = 1e-2
"""Of the norm of an error over the norm of the result; rounding to bfloat16 alone gives 1.7e-3."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one implementation did with one case; `reason` says why there is no time, or what is wrong.

    Attributes:
      microseconds, span_microseconds, launches, spread, kernels: see `gpu_timing.Timing`.
      variant: which of the implementation's variants was the fastest.
      error: norm of the error over the norm of the result, of the rows sampled, against float64.
      largest: the largest error of those rows.
    """

    microseconds: float | None = None
    span_microseconds: float | None = None
    launches: int | None = None
    spread: float | None = None
    kernels: Mapping[str, float] = dataclasses.field(default_factory=dict)
    variant: str = ""
    error: float | None = None
    largest: float | None = None
    reason: str = ""

    @property
    def right(self) -> bool:
        return self.error is not None and self.error <= TOLERANCE


@dataclasses.dataclass(frozen=True)
class Row:
    """All implementations' results for one case."""

    case: str
    results: Mapping[str, Result]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
      skip: reasons not to run an implementation, by names of case and implementation.
      implementation: of ours.
      device: "cuda", or "cpu" to check results alone.
      profilers: see `gpu_timing.PROFILERS`.
    """

    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    rounds: int
    implementation: str | None
    device: str
    profilers: tuple[str, ...] = ("torch", "jax")
    skip: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)


def last_line(error: BaseException) -> str:
    """The exception and the place that raised it, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return (text if len(text) <= 300 else f"{text[:200]} ... {text[-95:]}") + place


def measure(job: Job, case: Case, tell: Callable[[str], None]) -> Row:
    """Check and time one case.

    Args:
      tell: called with an implementation's name before it runs for the first time.

    Raises:
      RuntimeError: the GPU answers no more.
    """
    from attention_inputs import make_inputs, sample_rows

    begin = time.monotonic()
    tell(INPUTS)
    inputs = make_inputs(case, job.device)
    inputs.fill_unused(poison=True)
    sample = sample_rows(inputs)
    results: dict[str, Result] = {}
    outputs: dict[str, Any] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name in (OURS, *job.peers):
        tell(name)
        if (case.name, name) in job.skip:
            results[name] = Result(reason=job.skip[case.name, name])
        else:
            try:
                results[name], calls[name], outputs[name] = _prepare(job, name, inputs, sample)
            except Exception as error:
                results[name] = Result(reason=_reason(error))
                _raise_if_dead(job, error)
        if name == OURS:
            inputs.fill_unused(poison=False)  # ours must bear it, a peer need not
    if OURS in outputs:
        others = {name: out for name, out in outputs.items() if name != OURS and results[name].right}
        results[OURS] = _compare(results[OURS], outputs[OURS], others)
    del outputs
    if job.device == "cuda" and calls:
        tell("+".join(calls))
        try:
            results |= _time(job, calls, results)
        except Exception as error:
            traceback.print_exc()
            failed = f"not timed: {last_line(error)}"
            results |= {name: dataclasses.replace(results[name], reason=failed) for name in calls}
            _raise_if_dead(job, error)
    return Row(case.name, results, time.monotonic() - begin)


class DeadGpuError(RuntimeError):
    """No call of this process reaches the GPU any more."""


def _reason(error: BaseException) -> str:
    from peers import Unavailable

    if isinstance(error, Unavailable):
        return str(error)
    traceback.print_exc()
    return last_line(error)


def _raise_if_dead(job: Job, error: BaseException) -> None:
    import torch

    if job.device != "cuda":
        return
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except Exception as dead:
        raise DeadGpuError(last_line(error)) from dead


def _finish(job: Job, result: Any) -> Any:
    if job.device == "cuda":
        from gpu_timing import finish

        return finish(result)
    return result


def _output(result: Any) -> Any:
    from peers import as_torch

    return as_torch(result[0] if isinstance(result, tuple | list) else result)


def _prepare(job: Job, name: str, inputs: Any, sample: Any) -> tuple[Result, Callable[[], Any], Any]:
    """An implementation's fastest variant that is right: its errors, its call and its output."""
    import peers
    import torch

    variants = peers.jaxpaged(inputs, job.implementation) if name == OURS else peers.PEERS[name](inputs)
    right: dict[str, Result] = {}
    wrong: dict[str, Result] = {}
    for label, call in variants.items():
        try:
            error, largest = sample.errors(_output(_finish(job, call())))
            result = Result(variant=label, error=error, largest=largest)
            (right if result.right else wrong)[label] = result
        except Exception as failure:
            wrong[label] = Result(variant=label, reason=_reason(failure))
            _raise_if_dead(job, failure)
    if not right:
        label, result = max(wrong.items(), key=lambda item: item[1].error is not None)
        if result.error is None:
            raise RuntimeError(f"{label}: {result.reason}".removeprefix(": "))
        result = dataclasses.replace(result, reason=f"WRONG: error {result.error:.1e}")
        return result, variants[label], _output(_finish(job, variants[label]())).clone()
    best = next(iter(right))
    if len(right) > 1 and job.device == "cuda":
        from gpu_timing import kernel_times

        times = kernel_times({label: variants[label] for label in right}, warmup=1, repeats=5, max_seconds=1.0)
        best = min(times, key=lambda label: times[label].microseconds)
    output, notes = _output(_finish(job, variants[best]())).clone(), []
    if name == OURS and not torch.equal(output, _output(_finish(job, variants[best]()))):
        notes.append("two runs differ in their bits")
    if name == OURS and inputs.case.option == "lse":
        lse = peers.as_torch(variants[best]()[1])[sample.heads, sample.tokens].double()
        off = float((lse - sample.lse).abs().max())
        if not off <= 2e-3:
            notes.append(f"WRONG: the lse is off by {off:.1e}")
    return dataclasses.replace(right[best], reason="; ".join(notes)), variants[best], output


def _compare(ours: Result, out: Any, others: Mapping[str, Any]) -> Result:
    """Ours, with what a look at every row of the output shows."""
    import torch

    notes = [ours.reason] if ours.reason else []
    if not bool(torch.isfinite(out).all()):
        notes.append("WRONG: the output holds numbers that are not finite")
    for name, other in others.items():
        off = float((out.float() - other.float()).norm() / other.float().norm())
        if not off <= 2 * TOLERANCE:
            notes.append(f"WRONG: {off:.1e} from the whole output of {name}")
    return dataclasses.replace(ours, reason="; ".join(notes))


def _time(job: Job, calls: Mapping[str, Callable[[], Any]], results: Mapping[str, Result]) -> dict[str, Result]:
    from gpu_timing import kernel_times

    timings = kernel_times(calls, repeats=job.rounds)
    return {
        name: dataclasses.replace(
            results[name],
            microseconds=timing.microseconds,
            span_microseconds=timing.span_microseconds,
            launches=timing.launches,
            spread=timing.spread,
            kernels=timing.kernels,
        )
        for name, timing in timings.items()
    }


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


Message = tuple[str, Any]
"""("machine", dict), ("ceilings", Ceilings), ("ceilings failed", reason), ("running", (case, implementation)),
("row", Row), ("dead", reason), ("done", None)."""


def work(job: Job, connection: Connection, log: str | None, ceilings: bool) -> None:
    """The measuring process: send what is found, case by case."""
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    try:
        for message in _messages(job, ceilings, connection):
            connection.send(message)
        connection.send(("done", None))
    except BaseException as error:
        traceback.print_exc()
        connection.send(("dead", last_line(error)))
    connection.close()
    os._exit(0)  # a GPU that is stuck may hold up the usual way out


def _messages(job: Job, ceilings: bool, connection: Connection) -> Iterator[Message]:
    import gpu_timing
    import torch

    torch.set_grad_enabled(False)
    gpu_timing.PROFILERS = job.profilers
    yield "machine", machine()
    if ceilings and job.device == "cuda":
        yield "running", (None, CEILINGS)
        try:
            yield "ceilings", gpu_timing.measure_ceilings()
        except Exception as error:
            traceback.print_exc()
            yield "ceilings failed", last_line(error)
        torch.cuda.empty_cache()
    for case in job.cases:

        def tell(name: str, case: str = case.name) -> None:
            connection.send(("running", (case, name)))

        try:
            row = measure(job, case, tell)
        except DeadGpuError:
            raise
        except Exception as error:
            traceback.print_exc()
            row = Row(case.name, {OURS: Result(reason=last_line(error))}, 0.0)
        yield "row", row
        gc.collect()
        if job.device == "cuda":
            torch.cuda.empty_cache()


@dataclasses.dataclass
class Report:
    """What the measuring processes sent."""

    machine: dict[str, str] = dataclasses.field(default_factory=dict)
    ceilings: Any = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def measure_all(
    job: Job,
    *,
    log: str | None,
    deadline: float,
    case_seconds: float,
    show: Callable[[Report], None],
) -> Report:
    """Measure `job.cases` in processes that are ended and started anew when one hangs or dies.

    Args:
      log: file for what the processes print; the terminal when None.
      deadline: of `time.monotonic()`: cases that aren't done by then are left out.
      case_seconds: a process that says nothing for so long has hung.
      show: called with the report after each row.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs the memory, too
    report = Report()
    skip = dict(job.skip)
    deaths = dict.fromkeys(job.peers, 0)
    left = list(job.cases)
    while left and time.monotonic() < deadline:
        todo = dataclasses.replace(job, cases=tuple(left), skip=skip)
        (blamed, name), reason = _one_process(todo, report, log, deadline, case_seconds, show)
        done = {row.case for row in report.rows}
        left = [case for case in left if case.name not in done]
        if not reason:
            break
        if blamed is None:
            report.notes.append(f"{name}: {reason}")
            if name != CEILINGS:
                break
            report.ceilings = False
        elif name == OURS or name in deaths:
            skip[blamed, name] = reason
            if name in deaths:
                deaths[name] += 1
                if deaths[name] == 2:  # each death costs a start
                    skip |= {(case.name, name): f"left out after two failures, the last: {reason}" for case in left[1:]}
        else:
            report.rows.append(Row(blamed, {OURS: Result(reason=f"given up at {name}: {reason}")}, 0.0))
            left = [case for case in left if case.name != blamed]
    report.notes += [f"{case.name}: not measured" for case in left]
    return report


def _one_process(
    job: Job,
    report: Report,
    log: str | None,
    deadline: float,
    case_seconds: float,
    show: Callable[[Report], None],
) -> tuple[tuple[str | None, str], str]:
    """Run one process until it is done, dead or hung: what it ran last, and what went wrong, or ""."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(job, sender, log, report.ceilings is None), daemon=True)
    process.start()
    sender.close()
    running: tuple[str | None, str] = (None, "start")
    try:
        while True:
            wait = min(case_seconds, deadline - time.monotonic())
            if wait <= 0 or not receiver.poll(wait):
                if time.monotonic() >= deadline:
                    return running, ""
                return running, f"hung for {case_seconds:.0f} s, ended"
            try:
                kind, content = receiver.recv()
            except EOFError:
                process.join(10)
                return running, f"the process died with exit code {process.exitcode}"
            if kind == "done":
                return running, ""
            if kind == "dead":
                return running, content
            if kind == "running":
                running = content
            elif kind == "machine":
                report.machine = content
            elif kind == "ceilings":
                report.ceilings = content
            elif kind == "ceilings failed":
                report.ceilings = False
                report.notes.append(f"ceilings: {content}")
            elif kind == "row":
                report.rows.append(content)
                show(report)
    finally:
        receiver.close()
        process.kill()
        process.join(30)


def as_json(report: Report, command: Sequence[str]) -> dict[str, Any]:
    """A report as JSON."""
    ceilings = dataclasses.asdict(report.ceilings) if report.ceilings else None
    rows = [dataclasses.asdict(row) for row in report.rows]
    return {
        "command": list(command),
        "machine": report.machine,
        "ceilings": ceilings,
        "rows": rows,
        "notes": report.notes,
    }


def from_json(data: Mapping[str, Any]) -> Report:
    """The report that `as_json` took apart."""
    from gpu_timing import Ceilings

    rows = [
        Row(row["case"], {name: Result(**result) for name, result in row["results"].items()}, row["seconds"])
        for row in data["rows"]
    ]
    ceilings = Ceilings(**data["ceilings"]) if data["ceilings"] else None
    return Report(dict(data["machine"]), ceilings, rows, list(data["notes"]))
