"""Slot mappings: which cache slot each new token is written to, and which tokens are written at all."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.metadata.checks import INT32_MAX, check_positive

PAD_SLOT_ID = -1
"""The slot of a token that is not to be written."""
PAIRWISE_LIMIT = 1024
"""Most tokens that are compared with each other (one XLA fusion); more go through an array of every slot's token."""


def request_ids(query_start_loc: Any, num_tokens: int) -> Any:
    """The request that each packed token belongs to.

    Args:
      query_start_loc: [num_reqs + 1] int32, where each request's tokens start.
      num_tokens: length of the result.

    Returns:
      [num_tokens] int32; `num_reqs` for tokens after the last request's.
    """
    xp = _namespace(query_start_loc)
    tokens = xp.arange(num_tokens, dtype=xp.int32)
    return xp.searchsorted(xp.asarray(query_start_loc)[1:], tokens, side="right").astype(xp.int32)


def slot_mapping_from_block_table(
    block_table: Any, seq_lens: Any, query_start_loc: Any, *, block_size: int, num_tokens: int
) -> Any:
    """The slots of the new tokens: token i of a request sits at position `seq_len - query_len + i`.

    Args:
      block_table: [num_reqs, max_blocks_per_req] int32.
      seq_lens: [num_reqs] int32, all tokens of each request.
      query_start_loc: [num_reqs + 1] int32.
      num_tokens: length of the result.

    Returns:
      [num_tokens] int32, `PAD_SLOT_ID` for tokens of no request, at a position below 0 or past the table's width,
      or in a block below 0.
    """
    xp = _namespace(block_table, seq_lens, query_start_loc)
    block_table, seq_lens, starts = (xp.asarray(x) for x in (block_table, seq_lens, query_start_loc))
    num_reqs, width = block_table.shape
    if num_reqs == 0 or width == 0:
        return xp.full((num_tokens,), PAD_SLOT_ID, xp.int32)
    request = request_ids(starts, num_tokens)
    row = xp.minimum(request, num_reqs - 1)
    position = seq_lens[row] - starts[row + 1] + xp.arange(num_tokens, dtype=xp.int32)
    block = block_table[row, xp.clip(position // block_size, 0, width - 1)]
    valid = (request < num_reqs) & (position >= 0) & (position < width * block_size)
    valid &= (block >= 0) & (block < INT32_MAX // block_size)  # a garbage block must not wrap around to a real slot
    return xp.where(valid, block * block_size + position % block_size, PAD_SLOT_ID).astype(xp.int32)


def last_writes(slot_mapping: Any, num_slots: int) -> Any:
    """The slots, without those out of range, and without those that a later token writes, too.

    Kernels, and XLA's scatter on a GPU, write tokens at once and in no order: two of them in one slot would leave
    either, or a mixture of both. So would two blocks copied to one, and so it serves for their targets, too.

    Args:
      slot_mapping: [n] int32 or int64.

    Returns:
      [n] int32, `PAD_SLOT_ID` for tokens that aren't written. XLA computes it once for all layers that get the same
      slots.
    """
    tokens = jnp.arange(slot_mapping.shape[0], dtype=jnp.int32)
    valid = (slot_mapping >= 0) & (slot_mapping < num_slots)
    slots = jnp.where(valid, slot_mapping, PAD_SLOT_ID).astype(jnp.int32)
    if slots.shape[0] <= PAIRWISE_LIMIT:
        later = ((slots[:, None] == slots[None, :]) & (tokens[:, None] < tokens[None, :])).any(1)
        return jnp.where(later, PAD_SLOT_ID, slots)
    owner = jnp.zeros(num_slots, jnp.int32).at[jnp.where(valid, slots, num_slots)].max(tokens, mode="drop")
    return jnp.where(valid & (owner[slots] == tokens), slots, PAD_SLOT_ID)


def _namespace(*arrays: Any) -> Any:
    """NumPy for arrays on the host, else jax.numpy."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


def compute_slot_mapping_start_idx(
    is_prompt: bool, query_len: int, context_len: int, sliding_window: int | None, use_v2_block_manager: bool = True
) -> int:
    """First position of a prompt whose key and value are kept: earlier ones have left a sliding window already.

    As in Aphrodite's attention backends: only the first block manager drops tokens, only in prompts, and it has no
    chunks.
    """
    if not is_prompt or sliding_window is None or use_v2_block_manager:
        return 0
    if context_len:
        raise ValueError(
            f"context_len: a sliding window with the first block manager has no prefix cache and no chunks, "
            f"expected 0, got {context_len}"
        )
    return max(0, query_len - sliding_window)


def is_block_tables_empty(block_tables: Mapping[Any, Any] | None) -> bool:
    """Whether there are no block tables: none given, or None for every sequence. So it is in a profile run."""
    return block_tables is None or all(table is None for table in block_tables.values())


def compute_slot_mapping(
    is_profile_run: bool,
    slot_mapping: list[int],
    seq_id: Any,
    seq_len: int,
    context_len: int,
    start_idx: int,
    block_size: int,
    block_tables: Mapping[Any, Sequence[int]] | None,
) -> None:
    """Append the slots of one sequence's new tokens, positions `context_len` to `seq_len - 1`, to `slot_mapping`.

    Positions before `start_idx` (see `compute_slot_mapping_start_idx`) and every token of a profile run, which has no
    block tables, get `PAD_SLOT_ID`.
    """
    check_positive("block_size", block_size)
    if is_profile_run:
        slot_mapping.extend([PAD_SLOT_ID] * (seq_len - context_len))
        return
    if block_tables is None:
        raise ValueError("block_tables: expected the table of each sequence outside a profile run, got None")
    table = np.asarray(block_tables[seq_id], np.int64)
    positions = np.arange(context_len, seq_len)
    kept = positions >= start_idx
    needed = -(-seq_len // block_size) if kept.any() else 0
    if needed > len(table):
        raise ValueError(
            f"block_tables[{seq_id!r}]: {seq_len} tokens in blocks of {block_size} need {needed} blocks, "
            f"got {len(table)}"
        )
    slots = np.full(len(positions), PAD_SLOT_ID, np.int64)
    slots[kept] = table[positions[kept] // block_size] * block_size + positions[kept] % block_size
    slot_mapping.extend(slots.tolist())
