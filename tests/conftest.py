"""Fixtures that several folders of tests use."""

from typing import Any

import jax
import pytest


@pytest.fixture
def hopper() -> Any:
    """The GPU that the kernels are written for; the test is skipped where there is none."""
    device = jax.devices()[0]
    if device.platform != "gpu" or device.compute_capability != "9.0":
        pytest.skip(f"needs a Hopper GPU, got {device.device_kind} ({device.platform})")
    return device
