"""Fixtures of the bridge's tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def cuda() -> Iterator[None]:
    """A Hopper GPU that PyTorch can use; the test is skipped where there is none."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA here")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"needs a Hopper GPU, got {torch.cuda.get_device_name()}")
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()
