"""The benchmark of a decode loop, on a tiny model: all kinds of attention run and choose the same tokens."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "serving_gpu.py"


@pytest.mark.parametrize("devices", [1, 2])
def test_all_kinds_choose_the_same_tokens(with_devices, devices):
    environment = {**with_devices(2), "PYTHONPATH": str(BENCHMARK.parents[1])}
    command = [sys.executable, str(BENCHMARK), "--smoke", "--devices", str(devices)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines() if "tiny" in line]
    assert [row[2] for row in rows] == ["jaxpaged", "gather + dense attention", "no attention"]
    assert [row[6] for row in rows] == ["100.0%", "100.0%", "-"]
