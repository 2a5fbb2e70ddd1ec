"""flash_attn_with_kvcache on a GPU: positions, slots and lengths are computed where they lie."""

from typing import NamedTuple

import torch

from jaxpaged.backends.checks import check_activation, check_int_tensor
from jaxpaged.backends.gpu_attention import State, attend, make_plan
from jaxpaged.backends.gpu_plan import AttentionPlan
from jaxpaged.backends.gpu_scales import Scales
from jaxpaged.backends.padded_calls import Options
from jaxpaged.backends.rotary import Rotary
from jaxpaged.bridge import direct
from jaxpaged.bridge.torch_cache import engine_name


class GpuCache(NamedTuple):
    """The caches of a layer, and the blocks of each request: one block, its row, in a cache that is not paged.

    Attributes:
      scales: of an 8-bit cache.
      blocks: [batch, columns] int32.
      lens: [batch] int32, tokens before the call.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scales: Scales
    blocks: torch.Tensor
    lens: torch.Tensor

    @classmethod
    def of(
        cls,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: Scales,
        batch: int,
        cache_seqlens: int | torch.Tensor | None,
        block_table: torch.Tensor | None,
        cache_batch_idx: torch.Tensor | None,
        *,
        lens_needed: bool,
    ) -> "GpuCache":
        device, rows = k_cache.device, k_cache.shape[0]
        if block_table is not None:
            if cache_batch_idx is not None:
                raise ValueError("cache_batch_idx: it belongs to a cache that is not paged, expected None")
            check_int_tensor("block_table", block_table, (batch, "max_blocks_per_seq"))
            blocks = block_table
        elif cache_batch_idx is not None:
            check_int_tensor("cache_batch_idx", cache_batch_idx, (batch,))
            blocks = cache_batch_idx.int().unsqueeze(1)
        elif rows < batch:
            raise ValueError(f"k_cache: it has {rows} rows, expected one for each of {batch} requests")
        else:
            blocks = torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1)
        if cache_seqlens is None:
            if lens_needed:
                raise ValueError("cache_seqlens: expected the lengths before the new tokens, got None with k")
            cache_seqlens = blocks.shape[1] * k_cache.shape[1]
        if isinstance(cache_seqlens, int):
            if cache_seqlens < 0:
                raise ValueError(f"cache_seqlens: expected a length of 0 or more, got {cache_seqlens}")
            cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
        check_int_tensor("cache_seqlens", cache_seqlens, (batch,))
        return cls(k_cache, v_cache, scales, blocks, cache_seqlens.int())

    def new_slots(self, num_new: int) -> torch.Tensor:
        """[batch * num_new] int64, the slots of the tokens after those there; -1 where there is no room."""
        num_blocks, block_size = self.k_cache.shape[:2]
        columns = self.blocks.shape[1]
        position = self.lens.long()[:, None] + torch.arange(num_new, device=self.lens.device)
        column = position // block_size
        block = torch.gather(self.blocks.long(), 1, column.clamp(0, columns - 1))
        there = (column >= 0) & (column < columns) & (block >= 0) & (block < num_blocks)
        return torch.where(there, block * block_size + position % block_size, -1).flatten()


def attend_with_new(
    q: torch.Tensor,
    new: tuple[torch.Tensor | None, torch.Tensor | None],
    cache: GpuCache,
    rotary: Rotary | None,
    plan: AttentionPlan | None,
    options: Options,
    out: torch.Tensor | None,
    return_lse: bool,
) -> State:
    """Write new keys and values, and attend.

    Args:
      q: [batch, seqlen_q, num_heads, head_size].
      new: keys and values [batch, seqlen_new, num_kv_heads, size], or None twice.

    Returns:
      The output [batch, seqlen_q, num_heads, v_head_size] and the lse [batch, num_heads, seqlen_q] or None.
    """
    batch, seqlen_q, num_heads, head_size = q.shape
    k, v = _checked(q, new, cache, rotary)
    plan = _plan_of(q, k, cache, plan)
    packed = q.reshape(batch * seqlen_q, num_heads, head_size)
    make_plan(packed, cache.k_cache, cache.v_cache, cache.scales, plan, options)
    if rotary is not None:
        q = rotary.rotate(q, cache.lens, steps=options.causal or options.window != (None, None))
    if k is not None and v is not None:
        slots = cache.new_slots(k.shape[1])
        if rotary is not None:
            k = rotary.rotate(k, cache.lens, steps=True)
        rows = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        stored = engine_name(cache.k_cache.dtype)
        direct.reshape_and_cache(*rows, cache.k_cache, cache.v_cache, slots, stored, *cache.scales)
    packed = q.reshape(batch * seqlen_q, num_heads, head_size)
    flat = None if out is None or not out.is_contiguous() else out.view(-1, *out.shape[2:])
    result, lse = attend(packed, cache.k_cache, cache.v_cache, cache.scales, plan, options, flat, return_lse)
    result = result.view(batch, seqlen_q, num_heads, -1)
    if lse is not None:
        lse = lse.view(num_heads, batch, seqlen_q).transpose(0, 1).contiguous()
    if out is not None and flat is None:
        out.copy_(result)
    return result if out is None else out, lse


def _plan_of(q: torch.Tensor, k: torch.Tensor | None, cache: GpuCache, plan: AttentionPlan | None) -> AttentionPlan:
    """The step's plan, or one for this call alone."""
    batch, seqlen_q = q.shape[:2]
    if plan is not None:
        plan.check(block_table=cache.blocks)
        return plan
    lens = cache.lens if k is None else cache.lens + k.shape[1]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    return AttentionPlan(cache.blocks, lens, starts, seqlen_q, batch_invariant=False)


def _checked(
    q: torch.Tensor, new: tuple[torch.Tensor | None, torch.Tensor | None], cache: GpuCache, rotary: Rotary | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    k, v = new
    if k is None or v is None:
        if k is not None or v is not None:
            raise ValueError("k, v: expected both or neither")
        if rotary is not None:
            raise ValueError("rotary_cos: queries are rotated together with new keys, expected k, got None")
        return None, None
    check_activation("k", k, (q.shape[0], "seqlen_new", *cache.k_cache.shape[2:]), q.dtype)
    check_activation("v", v, (*k.shape[:2], *cache.v_cache.shape[2:]), q.dtype)
    return k, v
