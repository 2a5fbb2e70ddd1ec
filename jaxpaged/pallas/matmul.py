"""Products on the tensor cores with operands in shared memory or registers, and their stand-ins when interpreting."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.mosaic import Interpreter


def transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


def _nothing() -> None:
    pass


def dot(
    pairs: Sequence[tuple[Any, Any]],
    shape: tuple[int, int],
    interpret: Interpreter | None,
    meanwhile: Callable[[], None] = _nothing,
) -> Any:
    """The sum of `a @ b` over pairs, float32 of `shape` in registers; b, and a perhaps, are refs to shared memory.

    Args:
      meanwhile: called when the products are on their way.
    """
    if interpret is not None:
        result = sum(_product(a, b) for a, b in pairs)
        _as_by_the_tensor_cores()
        meanwhile()
        return result

    def accumulate(acc_ref: Any) -> Any:
        for a, b in pairs:
            plgpu.wgmma(acc_ref, a, b)
        meanwhile()
        return acc_ref[...]

    return pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32))


def dot_onto(
    accs: Sequence[Any],
    a: Any,
    bs: Sequence[Any],
    interpret: Interpreter | None,
    meanwhile: Callable[[], None] = _nothing,
) -> tuple[Any, ...]:
    """Each of `accs` plus `a @ b`, with one `a` for all, or one for each of `bs` where it is a list; likewise."""
    lhs = a if isinstance(a, list) else [a] * len(bs)
    if interpret is not None:
        result = tuple(acc + _product(x, b) for acc, x, b in zip(accs, lhs, bs, strict=True))
        _as_by_the_tensor_cores()
        meanwhile()
        return result

    def accumulate(acc_refs: Any) -> None:
        for acc_ref, x, b in zip(acc_refs, lhs, bs, strict=True):
            plgpu.wgmma(acc_ref, x, b)
        meanwhile()

    return pl.run_state(accumulate)(tuple(plgpu.ACC.init(acc) for acc in accs))


def _as_by_the_tensor_cores() -> None:
    """Let reads of shared memory count as wgmma's, which need no fence between them and TMA's writes."""
    plgpu.commit_smem()


def _product(a: Any, b: Any) -> Any:
    # The interpreter runs wgmma on refs alone, and not within run_state.
    return jnp.dot(a[...].astype(jnp.float32), b[...].astype(jnp.float32))
