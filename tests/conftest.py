"""Fixtures that several folders of tests use."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Read when JAX's CPU backend starts. Pallas' interpreter blocks a thread of XLA's pool for each thread of a kernel that
# waits at a barrier; where there are fewer threads than that, for want of cores, all wait for ever.
os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))
os.environ.setdefault("PJRT_NPROC", os.environ["NPROC"])
# Programs are small and many, and LLVM takes a third of all the time. What a GPU runs stays as users have it.
os.environ["XLA_FLAGS"] = " ".join(
    ([] if Path("/dev/nvidia0").exists() else ["--xla_backend_optimization_level=0"])
    + os.environ.get("XLA_FLAGS", "").split()
)

import jax
import pytest


@pytest.fixture
def hopper() -> Any:
    """The GPU that the kernels are written for; the test is skipped where there is none."""
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        pytest.skip(f"needs a Hopper GPU, got {device.device_kind} ({device.platform})")
    return device


@pytest.fixture
def cuda() -> Iterator[None]:
    """A Hopper GPU that PyTorch can use; the test is skipped where there is none."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA here")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"needs a Hopper GPU, got {torch.cuda.get_device_name()}")
    if os.environ.get("JAXPAGED_TEST_NATIVE"):  # see tests/bridge/test_native_gpu.py
        from jaxpaged.bridge.native import launch_natively

        launch_natively()
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


@pytest.fixture(scope="session")
def with_devices() -> Callable[[int], dict[str, str]]:
    """The environment of a process for which the CPU stands in for so many devices."""

    def environment(number: int) -> dict[str, str]:
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={number}"
        return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

    return environment


MOST_MAPPINGS = 20_000
"""Pieces of memory, some for each compiled program, after which all programs go: Linux gives a process 65,530."""
_tests = itertools.count()


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """Thousands of tests in one process would compile more programs than it can map."""
    yield
    mappings = Path("/proc/self/maps")
    if next(_tests) % 20 == 0 and mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
