"""Steps on registers that Pallas has no operation for, in terms of Mosaic GPU's own fragments.

Seen to work with jax 0.11.2 and 0.12.0.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from jaxpaged.pallas.mosaic import Interpreter

ROWS = 64
"""Of an operand of wgmma that a warpgroup holds in registers."""
STEP = 16
"""Columns of it that one wgmma sums over."""


def tiled_layout(tiling: tuple[tuple[int, ...], ...], warp: int, lanes: tuple[int, ...]) -> Any:
    """A layout of registers whose last tile is a vector; `warp` and `lanes` are dimensions, from the end, of the tiled
    array: which of them says the warp, and which the lane."""
    layout = mgpu.TiledLayout(plgpu.Tiling(tiling), (warp,), lanes, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def by_16_bytes(columns: int) -> Any:
    """A layout of [n * ROWS, columns] 8-bit numbers, for 64 columns or 128.

    Rows are spread over threads as wgmma wants those of its operand, but each of the four threads of a row has all its
    columns side by side: 16 come in one load, where wgmma's own order takes eight.
    """
    return tiled_layout(((ROWS, columns), (16, columns), (8, columns), (1, columns // 4), (1, 16)), -10, (-6, -5))


def permuted_columns(x: Any, columns: int) -> Any:
    """`x` [.., n * columns] in the order of columns that `as_operand` leaves."""
    split = x.reshape(*x.shape[:-1], -1, 4, columns // STEP, 2, 2)  # thread, step, half of the step, column
    return jnp.moveaxis(split, -4, -2).reshape(x.shape)


def as_operand(x: Any, interpret: Interpreter | None) -> Any:
    """`x` [n * ROWS, columns] of 16 bits in `by_16_bytes` as wgmma takes it, with its columns as `permuted_columns`.

    Nothing moves: columns are summed over, and so may come in any order that both operands share.
    """
    columns = x.shape[1]
    if interpret is not None:
        return permuted_columns(x, columns)

    def reinterpret(_: Any, x: Any) -> Any:
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(x.shape), dtype=object)
        pairs = registers.reshape(-1, columns // 8, 2)  # tiles of rows, columns by eights, and rows g and g + 8
        pair = ir.VectorType.get((2,), x.mlir_dtype)
        for (tile, half, part), wide in np.ndenumerate(x.registers.reshape(-1, 2, columns // 64)):
            for i in range(8):
                narrow = vector.extract_strided_slice(pair, wide, [2 * i], [2], [1])
                pairs[tile, 8 * part + i, half] = narrow
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=(by_16_bytes(columns),), return_type=result)(reinterpret)(x)


def by_four(columns: int) -> Any:
    """A layout of [8 * n, columns] numbers, for 64 columns or 128: a thread has four side by side of each 64."""
    return tiled_layout(((8, columns), (8, columns // 4), (8, STEP), (8, 4), (1, 4)), -5, (-4, -9))


BY_TWO = tiled_layout(((8, 64), (8, STEP), (8, 8), (1, 2)), -7, (-4, -3))
"""A layout of [8 * n, 64 * m] numbers in which a thread has what it has in `by_four` of other columns."""


def as_permuted(x: Any, interpret: Interpreter | None) -> Any:
    """`permuted_columns` of `x` [8 * n, columns] of 16 bits in `by_four`, in `BY_TWO`: nothing moves."""
    columns = x.shape[1]
    if interpret is not None:
        return permuted_columns(x, columns)

    def reinterpret(_: Any, x: Any) -> Any:
        layout = BY_TWO.to_mgpu()
        registers = np.empty(layout.registers_shape(x.shape), dtype=object)
        halves = registers.reshape(-1, 2)
        pair = ir.VectorType.get((2,), x.mlir_dtype)
        for at, four in enumerate(x.registers.flat):
            for half in range(2):
                halves[at, half] = vector.extract_strided_slice(pair, four, [2 * half], [2], [1])
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=BY_TWO)
    return plgpu.inline_mgpu(arg_types=(by_four(columns),), return_type=result)(reinterpret)(x)


def int8_as_float16(x: Any, layout: Any, interpret: Interpreter | None) -> Any:
    """`x` int8 in `layout` as float16, exactly, by five instructions for four numbers.

    A byte with its sign turned around is the last one of a float16 that is 1152 more; bfloat16 has too few bits for it.
    """
    if interpret is not None:
        return x.astype(jnp.float16)

    return _by_register(_halves, jnp.float16, layout, x)


BYTES_AS_HALVES = """{ .reg .b32 low;
prmt.b32 low, $1, $2, %s;
sub.f16x2 $0, low, $3; }"""


def _halves(numbers: Any) -> Any:
    """A vector of int8 as one of float16."""
    i32, count = ir.IntegerType.get_signless(32), ir.VectorType(numbers.type).shape[0]
    words = vector.bitcast(ir.VectorType.get((count // 4,), i32), numbers)
    signs, high, more = (mgpu.c(bits, i32) for bits in (-0x7F7F7F80, 0x64646464, 0x64806480))
    halves = llvm.mlir_undef(ir.VectorType.get((count // 2,), i32))
    for i in range(count // 2):
        word = llvm.extractelement(words, mgpu.c(i // 2, i32))
        ptx = BYTES_AS_HALVES % ("0x4342" if i % 2 else "0x4140")
        pair = llvm.inline_asm(i32, [arith.xori(word, signs), high, more], ptx, "=r,r,r,r")
        halves = llvm.insertelement(halves, pair, mgpu.c(i, i32))
    return vector.bitcast(ir.VectorType.get((count,), ir.F16Type.get()), halves)


def divide(x: Any, y: Any, layout: Any, interpret: Interpreter | None) -> Any:
    """`x / y` rounded as IEEE 754 says, float32 in `layout`.

    What Mosaic makes of a plain division depends on settings of LLVM's that XLA changes for the whole process once it
    has compiled something itself.
    """
    if interpret is not None:
        return x / y
    return _each("div.rn.f32 $0, $1, $2;", layout, x, y)


def divide_short(x: Any, y: Any, y_layout: Any, layout: Any, interpret: Interpreter | None) -> Any:
    """`x / y` that rounds to 8 bits as the quotient does, by two instructions an element where `divide` takes a dozen.

    The inverse of `y` is kept in two parts. All mantissas of `x` and `y` were tried: 118 of 2**33 quotients are not
    rounded as IEEE 754 says, in the last place, and none of them at half between two numbers of at most 8 bits.

    Args:
      x: float32 in `layout`, of at most 11 significant bits: float16 has as many, bfloat16 fewer.
      y: float32 in `y_layout`, positive, at most 2**100: a scalar or [rows], one for each row of `x`.
    """
    if interpret is not None:
        return x / along_rows(y, x.shape, layout)
    high = _each("rcp.rz.f32 $0, $1;", y_layout, y)
    low = _each(LOW_PART, y_layout, y, high)
    parts = [along_rows(part, x.shape, layout) for part in (high, low)]
    return _each("{ .reg .f32 t; mul.rn.f32 t, $1, $3; fma.rn.f32 $0, $1, $2, t; }", layout, x, *parts)


def along_rows(y: Any, shape: tuple[int, ...], layout: Any) -> Any:
    """A scalar, or a number for each row, as an array in `layout`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(y, shape, [0]) if y.ndim else jnp.full(shape, y), layout)


