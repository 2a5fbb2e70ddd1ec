"""Whether tensors are such as others were: types, dtypes, shapes, strides, devices and gradients, in one call of C++.

Read in Python these take longer than a launch. The comparison is the one by which `torch.compile` guards its programs,
and private to PyTorch; seen to work in 2.11 and 2.14.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

Alike = Callable[..., bool]
"""Given as many tensors as it was made of, whether they are alike, one by one. No tensor may be given twice."""


def alike(*tensors: torch.Tensor) -> Alike:
    """What compares tensors with these, which it doesn't keep alive. In any doubt they are not alike.

    Of a tensor that requires a gradient none is: whether it is refused depends on the thread's mode.
    """
    guards = _guards()
    if guards is None or any(x.requires_grad for x in tensors):
        return never
    # Of a tensor given twice the comparison would say no; another one of the same kind stands in for it.
    others = [x.detach() if any(x is y for y in tensors[:i]) else x for i, x in enumerate(tensors)]
    return guards(*others, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def never(*tensors: Any) -> bool:
    """Nothing is alike: what is remembered is found by a name then."""
    return False


@functools.cache
def _guards() -> Any:
    """PyTorch's class, if it works as known."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards: Any = TensorGuards  # declared without the tensors
        one, two = (torch.zeros(n, device="cpu") for n in (1, 2))
        same = guards(one, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        works = same(one) and not same(two)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None
    return guards if works else None
