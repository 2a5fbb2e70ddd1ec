"""Run cases through doors and compare the results with the oracle."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from jaxpaged.testing.cases import Case, build, named_cases, tolerance
from jaxpaged.testing.doors import DOORS, Door


@dataclasses.dataclass(frozen=True)
class Result:
    """How far a door's results are from the oracle's for one case.

    Attributes:
      dtype: of the query.
      error: largest difference of outputs, over the largest output of the oracle.
      lse_error: likewise of the finite lses (an lse of float32, whatever the output's dtype); 0 where there is no lse.
      skipped: why the case was not run, or None.
    """

    case: str
    door: str
    dtype: str
    error: float
    lse_error: float
    tolerance: float
    ok: bool
    skipped: str | None = None


LSE_TOLERANCE = 2e-6


def compare(case: Case, door_name: str, door: Door) -> Result:
    """Run one case, or what stands for it there, through one door."""
    case = door.adapt(case)
    reason = door.refuses(case)
    if reason is not None:
        return Result(case.name, door_name, case.dtype, 0.0, 0.0, tolerance(case), True, reason)
    inputs = build(case)
    expected, expected_lse = inputs.expected()
    out, lse = door.run(inputs)
    error = relative_error(out, expected)
    lse_error = 0.0 if lse is None else _lse_error(lse, expected_lse)
    allowed = tolerance(case) * door.slack
    ok = error <= allowed and lse_error <= LSE_TOLERANCE
    return Result(case.name, door_name, case.dtype, error, lse_error, allowed, ok)


def _lse_error(got: np.ndarray, expected: np.ndarray) -> float:
    if not np.array_equal(np.isneginf(got), np.isneginf(expected)):
        return float("inf")
    return relative_error(np.where(np.isneginf(got), 0, got), np.where(np.isneginf(expected), 0, expected))


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest magnitude of `expected`; inf where shapes differ or `got` isn't finite."""
    if got.shape != expected.shape or not np.isfinite(got).all():
        return float("inf")
    if got.size == 0:
        return 0.0
    return float(np.abs(got - expected).max() / max(np.abs(expected).max(), 1e-30))


def run(
    doors: Mapping[str, Door] | None = None,
    cases: Iterable[Case] | None = None,
    progress: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Compare every case through every door."""
    return list(_each(DOORS if doors is None else doors, named_cases() if cases is None else cases, progress))


def _each(
    doors: Mapping[str, Door], cases: Iterable[Case], progress: Callable[[Result], None] | None
) -> Iterator[Result]:
    for case in cases:
        for name, door in doors.items():
            result = compare(case, name, door)
            if progress is not None:
                progress(result)
            yield result