LOW_PART = """{ .reg .f32 e, t;
neg.f32 t, $1;
fma.rn.f32 e, $2, t, 0f3F800000;
mul.rn.f32 t, e, $2;
fma.rp.f32 t, t, e, t;
abs.f32 t, t;
max.f32 t, t, 0f00800000;
copysign.f32 $0, $2, t; }"""
"""What is left of the inverse `$2` of `$1`, rounded up; never 0, which infinity times 0 would make NaN: 2**-126 is lost
in any sum. Its sign is the inverse's, so that 0 keeps its own."""


def _each(ptx: str, layout: Any, *arrays: Any) -> Any:
    """PTX for each element of float32 arrays of one shape and layout, `$1`, `$2` and so on; `$0` is the result."""

    return _by_register(lambda *registers: _assembled(ptx, registers), jnp.float32, layout, *arrays)


def _by_register(function: Callable[..., Any], dtype: Any, layout: Any, *arrays: Any) -> Any:
    """What a function makes of the registers of arrays of one shape and layout, one of each at a time."""

    def run(_: Any, *operands: Any) -> Any:
        registers = np.empty_like(operands[0].registers)
        for index in np.ndindex(registers.shape):
            registers[index] = function(*(x.registers[index] for x in operands))
        return mgpu.FragmentedArray(_registers=registers, _layout=operands[0].layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(arrays[0].shape, jnp.dtype(dtype), layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,) * len(arrays), return_type=result)(run)(*arrays)


