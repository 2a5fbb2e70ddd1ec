"""The way of a GPU over tensors of the CPU: the operators' CPU implementations stand in for the kernels."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from jaxpaged.bridge import direct

OPERATORS = ("plan_decode", "decode", "plan_prefill", "prefill", "reshape_and_cache")


def take_the_way_of_a_gpu(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> list[str]:
    """Have these modules take tensors of the CPU for a GPU's. Gives a list of the operators called from now on."""
    called: list[str] = []

    def passes(**tensors: Any) -> bool:
        for name, x in tensors.items():
            if x is not None and not isinstance(x, torch.Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        return True

    def recorded(name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.jaxpaged, name)

        def call(*arguments: Any) -> Any:
            called.append(name)
            return operator(*arguments)

        return call

    for module in modules:
        monkeypatch.setattr(module, "on_gpu", passes)
    for name in OPERATORS:
        monkeypatch.setattr(direct, name, recorded(name))
    return called
