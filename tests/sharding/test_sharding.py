"""Parallelism over devices and processes, each in processes of their own: a backend's devices are set at its start."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kinds import KINDS

HERE = Path(__file__).parent


def test_on_8_devices(with_devices):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "on_8_devices.py"]
    ran = subprocess.run(command, cwd=HERE, env=with_devices(8), capture_output=True, text=True, timeout=550)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout


@pytest.mark.parametrize("num_processes", [2, 4])
def test_in_several_processes(with_devices, num_processes):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, "one_process.py", address, str(num_processes)]
    running = [
        subprocess.Popen(
            [*command, str(i)],
            cwd=HERE,
            env=with_devices(8 // num_processes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(num_processes)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * num_processes, ended[0][1][-3000:]
    for out, _ in ended:
        differences = dict(json.loads(line) for line in out.splitlines() if line.startswith('["'))
        assert set(differences) == set(KINDS)
        for output, lse, key, value in differences.values():
            assert max(output, lse) < 2e-6
            assert (key, value) == (0, 0)
