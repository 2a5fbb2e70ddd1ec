"""PTX in a kernel, for what Pallas has no word for.

Seen to work with jax 0.11.2 and 0.12.0.
"""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm


def inline(ptx: str, ref: Any, *numbers: Any) -> None:
    """Run PTX in all threads, on the address of a ref, `$0`, and perhaps on numbers of 32 bits, `$1` and so on."""

    def run(_: Any, *operands: Any) -> None:
        _assembled("!llvm.void", ptx, operands, "")

    plgpu.inline_mgpu(arg_types=_types(numbers))(run)(ref, *numbers)


def inline_number(ptx: str, ref: Any, *numbers: Any) -> Any:
    """As `inline`, for an int32 `$0`, one of a warp; the address is `$1`, numbers are `$2` and so on."""
    result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)

    def run(_: Any, *operands: Any) -> Any:
        return mgpu.FragmentedArray.splat(_assembled("i32", ptx, operands, "=r,"), (), is_signed=True)

    return plgpu.inline_mgpu(arg_types=_types(numbers), return_type=result)(run)(ref, *numbers)


def _types(numbers: Any) -> tuple[Any, ...]:
    return (plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * len(numbers))


def _assembled(result: str, ptx: str, operands: Any, constraint: str) -> Any:
    ref, *numbers = operands
    values = [mgpu.utils.memref_ptr(ref), *(getattr(x, "registers", x) for x in numbers)]
    values = [x.item() if hasattr(x, "item") else x for x in values]
    constraints = constraint + ",".join(["l", *["r"] * len(numbers), "~{memory}"])
    return llvm.inline_asm(ir.Type.parse(result), values, ptx, constraints, has_side_effects=True)
