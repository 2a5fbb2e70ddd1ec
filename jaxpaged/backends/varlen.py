"""flash_attn_varlen_func: attention of packed requests, to packed keys and values or to a paged cache."""

from typing import Any

import numpy as np
import torch

from jaxpaged.backends.arguments import (
    Result,
    attention_options,
    cache_scale,
    check_caches,
    finished,
    refuse,
    refuse_descale,
)
from jaxpaged.backends.checks import (
    check_activation,
    check_heads,
    check_int_tensor,
    check_out,
    check_tensors,
    cumulative,
    lengths,
    on_gpu,
)
from jaxpaged.backends.gpu_attention import attend, given_plan
from jaxpaged.backends.gpu_packed import in_blocks
from jaxpaged.backends.gpu_plan import AttentionPlan
from jaxpaged.backends.gpu_scales import descale_on_gpu
from jaxpaged.backends.padded_calls import Options, State, paged_call, ragged_call
from jaxpaged.bridge.cache_views import cache_view

_DESCALES = ("k_descale", "v_descale")


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_k: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    scheduler_metadata: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int = 0,
    fa_version: int | None = None,
    s_aux: torch.Tensor | None = None,
) -> Result:
    """Attention of packed requests of different lengths to packed keys and values, or to a paged cache.

    The positional order is that of flash-attn 2. vLLM's fork has another one: pass by keyword from there. `q`, and also
    `k` and `v` where there is no block table, are copied if they are not contiguous or fit no compiled program; caches
    and block tables never are.

    On a GPU the kernels are launched on the current stream, and can be captured in a CUDA graph after a call with such
    shapes. No value is read on the host, so lengths that don't fit the tensors aren't noticed. `out` is written
    directly. `q` is float16 or bfloat16; caches are of the same dtype, or of 8 bits where `max_seqlen_q` is known and
    decode takes all requests. Without `block_table`, keys and values are copied into blocks, as many columns of them as
    `max_seqlen_k` says.

    Args:
      q: [total_q, num_heads, head_size] float32, bfloat16 or float16.
      k, v: [total_k, num_kv_heads, head_size] in the dtype of `q`; with `block_table` the caches [num_blocks,
        block_size, num_kv_heads, head_size], possibly views of one buffer, in the dtype of `q`, float32, float8_e4m3fn,
        float8_e5m2 or int8. Heads of `v` may differ in size.
      cu_seqlens_q: [batch + 1] int32, cumulative numbers of queries. Rows of `q` past the last one give 0.
      cu_seqlens_k: [batch + 1] int32, cumulative numbers of keys. With `block_table` it or `seqused_k` is needed.
      softmax_scale: `head_size ** -0.5` when None.
      causal: aligned at the end: query i of a request attends to keys up to `seqlen_k - seqlen_q + i`.
      window_size: (left, right), positions besides the query's own; -1 for no bound.
      softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.
      alibi_slopes: [num_heads] or [batch, num_heads] float32; `-slope * distance` is added.
      block_table: [batch, max_blocks_per_seq] int32.
      seqused_k: [batch] int32, how many of a request's keys are used.
      return_softmax_lse: return the lse, too.
      out: [total_q, num_heads, v_head_size] in the dtype of `q`, written in place and returned.
      k_descale, v_descale: factors of an 8-bit cache: numbers, or float32 tensors of one element, [num_kv_heads],
        [batch, num_kv_heads] with equal rows, on a GPU expanded from one, or [num_blocks, block_size, num_kv_heads].
      s_aux: [num_heads], sinks: logits that take part in the softmax's denominator alone, and not in the lse.
      max_seqlen_q: on a GPU, no request has more queries; None when unknown. With up to 8, decode takes all requests.
      scheduler_metadata: on a GPU what `plan_attention` returned for the step, or None to plan within the call.
      max_seqlen_k: on a GPU without `block_table`, no request has more keys; None when unknown.
      deterministic, num_splits, fa_version, and on the CPU the three above: accepted and not looked at.
        They steer the speed of other implementations. Results here are deterministic always.

    Returns:
      The output [total_q, num_heads, v_head_size]; with `return_softmax_lse` a pair of it and the lse [num_heads,
      total_q] float32.

    Raises:
      NotImplementedError: dropout, `return_attn_probs`, `q_descale`, or in a CUDA graph what the kernels don't take.
      TypeError, ValueError: an argument doesn't fit; the message names it, and `out` is untouched.
    """
    _check_order(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    refuse(dropout_p=dropout_p, return_attn_probs=return_attn_probs)
    refuse_descale(q_descale)
    tensors = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k,
        "block_table": block_table, "alibi_slopes": alibi_slopes, "s_aux": s_aux, "out": out,
    }  # fmt: skip
    scores: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap,
        "alibi_slopes": alibi_slopes, "s_aux": s_aux,
    }  # fmt: skip
    if on_gpu(**tensors):
        options = _shapes(q, cu_seqlens_q, scores)
        if block_table is None:
            _refuse_without_table(k_descale, v_descale, scheduler_metadata)
            check_out(out, (*q.shape[:2], *v.shape[-1:]), q.dtype)
            packed = in_blocks(q, k, v, cu_seqlens_k, seqused_k, cu_seqlens_q.shape[0] - 1, max_seqlen_k)
            k, v, block_table, seqused_k = packed
        plan = _gpu_plan(cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, block_table, scheduler_metadata)
        return _on_gpu(q, k, v, plan, options, (k_descale, v_descale), out, return_softmax_lse)
    check_tensors(**tensors)
    options = _shapes(q, cu_seqlens_q, scores)
    starts = cumulative("cu_seqlens_q", cu_seqlens_q, None, q.shape[0])
    num_reqs = len(starts) - 1
    used = None if seqused_k is None else lengths("seqused_k", seqused_k, num_reqs)
    check_out(out, (*q.shape[:2], *v.shape[-1:]), q.dtype)
    if block_table is None:
        _refuse_without_table(k_descale, v_descale, None)
        result = _dense(q, k, v, starts, cu_seqlens_k, used, options, return_softmax_lse)
    else:
        descales = (k_descale, v_descale)
        result = _paged(q, k, v, starts, cu_seqlens_k, used, block_table, descales, options, return_softmax_lse)
    return finished(*result, out)


