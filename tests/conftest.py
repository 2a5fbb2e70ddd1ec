"""Fixtures that several folders of tests use."""

import os
from typing import Any

# Read when JAX's CPU backend starts. Pallas' interpreter blocks a thread of XLA's pool for each thread of a kernel that
# waits at a barrier; where there are fewer threads than that, for want of cores, all wait for ever.
os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))
os.environ.setdefault("PJRT_NPROC", os.environ["NPROC"])

import jax
import pytest


@pytest.fixture
def hopper() -> Any:
    """The GPU that the kernels are written for; the test is skipped where there is none."""
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        pytest.skip(f"needs a Hopper GPU, got {device.device_kind} ({device.platform})")
    return device
