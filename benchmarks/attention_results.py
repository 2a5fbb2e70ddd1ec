"""What a run of the attention benchmark found, and its JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ceilings import Ceilings

OURS = "jaxpaged"
TOLERANCE = 1e-2
"""Of the norm of an error over the norm of the result; rounding to bfloat16 alone gives 1.7e-3."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one implementation did with one case; `reason` says why there is no time, or what is wrong.

    Attributes:
      microseconds: what a layer costs: for peers one call, for ours a call without the plan, which layers share.
      first_microseconds, plan_microseconds: of ours, one call, and the part of it that is the plan.
      prepare_microseconds: of a peer's call, the time of kernels that prepare its schedule, which may overlap others.
      span_microseconds, launches, spread, kernels: of one call, see `gpu_timing.Timing`.
      variant: which of the implementation's variants was the fastest.
      error: norm of the error over the norm of the result, of the rows sampled, against float64.
      largest: the largest error of those rows.
    """

    microseconds: float | None = None
    first_microseconds: float | None = None
    plan_microseconds: float | None = None
    prepare_microseconds: float | None = None
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

    def noting(self, *notes: str) -> "Result":
        """The same with more to say."""
        return dataclasses.replace(self, reason="; ".join(note for note in (self.reason, *notes) if note))


@dataclasses.dataclass(frozen=True)
class Row:
    """All implementations' results for one case."""

    case: str
    results: Mapping[str, Result]
    seconds: float


@dataclasses.dataclass
class Report:
    """What the measuring processes sent.

    Attributes:
      ceilings: None before they are measured, False when that failed.
      runs: of a report that several runs were joined to, the run of each case.
    """

    machine: dict[str, str] = dataclasses.field(default_factory=dict)
    ceilings: Ceilings | Literal[False] | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    runs: dict[str, "Report"] = dataclasses.field(default_factory=dict)

    def run_of(self, case: str) -> "Report":
        """What was measured together with a case."""
        return self.runs.get(case, self)

    def results_of(self, case: str) -> Mapping[str, Result]:
        """Of a case; nothing where it was not measured."""
        return next((row.results for row in self.rows if row.case == case), {})


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
    rows = [
        Row(row["case"], {name: Result(**result) for name, result in row["results"].items()}, row["seconds"])
        for row in data["rows"]
    ]
    ceilings = Ceilings(**data["ceilings"]) if data["ceilings"] else None
    return Report(dict(data["machine"]), ceilings, rows, list(data["notes"]))


def renewed(runs: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Runs as JSON, the new one first, of the others those with cases that no later one measured anew.

    They keep all cases, since times are compared within a run.
    """
    kept, measured = [], set[str]()
    for run in (new, *runs):
        cases = {row["case"] for row in run["rows"]}
        if cases - measured:
            kept.append(dict(run))
        measured |= cases
    return kept


def not_measured(case: str) -> str:
    """What a report notes of a case that a run left out."""
    return f"{case}: not measured"


def joined(reports: Sequence[Report]) -> Report:
    """The rows of several runs on one kind of machine, the newest first, which counts where a case is in several.

    A peer may be missing in some of them.

    Raises:
      ValueError: the machines or versions differ, or a run has a case twice.
    """
    first = reports[0]
    for report in reports[1:]:
        different = {k for k in first.machine | report.machine if first.machine.get(k) != report.machine.get(k)}
        different -= {k for k in different if "none" in (first.machine.get(k), report.machine.get(k))}
        if different - {"date"}:
            raise ValueError(f"reports: expected runs on one kind of machine, got other {', '.join(sorted(different))}")
    runs: dict[str, Report] = {}
    rows = []
    for report in reports:
        names = [row.case for row in report.rows]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"reports: expected each case once in a run, got twice: {', '.join(twice)}")
        rows += [row for row in report.rows if row.case not in runs]
        runs = dict.fromkeys(names, report) | runs
    measured = set(map(not_measured, runs))
    notes = list(dict.fromkeys(note for report in reports for note in report.notes if note not in measured))
    return Report(dict(first.machine), first.ceilings, rows, notes, runs)
