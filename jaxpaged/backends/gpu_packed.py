"""Packed keys and values on a GPU, where the kernels read caches: put into blocks of a cache of the call's own."""

from typing import NamedTuple

import torch

from jaxpaged.backends.checks import check_activation, check_heads, check_int_tensor
from jaxpaged.bridge import direct

_BLOCK_SIZE = 64


class Packed(NamedTuple):
    """A cache that holds packed keys and values.

    Attributes:
      k_cache, v_cache: [num_blocks, block_size, num_kv_heads, size]; what lies past a request's keys is arbitrary.
      block_table: [batch, columns] int32.
      seq_lens: [batch] int32.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


def in_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    num_reqs: int,
    max_seqlen_k: int | None,
) -> Packed:
    """Copy keys and values [total_k, num_kv_heads, size] into blocks. Each request begins a block.

    How many blocks there are follows from shapes alone, so that nothing waits for the device, and CUDA graphs capture
    it: as many as requests of any lengths need.

    Args:
      max_seqlen_k: no request has more keys; None when unknown. Those past it are not seen.

    Raises:
      TypeError, ValueError: an argument doesn't fit.
      NotImplementedError: no kernel writes such keys.
    """
    check_activation("k", k, ("total_k", "num_kv_heads", q.shape[-1]), q.dtype)
    check_activation("v", v, (*k.shape[:2], "v_head_size"), q.dtype)
    check_heads(q, k.shape[1])
    if cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k: expected cumulative lengths, got None without block_table")
    check_int_tensor("cu_seqlens_k", cu_seqlens_k, (num_reqs + 1,))
    if seqused_k is not None:
        check_int_tensor("seqused_k", seqused_k, (num_reqs,))
    total, device = k.shape[0], k.device
    longest = total if max_seqlen_k is None else min(total, max_seqlen_k)
    lens = cu_seqlens_k.diff()
    ends = (-(-lens // _BLOCK_SIZE)).cumsum(0)
    first = torch.cat([ends.new_zeros(1), ends])
    token = torch.arange(total, dtype=cu_seqlens_k.dtype, device=device)
    request = torch.bucketize(token, cu_seqlens_k[1:], right=True)
    slots = first[request] * _BLOCK_SIZE + token - cu_seqlens_k[request]
    slots = torch.where(request < num_reqs, slots, -1)
    blocks = -(-total // _BLOCK_SIZE) + num_reqs
    k_cache, v_cache = (x.new_empty(blocks, _BLOCK_SIZE, *x.shape[1:]) for x in (k, v))
    direct.reshape_and_cache(k.detach(), v.detach(), k_cache, v_cache, slots, "auto", None, None)
    columns = torch.arange(-(-longest // _BLOCK_SIZE), device=device)
    table = (first[:-1, None] + columns).int()
    return Packed(k_cache, v_cache, table, (lens if seqused_k is None else torch.minimum(lens, seqused_k)).int())
