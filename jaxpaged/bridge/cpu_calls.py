"""The operators of `torch_ops.py` for tensors on the CPU: PyTorch writes the caches, JAX's reference computes."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from jaxpaged.attention import paged_attention
from jaxpaged.bridge.decode_calls import by_query_head
from jaxpaged.bridge.decode_shapes import ScoreOptions, decode_cut, decode_shapes
from jaxpaged.bridge.dlpack import on_cpu, share_kv_cache, to_numpy, to_torch
from jaxpaged.bridge.plan_calls import Plan
from jaxpaged.bridge.prefill_shapes import prefill_shapes
from jaxpaged.bridge.torch_cache import TorchCache, stored_dtype, swap_tensor_, write_kv_
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.pallas import decode_plan as field
from jaxpaged.reference.attention import AttentionOptions


def write_on_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """See `write_calls.write_on_gpu`; of tokens that share a slot the last is kept."""
    dtype = stored_dtype(kv_cache_dtype)
    if dtype is None:
        cache = TorchCache.of(key_cache, value_cache)
    else:
        cache = TorchCache.of(key_cache, value_cache, k_scale=k_scale, v_scale=v_scale, dtype=dtype)
    write_kv_(cache, key, value, slot_mapping)


def copy_on_cpu(
    key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor], block_mapping: torch.Tensor
) -> None:
    """See `copy_calls.copy_on_gpu`."""
    if len(key_caches) != len(value_caches):
        raise ValueError(f"value_caches: expected {len(key_caches)} layers, as in key_caches, got {len(value_caches)}")
    for cache in (*key_caches, *value_caches):
        swap_tensor_(cache, cache, block_mapping)


def swap_on_cpu(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor) -> None:
    """See `copy_calls.swap_on_gpu`."""
    swap_tensor_(src, dst, block_mapping)


def plan_on_cpu(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    batch_invariant: bool,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> Plan:
    """See `decode_calls.plan_on_gpu`; the workspace is empty."""
    scores = ScoreOptions(scale, causal, window_left, window_right, soft_cap)
    how: tuple[Any, ...] = (max_query_len, batch_invariant, scores, k_scale, v_scale)
    found = decode_shapes(query, key_cache, value_cache, block_table, *how)
    cut = decode_cut(found, query.shape[0], batch_invariant)
    lens, starts = (x.detach().numpy() for x in (seq_lens, query_start_loc))
    batch = PagedBatch(np.ascontiguousarray(block_table.numpy()), lens, starts, None, max_query_len)
    with on_cpu():
        plan = field.plan_decode(
            found.cache.cache,
            jax.tree.map(jax.numpy.asarray, batch),
            found.options,
            num_tokens=cut.num_tokens,
            num_heads=query.shape[1],
            max_query_len=max_query_len,
            tile=cut.tile,
            num_shares=cut.num_shares,
            min_tiles=cut.min_tiles,
            others_elsewhere=False,
            batch_invariant=batch_invariant,
        )
    requests, shares = (torch.from_numpy(np.array(x)) for x in (plan.requests, plan.shares))
    return requests, shares, torch.empty(0, dtype=torch.uint8, device="cpu")


def decode_on_cpu(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor,
    shares: torch.Tensor,
    workspace: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_query_len: int,
    batch_invariant: bool,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    out: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """See `decode_calls.decode_on_gpu`."""
    scores = ScoreOptions(scale, causal, window_left, window_right, soft_cap)
    how: tuple[Any, ...] = (max_query_len, batch_invariant, scores, k_scale, v_scale)
    found = decode_shapes(query, key_cache, value_cache, block_table, *how)
    num_reqs = block_table.shape[0]
    kind = {"num_kv_heads": key_cache.shape[2], "max_query_len": max_query_len}
    slopes, sinks = by_query_head(slopes, **kind), by_query_head(sinks, **kind)
    cache = (key_cache, value_cache, k_scale, v_scale)
    lens, starts = requests[:num_reqs, field.KV_LEN], requests[: num_reqs + 1, field.Q_START]
    batch = (block_table, lens, starts, max_query_len)
    lses = None if lse is None else lse.T
    _attend(query, cache, batch, found.options, slopes, sinks, batch_invariant, out, lses)


def plan_prefill_on_cpu(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    batch_invariant: bool,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `prefill_plan_calls.plan_prefill_on_gpu`; the plan is the batch's lengths, and the workspace empty."""
    scores = ScoreOptions(scale, causal, window_left, window_right, soft_cap)
    how: tuple[Any, ...] = (batch_invariant, scores, k_scale, v_scale)
    prefill_shapes(query, key_cache, value_cache, block_table, *how)
    plan = torch.cat([seq_lens.detach(), query_start_loc.detach()]).int()
    return plan, torch.empty(0, dtype=torch.uint8, device="cpu")


def prefill_on_cpu(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    plan: torch.Tensor,
    workspace: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    decode_slopes: torch.Tensor | None,
    decode_sinks: torch.Tensor | None,
    batch_invariant: bool,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    out: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """See `prefill_calls.prefill_on_gpu`."""
    scores = ScoreOptions(scale, causal, window_left, window_right, soft_cap)
    how: tuple[Any, ...] = (batch_invariant, scores, k_scale, v_scale)
    found = prefill_shapes(query, key_cache, value_cache, block_table, *how)
    num_reqs = block_table.shape[0]
    batch = (block_table, plan[:num_reqs], plan[num_reqs:], None)
    cache = (key_cache, value_cache, k_scale, v_scale)
    by_head = (slopes, None if sinks is None else sinks[None])
    _attend(query, cache, batch, found.options, *by_head, batch_invariant, out, lse)


def _attend(
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int | None],
    options: AttentionOptions,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    batch_invariant: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attention by the reference to `out` [num_tokens, num_heads, v_head_size] and `lse` [num_heads, num_tokens].

    Args:
      cache: keys, values and their scales.
      batch: the block table, lengths, starts and the most new tokens of a request.
      slopes, sinks: [1 or num_reqs, num_heads] and [1, num_heads].
    """
    arrays = (np.ascontiguousarray(x.detach().numpy()) for x in batch[:3])
    with on_cpu():
        table, lens, starts = map(jax.numpy.asarray, arrays)
        result, lses = paged_attention(
            to_numpy(query.contiguous()),
            share_kv_cache(*cache[:2], k_scale=cache[2], v_scale=cache[3]),
            PagedBatch(table, lens, starts, None, batch[3]),
            scale=options.scale,
            causal=options.causal,
            window=options.window,
            soft_cap=options.soft_cap,
            alibi_slopes=None if slopes is None else _one_or_each(slopes.detach().numpy()),
            sinks=None if sinks is None else sinks[0].detach().numpy(),
            batch_invariant=batch_invariant,
            return_lse=True,
            implementation="reference",
        )
        jax.block_until_ready((result, lses))
    out.copy_(to_torch(result))
    if lse is not None:
        lse.copy_(to_torch(lses))


def _one_or_each(slopes: np.ndarray) -> np.ndarray:
    """Slopes [num_heads] where all requests have the same, else as they are."""
    return slopes[0] if len(slopes) == 1 else slopes
