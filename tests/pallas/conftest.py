"""Fixtures of the kernels' tests."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from jaxpaged.pallas import decode, prefill
from jaxpaged.pallas.decode_shape import DecodeShape
from jaxpaged.pallas.mosaic import interpreted
from jaxpaged.pallas.prefill_shape import PrefillShape
from jaxpaged.pallas.tuning import gpu_of, tuned_for
from tests.pallas.plain_copies import PlainCopies, plain_copies


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlainCopies]:
    """Plain copies of the kernels that a test lowers: none may begin at any address, or go on past a row's end."""
    with plain_copies(monkeypatch) as copies:
        yield copies
    assert copies.faults() == []


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


@pytest.fixture
def complaints(capfd: pytest.CaptureFixture[str]) -> Callable[[Callable[[], Any]], tuple[str | None, str]]:
    """What the interpreter says of a call: in an exception, and, of races in jax 0.11, in what it prints."""

    def run(call: Callable[[], Any]) -> tuple[str | None, str]:
        raised = None
        try:
            call()
        except Exception as error:
            raised = str(error)
        return raised, "".join(capfd.readouterr())

    return run


@pytest.fixture
def set_multiprocessors() -> Iterator[Callable[[int], None]]:
    """Sets for how many multiprocessors the kernels share their work: few make few CTAs, which are soon interpreted."""
    with contextlib.ExitStack() as stack:
        yield lambda num_sms: stack.enter_context(tuned_for(dataclasses.replace(gpu_of(), num_sms=num_sms)))


def traced_shapes(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[Any]:
    """The shapes of a module's kernels that are traced from now on."""
    shapes: list[Any] = []
    allocate = module._allocate
    monkeypatch.setattr(
        module, "_allocate", lambda shape, *args, **how: [shapes.append(shape), allocate(shape, *args, **how)][1]
    )
    return shapes


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[DecodeShape]:
    return traced_shapes(monkeypatch, decode)


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[PrefillShape]:
    return traced_shapes(monkeypatch, prefill)