def _refuse_without_table(k_descale: Any, v_descale: Any, scheduler_metadata: Any) -> None:
    if k_descale is not None or v_descale is not None:
        raise ValueError("k_descale, v_descale: they belong to 8-bit caches, expected None without block_table")
    if scheduler_metadata is not None:
        raise ValueError("scheduler_metadata: a plan is made for a block table, expected None without one")


def _shapes(q: torch.Tensor, cu_seqlens_q: torch.Tensor, scores: dict[str, Any]) -> Options:
    """The options of a call whose queries, starts and values per head have the right shapes."""
    check_activation("q", q, ("total_q", "num_heads", "head_size"))
    check_int_tensor("cu_seqlens_q", cu_seqlens_q, ("batch + 1",))
    return attention_options(q, cu_seqlens_q.shape[0] - 1, **scores)


def _gpu_plan(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    block_table: torch.Tensor,
    scheduler_metadata: Any,
) -> AttentionPlan:
    """The step's plan, or one for this call alone."""
    plan = given_plan(scheduler_metadata)
    if plan is not None:
        plan.check(block_table=block_table, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q)
        return plan
    if seqused_k is None:
        if cu_seqlens_k is None:
            raise ValueError("seqused_k: with block_table, expected it or cu_seqlens_k, got neither")
        check_int_tensor("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape))
        seqused_k = cu_seqlens_k.diff()
    return AttentionPlan(block_table, seqused_k, cu_seqlens_q, max_seqlen_q, batch_invariant=False)


def _on_gpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    options: Options,
    descales: tuple[Any, Any],
    out: torch.Tensor | None,
    return_lse: bool,
) -> Result:
    check_caches(q, k, v, ("k", "v"))
    num_reqs = plan.block_table.shape[0]
    k_scale, v_scale = (descale_on_gpu(n, x, k, num_reqs) for n, x in zip(_DESCALES, descales, strict=True))
    check_out(out, (*q.shape[:2], *v.shape[-1:]), q.dtype)
    result, lse = attend(q, k, v, (k_scale, v_scale), plan, options, out, return_lse)
    return result if lse is None else (result, lse)


def _paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: np.ndarray,
    cu_seqlens_k: torch.Tensor | None,
    used: np.ndarray | None,
    block_table: torch.Tensor,
    descales: tuple[Any, Any],
    options: Options,
    return_lse: bool,
) -> State:
    num_reqs = len(starts) - 1
    if used is None:
        if cu_seqlens_k is None:
            raise ValueError("seqused_k: with block_table, expected it or cu_seqlens_k, got neither")
        used = np.diff(cumulative("cu_seqlens_k", cu_seqlens_k, num_reqs, None))
    check_int_tensor("block_table", block_table, (num_reqs, "max_blocks_per_seq"))
    check_caches(q, k, v, ("k", "v"))
    k_scale = cache_scale("k_descale", descales[0], k, num_reqs)
    v_scale = cache_scale("v_descale", descales[1], v, num_reqs)
    return paged_call(q, cache_view(k, v, k_scale, v_scale), block_table, used, starts, options, return_lse)


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: np.ndarray,
    cu_seqlens_k: torch.Tensor | None,
    used: np.ndarray | None,
    options: Options,
    return_lse: bool,
) -> State:
    check_activation("k", k, ("total_k", "num_kv_heads", q.shape[-1]), q.dtype)
    check_activation("v", v, (*k.shape[:2], "v_head_size"), q.dtype)
    check_heads(q, k.shape[1])
    if cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k: expected cumulative lengths, got None without block_table")
    kv_starts = cumulative("cu_seqlens_k", cu_seqlens_k, len(starts) - 1, k.shape[0])
    if used is not None:
        starts, kv_starts, options = _without_unused(starts, kv_starts, used, options)
    return ragged_call(q, k, v, starts, kv_starts, options, return_lse)


def _without_unused(
    starts: np.ndarray, kv_starts: np.ndarray, used: np.ndarray, options: Options
) -> tuple[np.ndarray, np.ndarray, Options]:
    """The batch with the keys that a request doesn't use as those of another request after it, which has no queries."""
    if np.any(used > np.diff(kv_starts)):
        raise ValueError(f"seqused_k: expected at most the lengths of cu_seqlens_k, got {used.tolist()}")
    ends = np.stack([kv_starts[:-1] + used, kv_starts[1:]], 1).reshape(-1)
    kv_starts = np.concatenate([kv_starts[:1], ends])
    starts = np.concatenate([starts[:1], np.repeat(starts[1:], 2)])
    return starts, kv_starts, options.with_repeated_requests(2)


def _check_order(cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    numbers = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    tensors = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    wrong = [f"{name}={value!r}" for name, value in numbers.items() if isinstance(value, int)]
    wrong += [f"{name} a tensor" for name, value in tensors.items() if isinstance(value, torch.Tensor) and value.ndim]
    if wrong:
        raise TypeError(
            f"cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: expected two tensors and two numbers, "
            f"got {', '.join(wrong)}; vLLM orders its positional arguments differently: pass them by keyword"
        )
