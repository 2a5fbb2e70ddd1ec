"""What `benchmarks/sanitize.py` makes of compute-sanitizer's words, and that its planted faults lower for CUDA."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sanitize
import sanitize_suite
from planted_faults import COLUMNS, ROWS, pass_on, write_row


@pytest.mark.parametrize("awaited", [True, False])
def test_the_planted_race_lowers_for_cuda(awaited: bool) -> None:
    call = jax.jit(functools.partial(pass_on, awaited=awaited))
    lowered = call.trace(jax.ShapeDtypeStruct((COLUMNS,), jnp.float32)).lower(lowering_platforms=("cuda",))
    assert "planted_race" in lowered.as_text()


def test_the_planted_write_lowers_for_cuda() -> None:
    buffer = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    call = jax.jit(write_row, donate_argnums=0)
    lowered = call.trace(buffer, jax.ShapeDtypeStruct((1,), jnp.int32)).lower(lowering_platforms=("cuda",))
    assert "planted_write" in lowered.as_text()


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        ("========= Invalid __global__ write\n========= ERROR SUMMARY: 128 errors\n", 128),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", 1),
        ("========= RACECHECK SUMMARY: 100 hazards displayed (512 errors, 0 warnings)\n", 512),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n", 3),
        ("========= RACECHECK SUMMARY: 20 hazards displayed (0 errors, 0 warnings)\n", 0),  # benign ones
        ("========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 3 errors\n", 3),
        ("========= Error: Device not supported\n", None),
        ("", None),
    ],
)
def test_what_a_tool_reported(output: str, expected: int | None) -> None:
    assert sanitize.reported(output) == expected


@pytest.mark.parametrize(
    ("reports", "reported", "finished", "ok"),
    [
        (False, 0, True, True),
        (False, 0, False, False),  # it failed, so nothing is known
        (False, 1, True, False),
        (False, None, True, False),
        (True, 3, False, True),
        (True, 0, True, False),
        (True, None, False, False),
        (None, 0, True, True),
        (None, 5, False, True),
        (None, None, True, False),
    ],
)
def test_verdicts(reports: bool | None, reported: int | None, finished: bool, ok: bool) -> None:
    run = sanitize.Run("memcheck", ("plant", "race"), reports, "")
    assert sanitize.Outcome(run, reported, finished, 0.0, Path()).ok == ok


@pytest.mark.parametrize(
    ("name", "options", "summary"),
    [
        ("memcheck", "--report-api-errors no", "ERROR SUMMARY: 2 errors"),
        (
            "racecheck",
            "--racecheck-report all --print-limit 20",
            "RACECHECK SUMMARY: 1 hazard displayed (2 errors, 0 warnings)",
        ),
    ],
)
def test_a_run_under_a_tool(tmp_path: Path, name: str, options: str, summary: str) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$@"\necho "{sanitize_suite.DONE}"\necho "========= {summary}"\n')
    tool.chmod(0o755)
    run = sanitize.Run(name, ("plant", "far-write"), True, "")
    outcome = sanitize.execute(run, str(tool), tmp_path, 60, 50000)
    assert (outcome.reported, outcome.finished, outcome.ok) == (2, True, True)
    said = outcome.log.read_text()
    assert f"--tool {name} {options} --port 50000 --target-processes application-only {sys.executable}" in said
    assert str(tmp_path) not in sanitize.document([outcome], str(tool)).split("| run |")[1]
    tool.write_text("#!/bin/sh\nsleep 60\n")
    outcome = sanitize.execute(run, str(tool), tmp_path, 0.2, 50000)
    assert (outcome.reported, outcome.ok) == (None, False)
    assert outcome.seconds < 30


def test_the_parts_of_the_suite_are_all_of_it() -> None:
    suite = list(range(len(sanitize_suite.SUITE | sanitize_suite.TORCH_SUITE)))
    for tool in ("memcheck", "racecheck"):
        runs = [run.arguments for run in sanitize.RUNS if run.tool == tool and run.arguments[0] == "run"]
        run = [number for _, _, part, _, parts in runs for number in suite[int(part) :: int(parts)]]
        assert sorted(run) == suite


def test_the_suite_compares_what_it_runs() -> None:
    with pytest.raises(AssertionError, match=r"writes: 1\.000 of the bytes differ"):
        sanitize_suite.same(np.zeros(4, np.uint8), np.ones(4, np.uint8), "writes")
