"""Fixtures of the kernels' tests."""

from collections.abc import Iterator

import jax
import pytest

from jaxpaged.pallas.mosaic import interpreted


@pytest.fixture(params=["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Within it kernels run: in Pallas' interpreter, which looks for races; and compiled, on a Hopper GPU."""
    if request.param == "compiled":
        request.getfixturevalue("hopper")
        yield
        return
    if jax.default_backend() != "cpu":
        pytest.skip("what the interpreter computes would be XLA's for the GPU, which divides otherwise")
    with interpreted():
        yield
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 says so and goes on
