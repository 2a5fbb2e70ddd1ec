"""Faults of copies by TMA that no interpreter shows, found while kernels are lowered.

Where what is stored lies side by side in global memory Mosaic takes a plain bulk copy instead of a tensor's: it must
begin at a multiple of 16 bytes, and it ends with the whole array only, not with a row: the next row is overwritten. A
tensor of one axis must begin so, too; else an H200 stops with an illegal instruction. Seen in jax 0.11.2 and 0.12.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from jax.experimental.mosaic.gpu import launch_context, utils

ALIGNMENT = 16
PLAIN_STORE, ONE_AXIS = "cp.async.bulk.global.shared::cta", "cp.async.bulk.tensor.1d."
ONE_AXIS_BEFORE_0_12 = ("cp_async_bulk_tensor_shared_cluster_global", "cp_async_bulk_tensor_global_shared_cta")


@dataclasses.dataclass(frozen=True)
class PlainCopy:
    """Attributes:
    shape, size: of the array in global memory and of what is copied, a number for each axis.
    starts: where it begins along each axis, None where that is computed.
    misaligned: axes along which it may begin elsewhere than at a multiple of 16 bytes.
    """

    shape: tuple[int, ...]
    size: tuple[int, ...]
    starts: tuple[int | None, ...]
    misaligned: tuple[int, ...]

    @property
    def outer(self) -> int:
        """The first axis along which there is more than one: past its end is the end of the array."""
        return next((i for i, n in enumerate(self.shape) if n > 1), len(self.shape))


def constant(x: Any) -> int | None:
    """Of MLIR's number, if it is one."""
    while isinstance(x.owner, launch_context.arith.IndexCastOp):
        x = x.owner.in_
    return x.owner.literal_value if isinstance(x.owner, launch_context.arith.ConstantOp) else None


class PlainCopies:
    """Plain copies of kernels that are lowered, in turn."""

    def __init__(self) -> None:
        self.found: list[PlainCopy] = []

    def add(self, local: dict[str, Any]) -> None:
        """Note a copy, from the variables of `LaunchContext.async_copy`."""
        shape, size = tuple(local["ref_ty"].shape), tuple(local["slice_shape"])
        strides = [math.prod(shape[i + 1 :]) * local["element_bitwidth"] // 8 for i in range(len(shape))]
        steps = [ALIGNMENT // math.gcd(ALIGNMENT, stride) for stride in strides]
        starts = local["dyn_base_indices"]
        aligned = [utils.is_known_divisible(x, step) for x, step in zip(starts, steps, strict=True)]
        misaligned = tuple(i for i, x in enumerate(aligned) if not x and size[i] < shape[i])  # whole axes begin at 0
        self.found.append(PlainCopy(shape, size, tuple(map(constant, starts)), misaligned))

    def faults(self) -> list[str]:
        """Of copies that may begin at any address, and of ones past an axis' end with none for what is left."""
        sizes: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for copy in self.found:
            sizes.setdefault(copy.shape, set()).add(copy.size)
        found = [f"misaligned: {copy}" for copy in self.found if copy.misaligned]
        for copy in self.found:
            for axis, (n, size) in enumerate(zip(copy.shape, copy.size, strict=True)):
                if axis == copy.outer or n == 1:
                    continue
                start = copy.starts[axis]
                if n % size == 0 if start is None else start + size <= n:
                    continue
                rest = (*copy.size[:axis], n % size, *copy.size[axis + 1 :])
                if start is not None or size > n or rest not in sizes[copy.shape]:
                    found.append(f"past the end of axis {axis}: {copy}")
        return found


class Watched:
    """A module of MLIR's operations, of which some functions are replaced."""

    def __init__(self, module: Any, **replaced: Callable[..., Any]) -> None:
        self.__dict__ |= replaced
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def plain_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlainCopies]:
    """The plain copies, and those of tensors of one axis, of kernels that are lowered within it."""
    copies, llvm, nvvm = PlainCopies(), launch_context.llvm, launch_context.nvvm

    def inline_asm(result: Any, operands: Any, text: str, *args: Any, **how: Any) -> Any:
        if PLAIN_STORE in text or ONE_AXIS in text:
            copies.add(sys._getframe(1).f_locals)
        return llvm.inline_asm(result, operands, text, *args, **how)

    def copy(name: str, target: Any, source: Any, indices: Any, *args: Any, **how: Any) -> Any:
        if len(indices) == 1:
            copies.add(sys._getframe(1).f_locals)
        return getattr(nvvm, name)(target, source, indices, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(launch_context, "llvm", Watched(llvm, inline_asm=inline_asm))
        tensors = {name: functools.partial(copy, name) for name in ONE_AXIS_BEFORE_0_12}
        patch.setattr(launch_context, "nvvm", Watched(nvvm, **tensors))
        yield copies
