"""Pairs of blocks to copy, made safe for CTAs that copy them at once and in no order."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPairs:
    """Which block each target gets; no target occurs twice.

    Attributes:
      source: [n] int32.
      target: [n] int32, -1 for a pair to be skipped.
      overwritten: [n] int32, 1 where the source is also a target, and so is to be set aside first; None when it is
        known that none are.
      any_overwritten: [] int32, 1 or 0; None likewise.
    """

    source: Any
    target: Any
    overwritten: Any
    any_overwritten: Any


def block_pairs(src_to_dst: Any, num_source: int, num_target: int, *, within: bool) -> BlockPairs:
    """Pairs of which the last one counts for a target, and those with a block out of range don't.

    Args:
      src_to_dst: [n, 2] integers; in NumPy what there is to know is known now, else as the program runs.
      within: whether source and target are one cache, so that a source may be overwritten.
    """
    xp = np if isinstance(src_to_dst, np.ndarray) else jnp
    src, dst = src_to_dst[:, 0], src_to_dst[:, 1]
    valid = (src >= 0) & (src < num_source) & (dst >= 0) & (dst < num_target)
    order = xp.arange(1, src.shape[0] + 1, dtype=xp.int32)
    src = xp.where(valid, src, 0).astype(xp.int32)
    dst = xp.where(valid, dst, num_target).astype(xp.int32)
    last = _last_of_each(dst, order, num_target)
    kept = valid & (last[dst] == order)
    if not within:
        return BlockPairs(src, xp.where(kept, dst, -1), None, None)
    kept &= src != dst
    overwritten = kept & (last[src] > 0)
    target = xp.where(kept, dst, -1)
    if xp is np and not overwritten.any():
        return BlockPairs(src, target, None, None)
    return BlockPairs(src, target, overwritten.astype(xp.int32), overwritten.any().astype(xp.int32))


def _last_of_each(dst: Any, order: Any, num_target: int) -> Any:
    """[num_target + 1], the largest `order` that each target has, 0 without any."""
    if isinstance(dst, np.ndarray):
        last = np.zeros(num_target + 1, np.int32)
        np.maximum.at(last, dst, order)
        return last
    return jnp.zeros(num_target + 1, jnp.int32).at[dst].max(order)
