"""Measure attention cases in a process of its own, so that one that hangs or dies takes nothing else with it."""

import dataclasses
import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from attention_measure import TWO_LAYERS, DeadGpuError, Job, last_line, measure
from attention_results import OURS, Report, Result, Row, not_measured
from pages import machine

CEILINGS = "ceilings"


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
    from ceilings import measure_ceilings

    torch.set_grad_enabled(False)
    gpu_timing.PROFILERS = job.profilers
    yield "machine", machine()
    if ceilings and job.device == "cuda":
        yield "running", (None, CEILINGS)
        try:
            yield "ceilings", measure_ceilings()
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
        elif name in (OURS, TWO_LAYERS) or name in deaths:
            skip[blamed, name] = reason
            if name in deaths:
                deaths[name] += 1
                if deaths[name] == 2:  # each death costs a start
                    skip |= {(case.name, name): f"left out after two failures, the last: {reason}" for case in left[1:]}
        else:
            report.rows.append(Row(blamed, {OURS: Result(reason=f"given up at {name}: {reason}")}, 0.0))
            left = [case for case in left if case.name != blamed]
    report.notes += [not_measured(case.name) for case in left]
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