def _assembled(ptx: str, registers: Sequence[Any]) -> Any:
    """PTX on registers, or on the elements of vectors of them."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    constraints = ",".join(["=f", *"f" * len(registers)])
    if not isinstance(registers[0].type, ir.VectorType):
        return llvm.inline_asm(f32, registers, ptx, constraints)
    result = llvm.mlir_undef(registers[0].type)
    for i in range(ir.VectorType(registers[0].type).shape[0]):
        at = mgpu.c(i, i32)
        element = llvm.inline_asm(f32, [llvm.extractelement(x, at) for x in registers], ptx, constraints)
        result = llvm.insertelement(result, element, at)
    return result


def reduced(
    op: str, x: Any, scratch: Any, interpret: Interpreter | None, axis: int = 0, layout: Any = plgpu.Layout.WGMMA
) -> Any:
    """The "max" or the sum ("add") along an axis of a matrix, float32, in a layout.

    Args:
      scratch: shared memory [numbers] float32 for the warps to meet in, which Mosaic's own reductions take from one
        place for all warpgroups.
    """
    if interpret is not None:
        return x.max(axis=axis) if op == "max" else x.sum(axis=axis)

    def reduce(_: Any, x: Any, scratch: Any) -> Any:
        return x.reduce(op, axis, scratch)

    result = plgpu.ShapeDtypeStruct((x.shape[1 - axis],), x.dtype, layout=layout.reduce(axis))
    return plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=result)(reduce)(x, scratch)


BY_ROW = plgpu.Layout.WGMMA.reduce(1)
"""How one number for each row of wgmma's result lies in registers."""


def columns_in_turn(ref: Any, width: int, first: Any, count: int, interpret: Interpreter | None) -> Any:
    """Columns `first` to `first + count` of a matrix, one after the other, numbers of 32 bits in `BY_ROW`.

    Args:
      ref: the matrix [n * ROWS / count, width] in shared memory, in row-major order, in two axes of any size.
    """
    if interpret is not None:
        matrix = ref[...].reshape(-1, width)
        return jnp.concatenate([matrix[:, first + i] for i in range(count)])

    def gather(_: Any, ref: Any, first: Any) -> Any:
        layout, index = mgpu.WGMMA_ROW_LAYOUT, ir.IndexType.get()
        matrix, by = mgpu.memref_reshape(ref, (height, width)), mgpu.c(height, index)
        registers = np.empty(layout.registers_shape(rows), dtype=object)
        start = arith.index_cast(index, first.registers.item())
        for at, (row,) in zip(np.ndindex(registers.shape), layout.thread_idxs(rows), strict=True):
            where = arith.addi(start, arith.divui(row, by))
            number = memref.load(matrix, [arith.remui(row, by), where])
            registers[at] = vector.broadcast(ir.VectorType.get((1,), number.type), number)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    height = ref.shape[0] * ref.shape[1] // width
    rows = (height * count,)
    result = plgpu.ShapeDtypeStruct(rows, ref.dtype, layout=BY_ROW)
    arguments = (plgpu.RefType(), plgpu.Layout.WG_SPLAT)
    return plgpu.inline_mgpu(arg_types=arguments, return_type=result)(gather)(ref, first)
