"""The operators of `torch_ops.py` for tensors on the CPU: PyTorch writes the caches, JAX's reference computes."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from jaxpaged.attention import paged_attention
from jaxpaged.bridge.decode_calls import decode_on_gpu
from jaxpaged.bridge.decode_shapes import decode_cut, decode_shapes
from jaxpaged.bridge.dlpack import on_cpu, share_kv_cache, to_numpy, to_torch
from jaxpaged.bridge.op_arguments import Arguments
from jaxpaged.bridge.plan_calls import Plan, plan_on_gpu
from jaxpaged.bridge.prefill_calls import prefill_on_gpu
from jaxpaged.bridge.prefill_plan_calls import plan_prefill_on_gpu
from jaxpaged.bridge.prefill_shapes import prefill_shapes
from jaxpaged.bridge.torch_cache import TorchCache, stored_dtype, swap_tensor_, write_kv_
from jaxpaged.bridge.write_calls import write_on_gpu
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.pallas import decode_plan as field
from jaxpaged.reference.attention import AttentionOptions


def write_on_cpu(*given: Any, **named: Any) -> None:
    """See `write_calls.write_on_gpu`; of tokens that share a slot the last is kept."""
    call = Arguments.of(write_on_gpu, given, named)
    dtype = stored_dtype(call.kv_cache_dtype)
    scaled = {} if dtype is None else {"k_scale": call.k_scale, "v_scale": call.v_scale, "dtype": dtype}
    write_kv_(TorchCache.of(call.key_cache, call.value_cache, **scaled), call.key, call.value, call.slot_mapping)


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


def plan_on_cpu(*given: Any, **named: Any) -> Plan:
    """See `plan_calls.plan_on_gpu`; the workspace is empty."""
    call = Arguments.of(plan_on_gpu, given, named)
    found = decode_shapes(*call.layer, *call.how)
    cut = decode_cut(found, call.query.shape[0], call.batch_invariant)
    lens, starts = (x.detach().numpy() for x in (call.seq_lens, call.query_start_loc))
    batch = PagedBatch(np.ascontiguousarray(call.block_table.numpy()), lens, starts, None, call.max_query_len)
    with on_cpu():
        plan = field.plan_decode(
            found.cache.cache,
            jax.tree.map(jax.numpy.asarray, batch),
            found.options,
            num_tokens=cut.num_tokens,
            num_heads=call.query.shape[1],
            max_query_len=call.max_query_len,
            tile=cut.tile,
            num_shares=cut.num_shares,
            min_tiles=cut.min_tiles,
            others_elsewhere=False,
            batch_invariant=call.batch_invariant,
        )
    requests, shares = (torch.from_numpy(np.array(x)) for x in (plan.requests, plan.shares))
    return requests, shares, torch.empty(0, dtype=torch.uint8, device="cpu")


def decode_on_cpu(*given: Any, **named: Any) -> None:
    """See `decode_calls.decode_on_gpu`."""
    call = Arguments.of(decode_on_gpu, given, named)
    found, num_reqs = decode_shapes(*call.layer, *call.how), call.block_table.shape[0]
    lens, starts = call.requests[:num_reqs, field.KV_LEN], call.requests[: num_reqs + 1, field.Q_START]
    lse = None if call.lse is None else call.lse.T
    _attend(call, (lens, starts, call.max_query_len), found.options, *call.by_query_head, lse)


def plan_prefill_on_cpu(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `prefill_plan_calls.plan_prefill_on_gpu`; the plan is the batch's lengths, and the workspace empty."""
    call = Arguments.of(plan_prefill_on_gpu, given, named)
    prefill_shapes(*call.layer, *call.how)  # checks them
    plan = torch.cat([call.seq_lens.detach(), call.query_start_loc.detach()]).int()
    return plan, torch.empty(0, dtype=torch.uint8, device="cpu")


def prefill_on_cpu(*given: Any, **named: Any) -> None:
    """See `prefill_calls.prefill_on_gpu`."""
    call = Arguments.of(prefill_on_gpu, given, named)
    found, num_reqs = prefill_shapes(*call.layer, *call.how), call.block_table.shape[0]
    sinks = None if call.sinks is None else call.sinks[None]
    _attend(call, (call.plan[:num_reqs], call.plan[num_reqs:], None), found.options, call.slopes, sinks, call.lse)


def _attend(
    call: Arguments,
    batch: tuple[torch.Tensor, torch.Tensor, int | None],
    options: AttentionOptions,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> None:
    """Attention by the reference to the call's `out`, and to `lse` [num_heads, num_tokens].

    Args:
      batch: lengths, starts and the most new tokens of a request.
      slopes, sinks: [1 or num_reqs, num_heads] and [1, num_heads].
    """
    arrays = (np.ascontiguousarray(x.detach().numpy()) for x in (call.block_table, *batch[:2]))
    key_cache, value_cache, k_scale, v_scale = call.cache
    with on_cpu():
        table, lens, starts = map(jax.numpy.asarray, arrays)
        result, lses = paged_attention(
            to_numpy(call.query.contiguous()),
            share_kv_cache(key_cache, value_cache, k_scale=k_scale, v_scale=v_scale),
            PagedBatch(table, lens, starts, None, batch[2]),
            scale=options.scale,
            causal=options.causal,
            window=options.window,
            soft_cap=options.soft_cap,
            alibi_slopes=None if slopes is None else _one_or_each(slopes.detach().numpy()),
            sinks=None if sinks is None else sinks[0].detach().numpy(),
            batch_invariant=call.batch_invariant,
            return_lse=True,
            implementation="reference",
        )
        jax.block_until_ready((result, lses))
    call.out.copy_(to_torch(result))
    if lse is not None:
        lse.copy_(to_torch(lses))


def _one_or_each(slopes: np.ndarray) -> np.ndarray:
    """Slopes [num_heads] where all requests have the same, else as they are."""
    return slopes[0] if len(slopes) == 1 else slopes
