"""Vectors of int32 over the threads of a warpgroup, each thread's elements its own to look up, write and compute.

Pallas loads and stores slices; here every thread has an index of its own, as in a CUDA kernel. In terms of Mosaic
GPU's own fragments; seen to work with jax 0.11.2 and 0.12.0.
"""

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
Index = Any
"""[n] int32, or an int, for each dimension; a tuple of them unless there is one."""


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


def gather(ref: Any, index: Index, interpret: Interpreter | None) -> Any:
    """[n] int32, `ref[index]` in shared or global memory. All of the indices must be in range."""
    index = index if isinstance(index, tuple) else (index,)
    if interpret is not None:
        for extreme in (jnp.min, jnp.max):  # so that the interpreter sees them if they are out of range
            ref[tuple(x if isinstance(x, int) else extreme(x) for x in index)]
        return ref[...][index]
    vectors = [x for x in index if not isinstance(x, int)]
    layout = lanes(vectors[0].shape[0])

    def load(_: Any, ref: Any, *vectors: Any) -> Any:
        registers = np.empty_like(vectors[0].registers)
        for at in np.ndindex(registers.shape):
            number = memref.load(ref, _place(index, vectors, at))
            registers[at] = vector.broadcast(ir.VectorType.get((1,), number.type), number)
        return mgpu.FragmentedArray(_registers=registers, _layout=vectors[0].layout, _is_signed=True)

    result = plgpu.ShapeDtypeStruct(vectors[0].shape, jnp.dtype(jnp.int32), layout=layout)
    arguments = (plgpu.RefType(), *(layout for _ in vectors))
    return plgpu.inline_mgpu(arg_types=arguments, return_type=result)(load)(ref, *vectors)


def scatter(ref: Any, index: Index, values: Any, chosen: Any, interpret: Interpreter | None) -> None:
    """`ref[index] = values` for the elements chosen, whose indices must be in range.

    Args:
      values, chosen: [n] int32 and bool.
    """
    index = index if isinstance(index, tuple) else (index,)
    chosen = jnp.where(chosen, 1, 0)
    if interpret is not None:

        def one(i: Any, _: None) -> None:
            where = tuple(x if isinstance(x, int) else x[i] for x in index)
            pl.when(chosen[i] == 1)(lambda: ref.__setitem__(where, values[i]))

        lax.fori_loop(0, values.shape[0], one, None)
        return
    vectors = [x for x in index if not isinstance(x, int)]
    layout = lanes(values.shape[0])

    def save(_: Any, ref: Any, values: Any, chosen: Any, *vectors: Any) -> None:
        for at in np.ndindex(values.registers.shape):
            wanted = _element(chosen.registers[at])
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ne, wanted, mgpu.c(0, wanted.type))):
                memref.store(_element(values.registers[at]), ref, _place(index, vectors, at))

    arguments = (plgpu.RefType(), *(layout for _ in (values, chosen, *vectors)))
    plgpu.inline_mgpu(arg_types=arguments)(save)(ref, values, chosen, *vectors)


def prefix_sum(x: Any, scratch: Any, interpret: Interpreter | None) -> Any:
    """[n] int32: each element's sum with all before it.

    Args:
      x: [n] int32, n up to `MOST_SCANNED`.
      scratch: shared memory [n + WARPGROUP] int32, which no thread may still be reading.
    """
    n = x.shape[0]
    warps = n // WARP
    sums, lane = _warp_sums(x, interpret), indices(WARPGROUP) % WARP
    store(scratch.at[pl.ds(0, n)], sums)
    plgpu.commit_smem()
    # Every warp adds up the warps' sums: there are no more of them than it has lanes.
    last = gather(scratch, jnp.minimum(lane, warps - 1) * WARP + (WARP - 1), interpret)
    store(scratch.at[pl.ds(n, WARPGROUP)], _warp_sums(last, interpret))
    plgpu.commit_smem()
    warp = lax.div(indices(n), jnp.int32(WARP))
    before = gather(scratch, n + jnp.maximum(warp - 1, 0), interpret)
    return sums + jnp.where(warp > 0, before, 0)


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


def _place(index: tuple[Any, ...], vectors: list[Any], at: tuple[int, ...]) -> list[Any]:
    """Where in memory a register's element is looked up or written."""
    of_vectors, where = iter(vectors), ir.IndexType.get()
    return [
        mgpu.c(x, where) if isinstance(x, int) else arith.index_cast(where, _element(next(of_vectors).registers[at]))
        for x in index
    ]
