"""The attention functions on a GPU: the arguments of FlashAttention's turned into those of the operators.

Nothing here reads what a tensor holds: the host never waits for the device.
"""

from typing import Any

import torch

from jaxpaged.backends.gpu_general import attend_generally, has_functions, refuse_in_a_capture
from jaxpaged.backends.gpu_plan import AttentionPlan
from jaxpaged.backends.gpu_scales import Scales
from jaxpaged.backends.padded_calls import Options
from jaxpaged.bridge import direct
from jaxpaged.bridge.decode_shapes import ScoreOptions
from jaxpaged.bridge.head_values import by_column_once, compact
from jaxpaged.notices import warn_once

State = tuple[torch.Tensor, torch.Tensor | None]


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: Scales,
    plan: AttentionPlan,
    options: Options,
    out: torch.Tensor | None,
    return_lse: bool,
) -> State:
    """Attention of packed queries to a paged cache by the plan of its step.

    Args:
      q: [num_tokens, num_heads, head_size], copied if the heads of a token don't lie side by side.
      scales: of an 8-bit cache, as `descale_on_gpu` makes them.
      out: written in place where there is one.

    Returns:
      The output [num_tokens, num_heads, v_head_size], `out` itself where there is one, and the lse [num_heads,
      num_tokens] or None.

    Raises:
      NotImplementedError, RuntimeError: the kernels don't take such tensors or options, and a CUDA graph is captured.
    """
    q = q.detach() if _heads_side_by_side(q) else q.detach().contiguous()
    tensors = (q, k_cache, v_cache)
    lse: torch.Tensor | None
    if _is_empty(q, k_cache, plan):
        result = q.new_zeros((*q.shape[:2], v_cache.shape[-1]))
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
    elif (planned := _planned(*tensors, scales, plan, options)) is None:
        result, lse = attend_generally(*tensors, scales, plan, options)
    else:
        result = out if out is not None and out.is_contiguous() else q.new_empty((*q.shape[:2], v_cache.shape[-1]))
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if return_lse else None
        _launch(tensors, scales, plan, options, planned, result, lse)
    if out is not None and result is not out:
        out.copy_(result)
    return result if out is None else out, lse if return_lse else None


def make_plan(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: Scales,
    plan: AttentionPlan,
    options: Options,
) -> None:
    """Plan what `attend` will look up, and so find out what it would refuse before a cache is written."""
    if not _is_empty(q, k_cache, plan):
        rows = q if _heads_side_by_side(q) else q.new_empty(q.shape)
        _planned(rows.detach(), k_cache, v_cache, scales, plan, options)


def _heads_side_by_side(q: torch.Tensor) -> bool:
    return q.stride(2) == 1 and q.stride(1) == q.shape[2] and q.stride(0) % q.shape[2] == 0


def _planned(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: Scales,
    plan: AttentionPlan,
    options: Options,
) -> tuple[int | None, Any] | None:
    """The plan of decode and its number of new tokens a request, or None and the plan of prefill.

    None where the operators don't take such a call and JAX's general path does: for functions, and with a warning
    where the kernels don't fit.
    """
    if has_functions(options):
        refuse_in_a_capture(q)
        return None
    try:
        if options.alibi_slopes is not None and not options.causal:
            raise NotImplementedError("alibi_slopes: the kernels need causal=True")
        length = plan.decoded_len(q, k_cache, v_cache, scales)
        scores = scores_of(options)
        if length is None:
            return None, plan.prefill(q, k_cache, v_cache, scales, scores)
        return length, plan.decode(q, k_cache, v_cache, scales, length, scores)
    except NotImplementedError as error:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise
        warn_once(
            f"jaxpaged's operators don't take this: {error}. JAX's functions serve instead: they take longer, and no "
            f"CUDA graph captures them"
        )
        return None


def scores_of(options: Options) -> ScoreOptions:
    """What scores go through, as the operators take it."""
    left, right = (-1 if side is None else side for side in options.window)
    return ScoreOptions(options.scale, options.causal, left, right, options.soft_cap or 0.0)


def _is_empty(q: torch.Tensor, k_cache: torch.Tensor, plan: AttentionPlan) -> bool:
    return 0 in (q.shape[0], *plan.block_table.shape, k_cache.shape[0])


def _launch(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scales: Scales,
    plan: AttentionPlan,
    options: Options,
    planned: tuple[int | None, Any],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Attend by the operators; `planned` is what `_planned` gave for these tensors, query, keys and values."""
    (length, numbers), scores = planned, scores_of(options)
    slopes, sinks = options.alibi_slopes, options.sinks
    sizes: dict[str, Any] = {"num_kv_heads": tensors[1].shape[2], "max_query_len": length or 1}
    decode_slopes = by_column_once(slopes, name="alibi_slopes", **sizes)
    decode_sinks = by_column_once(sinks, name="s_aux", **sizes)
    if length is not None:
        given = (*numbers, decode_slopes, decode_sinks, length)
        row_lse = None if lse is None else lse.new_empty(lse.T.shape)
        how = (plan.batch_invariant, *scores, out, *scales, row_lse)
        direct.decode(*tensors, plan.block_table, *given, *how)
        if lse is not None and row_lse is not None:
            lse.copy_(row_lse.T)
        return
    slopes, sinks = compact(slopes), compact(sinks)
    if slopes is not None and slopes.ndim == 1:
        slopes = slopes.unsqueeze(0)
    given = (plan.query_start_loc, *numbers, slopes, sinks, decode_slopes, decode_sinks, plan.batch_invariant)
    direct.prefill(*tensors, plan.block_table, *given, *scores, out, *scales, lse)


def given_plan(scheduler_metadata: Any) -> AttentionPlan | None:
    """The plan that a layer was given."""
    if scheduler_metadata is not None and not isinstance(scheduler_metadata, AttentionPlan):
        raise TypeError(
            f"scheduler_metadata: on a GPU, expected None or what plan_attention returns, "
            f"got {type(scheduler_metadata).__name__}"
        )
    return scheduler_metadata
