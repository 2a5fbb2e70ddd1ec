"""Vectors of int32 over the threads of a warpgroup, each thread's elements its own to look up, write and compute.

Pallas loads and stores slices; here every thread has an index of its own, as in a CUDA kernel. In terms of Mosaic
GPU's own fragments; seen to work with jax 0.11.2 and 0.12.0.
"""

from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm, vector

from jaxpaged.pallas.mosaic import Interpreter, store

WARP, WARPGROUP = 32, 128
MOST_SCANNED = WARP * WARP
"""Elements that `prefix_sum` takes."""


def whole(n: int) -> int:
    """The size of a vector with room for `n` elements."""
    return -(-n // WARPGROUP) * WARPGROUP


def lanes(n: int) -> Any:
    """How a vector lies in registers: element i with thread `i % WARPGROUP`."""
    return plgpu.Layout.WG_STRIDED((n,), vec_size=1)


def indices(n: int) -> Any:
    """[n] int32: 0, 1, .."""
    return plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=lanes(n))


def constant(n: int, value: Any) -> Any:
    return plgpu.layout_cast(jnp.full((n,), value, jnp.int32), lanes(n))


def gather(ref: Any, index: Any, interpret: Interpreter | None) -> Any:
    """[n] int32, `ref[index]` in shared or global memory.

    Args:
      index: [n] int32, all in range.
    """
    if interpret is not None:
        seen = _seen(index, ref.shape[0])
        ref[jnp.max(seen)]  # so that the interpreter sees it if one is out of range
        return ref[...][index]

    def load(_: Any, ref: Any, index: Any) -> Any:
        registers = np.empty_like(index.registers)
        for at in np.ndindex(registers.shape):
            number = memref.load(ref, [_place(index, at)])
            registers[at] = vector.broadcast(ir.VectorType.get((1,), number.type), number)
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=True)

    layout = lanes(index.shape[0])
    result = plgpu.ShapeDtypeStruct(index.shape, jnp.dtype(jnp.int32), layout=layout)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=result)(load)(ref, index)


def scatter(ref: Any, index: Sequence[Any], values: Sequence[Any], chosen: Any, interpret: Interpreter | None) -> None:
    """`ref[index, j] = values[j]` for each j and the elements chosen, whose indices must be in range.

    Args:
      index: [n] int32 for each axis but the last one.
      values: [n] int32 each, as many as `ref` has columns.
      chosen: [n] bool.
    """
    chosen = jnp.where(chosen, 1, 0)
    if interpret is not None:
        rows = jnp.stack(values, axis=1)

        def one(i: Any, _: None) -> None:
            where = (*(_seen(x[i], size) for x, size in zip(index, ref.shape, strict=False)), slice(None))
            pl.when(chosen[i] == 1)(lambda: ref.__setitem__(where, rows[i]))

        lax.fori_loop(0, chosen.shape[0], one, None)
        return
    layout = lanes(chosen.shape[0])

    def save(_: Any, ref: Any, chosen: Any, index: Any, values: Any) -> None:
        for at in np.ndindex(chosen.registers.shape):
            wanted = _element(chosen.registers[at])
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ne, wanted, mgpu.c(0, wanted.type))):
                row = [_place(x, at) for x in index]
                for j, x in enumerate(values):
                    memref.store(_element(x.registers[at]), ref, [*row, mgpu.c(j, ir.IndexType.get())])

    arguments = (plgpu.RefType(), layout, [layout for _ in index], [layout for _ in values])
    plgpu.inline_mgpu(arg_types=arguments)(save)(ref, chosen, list(index), list(values))


def prefix_sum(x: Any, scratch: Any, interpret: Interpreter | None) -> tuple[Any, Any]:
    """[n] int32: each element's sum with all before it; and the sum of all.

    Args:
      x: [n] int32, n up to `MOST_SCANNED`.
      scratch: shared memory [n + WARPGROUP] int32.
    """
    n = x.shape[0]
    warps = n // WARP
    sums, lane = _warp_sums(x, interpret), lax.rem(indices(WARPGROUP), jnp.int32(WARP))
    plgpu.commit_smem()  # all threads have read what was there
    store(scratch.at[pl.ds(0, n)], sums)
    plgpu.commit_smem()
    # Every warp adds up the warps' sums: there are no more of them than it has lanes.
    last = gather(scratch, jnp.minimum(lane, warps - 1) * WARP + (WARP - 1), interpret)
    store(scratch.at[pl.ds(n, WARPGROUP)], _warp_sums(last, interpret))
    plgpu.commit_smem()
    warp = lax.div(indices(n), jnp.int32(WARP))
    before = gather(scratch, n + jnp.maximum(warp - 1, 0), interpret)
    return sums + jnp.where(warp > 0, before, 0), scratch[n + warps - 1]


def last_at_most(ref: Any, values: Any, count: int, interpret: Interpreter | None) -> Any:
    """[n] int32: the last place below `count` at which the numbers in `ref`, which never fall, are at most `values`.

    0 where none is.
    """
    found = constant(values.shape[0], 0)
    step = 1 << max((count - 1).bit_length() - 1, 0)
    while step > 0:
        place = found + step
        number = gather(ref, jnp.minimum(place, count - 1), interpret)
        found = jnp.where((place < count) & (number <= values), place, found)
        step //= 2
    return found


def _warp_sums(x: Any, interpret: Interpreter | None) -> Any:
    """As `prefix_sum`, but among the 32 elements that a warp holds together."""
    if interpret is not None:
        return jnp.cumsum(x.reshape(-1, WARP), axis=1).reshape(-1)

    def scan(_: Any, x: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(mgpu.thread_idx(), mgpu.c(WARP, i32))
        registers = np.empty_like(x.registers)
        for at in np.ndindex(registers.shape):
            total = _element(x.registers[at])
            for distance in (1, 2, 4, 8, 16):
                far = mgpu.c(distance, i32)
                below = nvvm.shfl_sync(mgpu.c(-1, i32), total, far, mgpu.c(0, i32), nvvm.ShflKind.up)
                there = arith.cmpi(arith.CmpIPredicate.uge, lane, far)
                total = arith.addi(total, arith.select(there, below, mgpu.c(0, i32)))
            registers[at] = vector.broadcast(ir.VectorType.get((1,), i32), total)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=True)

    layout = lanes(x.shape[0])
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.int32), layout=layout)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(scan)(x)


def _element(register: Any) -> Any:
    """A thread's number in a register."""
    return vector.extract(register, [], [0])


def _place(index: Any, at: tuple[int, ...]) -> Any:
    """Where in memory a register's element is looked up or written."""
    return arith.index_cast(ir.IndexType.get(), _element(index.registers[at]))


def _seen(index: Any, size: int) -> Any:
    """Indices of which the interpreter sees those out of range: it counts those below 0 from the end."""
    return jnp.where(index < 0, size, index)
