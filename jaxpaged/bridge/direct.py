"""The operators of `torch_ops.py` for eager code, without PyTorch's dispatcher, which takes as long as a launch.

Each function takes the operator's arguments, by position. Where `torch.compile` traces it, and for tensors that are not
plain ones of a GPU, it calls the operator. What listens in the dispatcher, such as a profiler, sees the kernels alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

from jaxpaged.bridge import torch_ops


def _direct(name: str) -> Callable[..., Any]:
    operator, serving = getattr(torch.ops.jaxpaged, name).default, torch_ops.serving

    def call(first: torch.Tensor, *others: Any) -> Any:
        if type(first) is torch.Tensor and first.is_cuda and not is_compiling():
            return serving[name](first, *others)
        return operator(first, *others)

    call.__name__ = call.__qualname__ = name
    return call


reshape_and_cache = _direct("reshape_and_cache")
"""See `write_calls.write_on_gpu`."""
plan_decode = _direct("plan_decode")
"""See `plan_calls.plan_on_gpu`."""
decode = _direct("decode")
"""See `decode_calls.decode_on_gpu`."""
plan_prefill = _direct("plan_prefill")
"""See `prefill_plan_calls.plan_prefill_on_gpu`."""
prefill = _direct("prefill")
"""See `prefill_calls.prefill_on_gpu`."""
