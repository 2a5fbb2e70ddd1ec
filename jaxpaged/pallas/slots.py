"""Which tokens of a slot mapping are written at all: work that depends on the batch alone, in XLA."""

from typing import Any

import jax.numpy as jnp

PAIRWISE_LIMIT = 1024
"""Most tokens that are compared with each other (one XLA fusion); more go through an array of every slot's token."""


def last_writes(slot_mapping: Any, num_slots: int) -> Any:
    """The slots, with -1 for tokens that aren't written: out of range, or of a slot that a later token writes, too.

    Tokens are written by many CTAs at once, in no order: two of them in one slot would leave a mixture of both.

    Args:
      slot_mapping: [n] int32 or int64.

    Returns:
      [n] int32. XLA computes it once for all layers that get the same slots.
    """
    tokens = jnp.arange(slot_mapping.shape[0], dtype=jnp.int32)
    valid = (slot_mapping >= 0) & (slot_mapping < num_slots)
    slots = jnp.where(valid, slot_mapping, -1).astype(jnp.int32)
    if slots.shape[0] <= PAIRWISE_LIMIT:
        later = ((slots[:, None] == slots[None, :]) & (tokens[:, None] < tokens[None, :])).any(1)
        return jnp.where(later, -1, slots)
    owner = jnp.zeros(num_slots, jnp.int32).at[jnp.where(valid, slots, num_slots)].max(tokens, mode="drop")
    return jnp.where(valid & (owner[slots] == tokens), slots, -1)
