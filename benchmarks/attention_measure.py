"""Measure one attention case: check each implementation's result, then time those that are right side by side."""

import dataclasses
import os
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from attention_cases import Case
from attention_results import OURS, TOLERANCE, Result, Row

INPUTS, TWO_LAYERS = "inputs", "jaxpaged, two layers"


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
    from ours import Ours

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
                if name == OURS:
                    program = Ours(inputs, job.implementation)
                    results[name], outputs[name] = _check_ours(job, program, sample)
                    calls[name] = program.one
                else:
                    results[name], calls[name], outputs[name] = _check_peer(job, name, inputs, sample)
            except Exception as error:
                results[name] = Result(reason=_reason(error))
                _raise_if_dead(job, error)
        if name == OURS:
            if name in calls:
                tell(TWO_LAYERS)
                more, note = _second_layer(job, program, outputs[name])
                calls |= more
                results[name] = results[name].noting(note)
            inputs.fill_unused(poison=False)  # ours must bear it, a peer need not
    if OURS in outputs:
        others = {name: out for name, out in outputs.items() if name != OURS and results[name].right}
        results[OURS] = _compare(results[OURS], outputs[OURS], others)
    del outputs
    if job.device == "cuda" and calls:
        tell("+".join(calls))
        try:
            results |= _time(job, case, calls, results)
        except Exception as error:
            traceback.print_exc()
            failed = f"not timed: {last_line(error)}"
            results |= {name: results[name].noting(failed) for name in calls if name in results}
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


def _off(out: Any, other: Any) -> float:
    """Norm of the difference over the norm of the other."""
    return float((out.float() - other.float()).norm() / other.float().norm())


def _check_ours(job: Job, program: Any, sample: Any) -> tuple[Result, Any]:
    """Our errors, and our output."""
    import torch
    from peers import as_torch

    result = _finish(job, program.one())
    out = _output(result)
    error, largest = sample.errors(out)
    notes = [] if error <= TOLERANCE else [f"WRONG: error {error:.1e}"]
    if not torch.equal(out, _output(_finish(job, program.one()))):
        notes.append("two runs differ in their bits")
    if program.inputs.case.option == "lse":
        lse = as_torch(result[1])[sample.heads, sample.tokens].double()
        off = float((lse - sample.lse).abs().max())
        if not off <= 2e-3:
            notes.append(f"WRONG: the lse is off by {off:.1e}")
    return Result(error=error, largest=largest).noting(*notes), out


def _second_layer(job: Job, program: Any, out: Any) -> tuple[dict[str, Callable[[], Any]], str]:
    """The call of two layers in one program, if there can be one, and what is to be said of it."""
    if (program.inputs.case.name, TWO_LAYERS) in job.skip:
        return {}, f"one layer alone: {job.skip[program.inputs.case.name, TWO_LAYERS]}"
    try:
        if not program.add_layer():
            return {}, "one layer alone: no memory for two"
        second = _output(_finish(job, program.second()))
        results = _finish(job, program.two())
    except Exception as error:
        note = f"one layer alone: {_reason(error)}"
        _raise_if_dead(job, error)
        return {}, note
    found = [_output(result) for result in results[:: len(results) // 2]]
    off = max(_off(x, y) for x, y in zip(found, (out, second), strict=True))
    return {TWO_LAYERS: program.two}, "" if off <= TOLERANCE else f"WRONG: two layers in one program are {off:.1e} off"


def _check_peer(job: Job, name: str, inputs: Any, sample: Any) -> tuple[Result, Callable[[], Any], Any]:
    """A peer's fastest variant that is right: its errors, its call and its output."""
    import peers

    variants = peers.variants(name, inputs)
    right: dict[str, Result] = {}
    wrong: dict[str, Result] = {}
    for label, call in variants.items():
        try:
            error, largest = sample.errors(call.packed(_finish(job, call.run())))
            result = Result(variant=label, error=error, largest=largest)
            (right if result.right else wrong)[label] = result
        except Exception as failure:
            wrong[label] = Result(variant=label, reason=_reason(failure))
            _raise_if_dead(job, failure)
    if not right:
        label, result = max(wrong.items(), key=lambda item: item[1].error is not None)
        if result.error is None:
            raise RuntimeError(f"{label}: {result.reason}".removeprefix(": "))
        right = {label: result.noting(f"WRONG: error {result.error:.1e}")}
    best = next(iter(right))
    if len(right) > 1 and job.device == "cuda":
        from gpu_timing import kernel_times

        times = kernel_times({label: variants[label].run for label in right}, warmup=1, repeats=5, max_seconds=1.0)
        best = min(times, key=lambda label: times[label].microseconds)
    result = right[best]
    lost = [f"{label}: {other.reason or f'error {other.error:.1e}'}" for label, other in wrong.items()]
    if lost and best not in wrong:
        result = result.noting(f"without its variants that failed ({lost[0]}{', ...' if len(lost) > 1 else ''})")
    return result, variants[best].run, variants[best].packed(_finish(job, variants[best].run())).clone()


def _compare(ours: Result, out: Any, others: Mapping[str, Any]) -> Result:
    """Ours, with what a look at every row of the output shows."""
    import torch

    notes = []
    if not bool(torch.isfinite(out).all()):
        notes.append("WRONG: the output holds numbers that are not finite")
    for name, other in others.items():
        off = _off(out, other)
        if not off <= 2 * TOLERANCE:
            notes.append(f"WRONG: {off:.1e} from the whole output of {name}")
    return ours.noting(*notes)


def _time(
    job: Job, case: Case, calls: Mapping[str, Callable[[], Any]], results: Mapping[str, Result]
) -> dict[str, Result]:
    from gpu_timing import kernel_times
    from layer_times import layer_time

    timings = kernel_times(calls, repeats=job.rounds)
    two = timings.pop(TWO_LAYERS, None)
    timed = {
        name: dataclasses.replace(
            results[name],
            microseconds=timing.microseconds,
            prepare_microseconds=sum((t for kernel, t in timing.kernels.items() if "prepare" in kernel), 0.0) or None,
            span_microseconds=timing.span_microseconds,
            launches=timing.launches,
            spread=timing.spread,
            kernels=timing.kernels,
        )
        for name, timing in timings.items()
    }
    if OURS in timed:
        one = timings[OURS]
        timed[OURS] = dataclasses.replace(timed[OURS], first_microseconds=one.microseconds)
        if two is not None:
            split = layer_time(one, two, has_lse=case.option == "lse")
            ours = dataclasses.replace(timed[OURS], microseconds=split.layer, plan_microseconds=split.plan)
            timed[OURS] = ours.noting(*split.notes)
    return timed
