"""The comparison by which most calls find what they launch: all that a kernel could trip over makes a difference."""

import gc
import sys
import types
import weakref
from typing import Any

import pytest
import torch

from jaxpaged.bridge import alike as module
from jaxpaged.bridge.alike import alike


def x() -> torch.Tensor:
    return torch.zeros(6, 4, 8, dtype=torch.bfloat16)


OTHERS: dict[str, Any] = {
    "dtype": lambda: x().half(),
    "size": lambda: torch.zeros(6, 4, 9, dtype=torch.bfloat16),
    "fewer": lambda: x()[:5],
    "axes": lambda: x()[None],
    "strides": lambda: torch.zeros(4, 6, 8, dtype=torch.bfloat16).transpose(0, 1),
    "gaps": lambda: torch.zeros(6, 5, 8, dtype=torch.bfloat16)[:, :4],
    "device": lambda: torch.zeros(6, 4, 8, dtype=torch.bfloat16, device="meta"),
    "grad": lambda: x().requires_grad_(),
    "kind": lambda: torch.nn.Parameter(x(), requires_grad=False),
    "sparse": lambda: x().to_sparse(),
    "negative": lambda: torch._neg_view(x()),
    "no tensor": lambda: None,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_difference_is_seen(name: str) -> None:
    same = alike(x(), x())
    assert same(x(), x())
    assert same(x()[:], torch.ones(7, 4, 8, dtype=torch.bfloat16)[1:])  # what they hold, and where, is not compared
    other = OTHERS[name]()
    assert not same(x(), other)
    assert not same(other, x())


def test_a_tensor_that_was_changed_in_place_is_another() -> None:
    tensor = x()
    same = alike(tensor)
    assert same(tensor)
    tensor.transpose_(0, 1)
    assert not same(tensor)
    tensor.transpose_(0, 1)
    tensor.data = torch.zeros(3)
    assert not same(tensor)


def test_a_tensor_that_requires_grad_is_like_none() -> None:
    tensor = x().requires_grad_()
    with torch.no_grad():
        same = alike(tensor)
        assert not same(tensor)
    assert not same(tensor)


def test_a_tensor_given_twice_is_told_from_two() -> None:
    tensor = x()
    same = alike(tensor, tensor)
    assert same(x(), x())
    assert not same(tensor, tensor)


def test_tensors_are_not_kept_alive() -> None:
    tensor = x()
    gone = weakref.ref(tensor)
    same = alike(tensor)
    del tensor
    gc.collect()
    assert gone() is None
    assert same(x())


class Changed:
    """A class of that name that would take other arguments, or find all tensors alike."""

    def __init__(self, *tensors: torch.Tensor, **known: None):
        self.check = lambda *others: True


@pytest.mark.parametrize("found", [None, Changed, lambda tensors: None])
def test_without_the_known_comparison_nothing_is_alike(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    guards = types.ModuleType("torch._C._dynamo.guards")
    if found is not None:
        guards.TensorGuards = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", guards)
    module._guards.cache_clear()
    try:
        assert not alike(x())(x())
    finally:
        module._guards.cache_clear()


def test_the_installed_pytorch_has_it() -> None:
    """If this fails after an upgrade, calls still work, at more microseconds."""
    assert module._guards() is not None
