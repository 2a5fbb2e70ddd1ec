"""Attention on a GPU by JAX's general path: masks and scores that are functions, and what the operators don't take.

It is `torch_call`: some hundred microseconds a layer, and no CUDA graph captures it. JAX traces functions of positions
into the kernels. What these don't take XLA computes tile by tile, rightly and slowly.
"""

import dataclasses
from typing import Any

import torch

from jaxpaged.attention import paged_attention
from jaxpaged.backends.gpu_plan import AttentionPlan
from jaxpaged.backends.gpu_scales import Scales
from jaxpaged.backends.padded_calls import Options, arguments_of, coarse, fine, score_by_index
from jaxpaged.bridge.dlpack import refuse_capture, tensor_cache
from jaxpaged.bridge.torch_call import torch_call
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.metadata.checks import INT32_MAX
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.attention import MOST_DECODED

_STATIC = ("scale", "causal", "window", "soft_cap")


@dataclasses.dataclass(frozen=True)
class _Attention:
    """A function for `torch_call`, equal to others of the same settings; all else is its argument."""

    scale: float
    causal: bool
    window: tuple[int | None, int | None]
    soft_cap: float | None
    max_query_len: int | None
    batch_invariant: bool

    def __call__(
        self, cache: KVCache, query: Any, requests: tuple[Any, Any, Any], others: dict[str, Any], physical: Any
    ) -> Any:
        batch = PagedBatch(*requests, None, self.max_query_len)
        arguments = {name: getattr(self, name) for name in (*_STATIC, "batch_invariant")} | others
        if physical is not None:
            arguments["score_mod"] = score_by_index(physical, arguments["score_mod"], batch, cache)
        return paged_attention(query, cache, batch, return_lse=True, **arguments)


def has_functions(options: Options) -> bool:
    """Whether only `attend_generally` has the options."""
    return any(f is not None for f in (options.mask_mod, options.score_mod, options.physical_score_mod))


def refuse_in_a_capture(query: torch.Tensor) -> None:
    """Raise RuntimeError while a CUDA graph is being captured."""
    if query.is_cuda:
        refuse_capture(query.device, "attention that PyTorch's operators don't have")


def attend_generally(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: Scales,
    plan: AttentionPlan,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed queries to a paged cache.

    Args:
      query: [num_tokens, num_heads, head_size].
      k_cache, v_cache: [num_blocks, block_size, num_kv_heads, size].
      plan: of the batch, of which nothing is planned here.
      options: functions are pytrees, such as `jax_function` makes for the query's device.

    Returns:
      The output [num_tokens, num_heads, v_head_size] and the lse [num_heads, num_tokens], of memory of their own.

    Raises:
      TypeError, ValueError: an argument doesn't fit.
      RuntimeError: a CUDA graph is being captured.
    """
    longest = plan.max_seqlen_q
    slopes = options.alibi_slopes
    if slopes is not None and slopes.ndim == 2:
        slopes = _padded(slopes, coarse(len(slopes)))
    arguments = arguments_of(options, slopes, options.sinks)
    attention = _Attention(
        **{name: arguments.pop(name) for name in _STATIC},
        max_query_len=None if longest is None or longest > MOST_DECODED else next_bucket(max(longest, 1)),
        batch_invariant=plan.batch_invariant,
    )
    cache = tensor_cache(k_cache, v_cache, k_scale=scales[0], v_scale=scales[1])
    rows = _padded(query.detach(), fine(len(query)))
    requests = _padded_requests(plan.block_table, plan.seq_lens, plan.query_start_loc)
    out, lse = torch_call(attention, cache, rows, requests, arguments, options.physical_score_mod)
    return out[: len(query)], lse[:, : len(query)]


def _padded_requests(
    block_table: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tables, lengths and starts with requests after them that have no tokens, int32."""
    num_reqs, columns = block_table.shape
    size = coarse(num_reqs)
    table = block_table.clamp(-1, INT32_MAX).int()  # no block is larger, and -1 is none
    table = torch.nn.functional.pad(table, (0, coarse(columns) - columns, 0, size - num_reqs), value=-1)
    ends = starts[-1:].expand(size - num_reqs)
    return table, _padded(seq_lens.int(), size), torch.cat([starts, ends]).int()


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """Rows [n, ...] with rows of 0 after them, up to `size`: a copy, unless they are all, and compact."""
    if len(x) == size and x.is_contiguous():
        return x
    padded = x.new_zeros((size, *x.shape[1:]))
    padded[: len(x)] = x
    return padded
