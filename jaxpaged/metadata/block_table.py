"""Block tables, which map a request's logical blocks to physical ones, and their inverse."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.metadata.checks import as_int32_indices, check_positive, check_shape, on_host


def blocks_needed(seq_lens: Any, block_size: int) -> Any:
    """The number of blocks that sequences of these lengths fill, the last one perhaps in part.

    Args:
      seq_lens: an int, a list, or an integer array of any shape; 0 or more.
      block_size: tokens a block.

    Returns:
      An int for an int, else an integer array of the shape of `seq_lens`.

    Raises:
      TypeError, ValueError: `seq_lens` is no integer or below 0 (read where it lies on the host), or `block_size` is
        not a positive int.
    """
    check_positive("block_size", block_size)
    if isinstance(seq_lens, int) and not isinstance(seq_lens, bool):
        if seq_lens < 0:
            raise ValueError(f"seq_lens: expected lengths of 0 or more, got {seq_lens}")
        return -(-seq_lens // block_size)
    lens = seq_lens if isinstance(seq_lens, jax.Array) else np.asarray(seq_lens)
    if isinstance(seq_lens, list | tuple) and not len(seq_lens):
        lens = lens.astype(np.int32)
    _check_integers("seq_lens", lens)
    if on_host(lens) and np.any(np.asarray(lens) < 0):
        raise ValueError(f"seq_lens: expected lengths of 0 or more, got {np.asarray(lens).min()}")
    # Unlike (n + block_size - 1) // block_size this can't overflow.
    return lens // block_size + (lens % block_size != 0)


def physical_to_logical(
    block_table: Any,
    num_blocks: int,
    *,
    seq_lens: Any = None,
    block_size: int | None = None,
    reserve_block_zero: bool = False,
) -> Any:
    """The inverse of a block table: where in a request's sequence each physical block stands.

    Pure and traceable: under `jit`, `num_blocks` and `block_size` are static.

    Args:
      block_table: [num_reqs, max_blocks_per_req] int, the physical block of each logical block. Entries below 0 or from
        `num_blocks` on are ignored. Of several entries of a row that name one block the last counts.
      num_blocks: number of physical blocks.
      seq_lens: [num_reqs] int. With it and `block_size` only the first `blocks_needed(seq_lens, block_size)` entries of
        a row count, and what comes after them may be anything. Without it every entry counts.
      block_size: tokens a block.
      reserve_block_zero: physical block 0 belongs to no request, whatever the table says: for engines that keep it as a
        null block and pad their tables with 0.

    Returns:
      [num_reqs, num_blocks] int32, -1 for blocks that are not in the request's row.

    Raises:
      TypeError, ValueError: an argument has the wrong dtype or shape, or of `seq_lens` and `block_size` one is missing.
    """
    check_positive("num_blocks", num_blocks)
    table = block_table if isinstance(block_table, jax.Array) else np.asarray(block_table)
    _check_integers("block_table", table)
    check_shape("block_table", table.shape, ("num_reqs", "max_blocks_per_req"))
    num_reqs, width = table.shape
    if (seq_lens is None) != (block_size is None):
        missing = "seq_lens" if seq_lens is None else "block_size"
        raise ValueError(f"{missing}: expected seq_lens and block_size, or neither, got None")
    used = None
    if seq_lens is not None:
        used = blocks_needed(seq_lens, check_positive("block_size", block_size))
        check_shape("seq_lens", used.shape, (num_reqs,))
        used = used.clip(max=width).astype(np.int32)
    return _inverse(as_int32_indices(table), used, int(num_blocks), bool(reserve_block_zero))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _inverse(table: Any, used: Any, num_blocks: int, reserve_block_zero: bool) -> Any:
    num_reqs, width = table.shape
    logical = jnp.arange(width, dtype=jnp.int32)
    valid = (table >= 0) & (table < num_blocks)
    if used is not None:
        valid &= logical < used[:, None]
    # An index past the end is dropped; a negative one would wrap around. With a maximum their order can't matter.
    target = jnp.where(valid, table, num_blocks)
    inverse = jnp.full((num_reqs, num_blocks), -1, jnp.int32)
    inverse = inverse.at[jnp.arange(num_reqs)[:, None], target].max(logical, mode="drop")
    return inverse.at[:, 0].set(-1) if reserve_block_zero else inverse


def _check_integers(name: str, x: Any) -> None:
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {x.dtype}")
