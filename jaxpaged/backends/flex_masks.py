"""FlexAttention's mask functions over a paged cache, as PyTorch functions, and the maps between positions they need.

A token of the batch has a row of the flattened query and, as a key, a physical index `block * block_size + offset` in
the cache. Its logical position is that in its own request.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from jaxpaged.backends.checks import check_int_tensor, check_tensors, on_gpu
from jaxpaged.bridge.dlpack import on_cpu, to_numpy
from jaxpaged.metadata.block_table import physical_to_logical
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.metadata.slots import request_ids

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal_mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """Keeps a query's own position and those before it."""
    return kv_idx <= q_idx


def offsets_to_doc_ids(offsets: torch.Tensor) -> torch.Tensor:
    """The request of each packed token.

    Args:
      offsets: [num_reqs + 1] int, where each request's tokens start.

    Returns:
      [offsets[-1] - offsets[0]] int32. On a GPU the host waits to learn how many that are.
    """
    if not on_gpu(offsets=offsets):
        check_tensors(offsets=offsets)
    check_int_tensor("offsets", offsets, ("num_reqs + 1",))
    return request_of_token(offsets, int(offsets[-1] - offsets[0]))


def request_of_token(offsets: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`offsets_to_doc_ids` of so many tokens, for which nobody waits."""
    if on_gpu(offsets=offsets):
        tokens = torch.arange(num_tokens, device=offsets.device, dtype=offsets.dtype) + offsets[0]
        return torch.searchsorted(offsets[1:].contiguous(), tokens, right=True, out_int32=True)
    return torch.from_numpy(np.asarray(request_ids(to_numpy(offsets - offsets[0]), num_tokens)))


def physical_to_logical_mapping(block_table: torch.Tensor, total_blocks: int | None = None) -> torch.Tensor:
    """The inverse of a block table, for engines whose block 0 belongs to no request and pads tables.

    Args:
      block_table: [max_reqs, max_num_blocks] int. Entries that are no block are ignored; of several entries of a row
        that name one block the last counts.
      total_blocks: blocks of the cache; the largest of the table and one when None, for which on a GPU the host waits.

    Returns:
      [max_reqs, total_blocks] int64, the logical block of each physical one; -1 where a request has no such block, and
      for block 0.
    """
    gpu = on_gpu(block_table=block_table)
    if not gpu:
        check_tensors(block_table=block_table)
    check_int_tensor("block_table", block_table, ("max_reqs", "max_num_blocks"))
    if gpu:
        return _inverse_on_gpu(block_table, total_blocks)
    table = to_numpy(block_table)
    if total_blocks is None:
        total_blocks = max(int(table.max(initial=0)), 0) + 1
    num_reqs, width = table.shape
    padded = np.full((next_bucket(num_reqs), next_bucket(width)), -1, table.dtype)  # few shapes, few compilations
    padded[:num_reqs, :width] = table
    with on_cpu():
        inverse = np.asarray(physical_to_logical(padded, total_blocks, reserve_block_zero=True))
    return torch.from_numpy(inverse[:num_reqs].astype(np.int64))


def _inverse_on_gpu(block_table: torch.Tensor, total_blocks: int | None) -> torch.Tensor:
    """`physical_to_logical_mapping` by PyTorch's kernels, in the order of its stream."""
    table = block_table.long()
    if total_blocks is None:
        total_blocks = max(int(table.max()), 0) + 1 if table.numel() else 1
    named = (table > 0) & (table < total_blocks)
    logical = torch.arange(table.shape[1], device=table.device).expand_as(table)
    inverse = torch.full((table.shape[0], total_blocks), -1, dtype=torch.int64, device=table.device)
    return inverse.scatter_reduce_(1, torch.where(named, table, 0), torch.where(named, logical, -1), "amax")


@dataclasses.dataclass(frozen=True, eq=False)
class PagedMask:
    """A batch's mask over rows of the query and physical indices: a request's own tokens, as its logical mask says.

    Attributes:
      metadata: FlexAttentionMetadata, whose `logical_mask_mod` is looked up in each call.
      request_of_token: [num_tokens] int32.
    """

    metadata: Any
    request_of_token: torch.Tensor

    def __call__(self, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        meta = self.metadata
        request = self.request_of_token[q_idx]
        block = meta.physical_to_logical[request, kv_idx // meta.block_size]
        kv_pos = block * meta.block_size + kv_idx % meta.block_size
        q_pos = q_idx - meta.query_start_loc[request] + meta.decode_offset[request]
        exists = (block >= 0) & (kv_pos < meta.seq_lens[request])
        return exists & meta.logical_mask_mod(b, h, q_pos, kv_pos)
