"""Requests that several CTAs of decode share: who goes on with one leaves a part, and who began it takes all up.

A CTA goes on with a request at the beginning of its share and begins one at its end. So parts are there, as a rule,
when they are wanted (stream-K, Osama et al., 2023), and no second kernel has to combine them. They come through the
ring of keys as tiles do, while the last of those are computed with; those too large for a place in it are read where
they lie. Parts are weighted by their lses, as in flash-decoding (Dao et al., 2023).

A part's flag says that it is there: a number that memory holds by no chance, written by who left the part, and removed
by who takes it up. So nobody has to clear flags, between kernels or before the first. No CTA waits for one that starts
after it, and might find no multiprocessor: the last share is the first CTA's.
"""

import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.decode_shape import DecodeShape
from jaxpaged.pallas.decode_state import Memory, Operands, Piece
from jaxpaged.pallas.decode_teams import BY_ROW, Merged, first_own, joined, load_values
from jaxpaged.pallas.flags import raise_flag, wait_and_lower
from jaxpaged.pallas.mosaic import Interpreter
from jaxpaged.pallas.paged_tiles import CHUNK
from jaxpaged.pallas.ranges import ceil_div


def own_share(shape: DecodeShape) -> Any:
    """The share of this CTA."""
    return shape.num_shares - 1 - lax.axis_index("share")


def place_rows(shape: DecodeShape) -> tuple[int, int]:
    """Rows of a part for which a place in the ring of keys has room, and how many numbers are left over."""
    keys = shape.tiles("key")
    return divmod(keys.tile_rows * keys.chunks * CHUNK * jnp.dtype(keys.dtype).itemsize // 4, shape.columns)


def brings_parts(shape: DecodeShape) -> bool:
    """Whether others' parts come through the ring of keys: each place has room for one, in as many copies as a tile."""
    rows, rest = place_rows(shape)
    most_copies = 2 * shape.tiles("key").copies  # of scales, too
    return rest == 0 and shape.part_rows <= rows and most_copies <= shape.part_rows // 8


def ring_of_keys(shape: DecodeShape, interpret: Interpreter | None) -> dict[str, Any]:
    """The shared memory for keys, and for parts where those come the same way; `ring_views` are of it."""
    keys: Any = shape.tiles("key").smem(interpret)
    if not brings_parts(shape):
        return {"k": keys, "parts_there": plgpu.Barrier()}
    parts = plgpu.SMEM((shape.stages, place_rows(shape)[0], shape.columns), jnp.float32)
    if interpret is not None:  # it takes a read through one view of what another wrote for a fault
        return {"k": keys, "parts": parts}
    return {"k": plgpu.RefUnion(*(keys.refs if isinstance(keys, plgpu.RefUnion) else [keys]), parts)}


def ring_views(shape: DecodeShape, memory: Memory, interpret: Interpreter | None) -> tuple[Any, Any]:
    """The memory for keys as `PagedTiles.views` takes it, and that for parts, or None."""
    if interpret is not None or not brings_parts(shape):
        return memory.k, memory.parts
    *keys, parts = memory.k
    return keys if len(keys) > 1 else keys[0], parts


def bring_parts(
    shape: DecodeShape,
    operands: Operands,
    memory: Memory,
    piece: Piece,
    before: Any,
    interpret: Interpreter | None,
) -> None:
    """Wait for the other parts of a request that begins in this share, and bring them to places of the ring in turn.

    It is for the warp that brings keys, after the piece's own; `before` tiles were in the ring.
    """
    share, head = own_share(shape), lax.axis_index("head")

    @pl.when(piece.others > 0)
    def _wait() -> None:
        wait_and_lower(operands.flags.at[head], share + 1, share + 1 + piece.others, interpret)
        if not brings_parts(shape):
            plgpu.barrier_arrive(memory.parts_there)

    if not brings_parts(shape):
        return
    keys, rows = shape.tiles("key"), shape.part_rows
    copies = keys.copies + (0 if operands.k_scales is None else keys.tile // keys.rows)  # as many as bring a tile
    starts = [8 * (rows // 8 * i // copies) for i in range(copies + 1)]

    def bring(i: Any, _: None) -> None:
        slot = lax.rem(before + i, jnp.int32(shape.stages))
        pl.when(before + i >= shape.stages)(lambda: plgpu.barrier_wait(memory.k_empty.at[slot]))
        other = share + 1 + i
        for start, end in itertools.pairwise(starts):
            some = pl.ds(start, end - start)
            source, target = operands.parts.at[other, head, some, :], memory.parts.at[slot, some, :]
            plgpu.copy_gmem_to_smem(source, target, memory.k_full.at[slot])

    lax.fori_loop(0, piece.others, bring, None)


def take_up(
    shape: DecodeShape,
    operands: Operands,
    memory: Memory,
    piece: Piece,
    before: Any,
    wg: Any,
    state: Merged,
    interpret: Interpreter | None,
) -> Merged:
    """A warpgroup's state of a request that begins in this share with those of the other parts that are its own.

    Args:
      before: tiles that were in the ring before them.
    """
    first = first_own(shape, wg, before) if shape.warpgroups > 1 else jnp.int32(0)

    def take(i: Any, state: Merged) -> Merged:
        part = first + i * shape.warpgroups
        if brings_parts(shape):
            slot = lax.rem(before + part, jnp.int32(shape.stages))
            plgpu.barrier_wait(memory.k_full.at[slot])
            lse, acc = _load(shape, memory.parts.at[slot])
            plgpu.commit_smem()  # threads have read what TMA may write to
            plgpu.barrier_arrive(memory.k_empty.at[slot])
        else:
            lse, acc = _load(shape, operands.parts.at[own_share(shape) + 1 + part, lax.axis_index("head")])
        return joined(state, lse, 1.0, acc)  # a part was divided by its sum

    if not brings_parts(shape):
        pl.when(piece.others > 0)(lambda: plgpu.barrier_wait(memory.parts_there))
    own = ceil_div(jnp.maximum(piece.others - first, 0), jnp.int32(shape.warpgroups))
    return lax.fori_loop(0, own, take, state)


def leave_part(shape: DecodeShape, operands: Operands, memory: Memory, lse: Any, interpret: Interpreter | None) -> None:
    """Send this share's part, whose output and lses are in shared memory, and say when it is there."""
    share, head = own_share(shape), lax.axis_index("head")
    part = operands.parts.at[share, head]
    plgpu.copy_smem_to_gmem(memory.o[1], part.at[pl.ds(0, shape.padded_v_size), :])
    plgpu.copy_smem_to_gmem(lse, part.at[shape.padded_v_size])
    plgpu.wait_smem_to_gmem(0)
    raise_flag(operands.flags.at[head, share], interpret)


def _load(shape: DecodeShape, part: Any) -> tuple[Any, list[Any]]:
    """A part's lses and output."""
    lse = plgpu.load(part.at[shape.padded_v_size], layout=BY_ROW, optimized=False)
    return lse, list(load_values(shape, part))
