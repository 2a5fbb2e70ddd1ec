"""Decode with several computing warpgroups a CTA: who takes which tile, and how their states become one.

Each takes every so many-th tile of a share, with an online softmax of its own; the first merges them when a request, or
the part of it in the share, is over. A warpgroup waits for its products, its warps and its shared memory most of the
time: with more of them a multiprocessor has more to do meanwhile. Two CTAs do the same, as long as threads have the
registers for it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.decode_shape import DecodeShape, reduction_numbers
from jaxpaged.pallas.decode_state import Memory, Softmax
from jaxpaged.pallas.fragments import reduced
from jaxpaged.pallas.mosaic import Interpreter, store
from jaxpaged.pallas.ranges import Loop, ceil_div

BY_ROW = plgpu.Layout.WGMMA.reduce(0)
"""How one number for each row of a request lies in registers: rows are the columns of products."""
PEAK, TOTAL = 0, 1
"""Rows of `Memory.handed_stats`."""
REGISTERS = {2: (216, 72), 3: (152, 56)}
"""Of a thread that computes and of one that loads, by the number of warpgroups that compute."""


class Merged(NamedTuple):
    """Maximum and sum of each row, and its output, transposed, by pieces of the head."""

    peak: Any
    total: Any
    acc: tuple[Any, ...]


def scratch(shape: DecodeShape) -> dict[str, Any]:
    """Shared memory and barriers for what warpgroups hand over."""
    others = shape.warpgroups - 1
    return {
        "reductions": plgpu.SMEM((shape.warpgroups, reduction_numbers(shape.columns)), jnp.float32),
        "handed": plgpu.SMEM((others, shape.padded_v_size, shape.columns), jnp.float32),
        "handed_stats": plgpu.SMEM((others, 2, shape.columns), jnp.float32),
        "handed_over": plgpu.Barrier(num_barriers=others),
        "taken": plgpu.Barrier(),
    }


def first_own(shape: DecodeShape, wg: Any, tiles: Any) -> Any:
    """The first of a piece's tiles, before which `tiles` of the share lie, that is a warpgroup's.

    A place in the ring is always one warpgroup's, since their number divides that of places: each waits for all phases
    of its barriers.
    """
    n = jnp.int32(shape.warpgroups)
    return lax.rem(wg + n - lax.rem(tiles, n), n)


def own_tiles(shape: DecodeShape, first: Any, loop: Loop) -> Loop:
    """Of tiles of a piece those of a warpgroup, the first of which is `first`, counted by themselves."""
    begin, end, how = loop
    begin, end = (ceil_div(jnp.maximum(x - first, 0), jnp.int32(shape.warpgroups)) for x in (begin, end))
    return begin, end, how


def maximum(shape: DecodeShape, memory: Memory, s: Any, interpret: Interpreter | None) -> Any:
    """Of each column; warpgroups need memory of their own for it, where Mosaic would give all of them the same."""
    return s.max(axis=0) if shape.warpgroups == 1 else reduced("max", s, memory.reductions, interpret)


def summed(shape: DecodeShape, memory: Memory, state: Softmax, interpret: Interpreter | None) -> Merged:
    """A warpgroup's state with the sums of its threads added up."""
    total = state.total
    total = total.sum(axis=0) if shape.warpgroups == 1 else reduced("add", total, memory.reductions, interpret)
    return Merged(state.peak, total, state.acc)


def hand_over(shape: DecodeShape, memory: Memory, wg: Any, pieces: Any, state: Merged) -> None:
    """Leave a state to the first warpgroup, when it has taken that of the piece before."""
    mine = wg - 1
    pl.when(pieces > 0)(lambda: plgpu.barrier_wait(memory.taken))
    store(memory.handed_stats.at[mine, PEAK], state.peak)
    store(memory.handed_stats.at[mine, TOTAL], state.total)
    for rows, a in zip(shape.value_rows, state.acc, strict=True):
        store(memory.handed.at[mine, rows, :], a)
    plgpu.barrier_arrive(memory.handed_over.at[mine])


def merge(shape: DecodeShape, memory: Memory, state: Merged) -> Merged:
    """The first warpgroup's state with those of the others."""
    for other in range(shape.warpgroups - 1):
        plgpu.barrier_wait(memory.handed_over.at[other])
        peak, total = (
            plgpu.load(memory.handed_stats.at[other, row], layout=BY_ROW, optimized=False) for row in (PEAK, TOTAL)
        )
        state = joined(state, peak, total, load_values(shape, memory.handed.at[other]))
    plgpu.barrier_arrive(memory.taken)
    return state


def load_values(shape: DecodeShape, ref: Any) -> Iterator[Any]:
    """The output, transposed, that lies in the first rows of some memory, in the pieces of `Merged.acc`."""
    for rows in shape.value_rows:
        yield plgpu.load(ref.at[rows, :], layout=plgpu.Layout.WGMMA, optimized=False)


def joined(state: Merged, peak: Any, total: Any, acc: Iterable[Any]) -> Merged:
    """A state with another one, of which `acc` are the pieces."""
    highest = jnp.maximum(state.peak, peak)
    # Where neither has attended to anything, any finite shift does.
    shift = jnp.where(highest == -jnp.inf, 0.0, highest)
    ours, theirs = jnp.exp2(state.peak - shift), jnp.exp2(peak - shift)
    both = []
    for a, b in zip(state.acc, acc, strict=True):
        ours_of, theirs_of = (lax.broadcast_in_dim(x, a.shape, [1]) for x in (ours, theirs))
        both.append(a * ours_of + b * theirs_of)
    return Merged(highest, state.total * ours + total * theirs, tuple(both))
