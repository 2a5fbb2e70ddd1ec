"""flash_attn_with_kvcache: new tokens of every request put into a cache, and attention to it."""

from typing import Any

import numpy as np
import torch

from jaxpaged.backends.arguments import (
    Result,
    attention_options,
    cache_scale,
    check_caches,
    finished,
    refuse_descale,
)
from jaxpaged.backends.cache_place import CachePlace
from jaxpaged.backends.checks import check_activation, check_out, check_tensors, on_gpu
from jaxpaged.backends.gpu_attention import given_plan
from jaxpaged.backends.gpu_kvcache import GpuCache, attend_with_new
from jaxpaged.backends.gpu_scales import descale_on_gpu
from jaxpaged.backends.padded_calls import paged_call
from jaxpaged.backends.rotary import Rotary
from jaxpaged.bridge.cache_views import cache_view
from jaxpaged.bridge.torch_cache import TorchCache, check_new_tokens, write_kv_


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] | None = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    out: torch.Tensor | None = None,
    scheduler_metadata: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    fa_version: int | None = None,
    s_aux: torch.Tensor | None = None,
) -> Result:
    """Attention of the same number of queries of every request to a cache, paged or not.

    With `k` and `v` the new tokens are put into the cache first, in place, after the `cache_seqlens` tokens of each
    request. Caches and block tables are never copied; `q`, `k` and `v` may be. On a GPU it is as with
    `flash_attn_varlen_func`; a cache that is not paged needs rows of a multiple of 8 tokens there.

    Args:
      q: [batch, seqlen_q, num_heads, head_size] float32, bfloat16 or float16.
      k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_size] with `block_table`, else [batch_cache,
        seqlen_cache, num_kv_heads, head_size]; possibly views of one buffer; in the dtype of `q`, float32,
        float8_e4m3fn, float8_e5m2 or int8.
      k, v: [batch, seqlen_new, num_kv_heads, head_size] in the dtype of `q`. Tokens that a request's row or blocks have
        no room for are not kept.
      rotary_cos, rotary_sin: [positions, rotary_dim / 2]; with them `k` is rotated by its positions, and `q` by
        `cache_seqlens + i`, or with neither `causal` nor a window all by `cache_seqlens`. They need `k`.
      cache_seqlens: a number or [batch] int32: tokens in the cache before the call. All of the cache when None.
      cache_batch_idx: [batch] int32, each request's row of a cache that is not paged; its own index when None.
      cache_leftpad: [batch] int32, where a request's tokens start in its row of a cache that is not paged.
      block_table: [batch, max_blocks_per_seq] int32.
      rotary_interleaved: rotate elements 2 i and 2 i + 1 of a head; else i and i + rotary_dim / 2.
      return_softmax_lse: return the lse, too.
      out: [batch, seqlen_q, num_heads, v_head_size] in the dtype of `q`, written in place and returned.
      k_descale, v_descale: factors of an 8-bit cache, by which new tokens are divided: see `flash_attn_varlen_func`.
      softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux: see `flash_attn_varlen_func`.
      scheduler_metadata: on a GPU what `plan_attention` returned for the step and this block table, with lengths that
        have the new tokens in them, or None to plan within the call.
      num_splits, fa_version, and on the CPU scheduler_metadata: accepted and not looked at: they steer the speed of
        other implementations.

    Returns:
      The output [batch, seqlen_q, num_heads, v_head_size]; with `return_softmax_lse` a pair of it and the lse [batch,
      num_heads, seqlen_q] float32.

    Raises:
      NotImplementedError: `q_descale`, or on a GPU `cache_leftpad`, or in a CUDA graph what the kernels don't take.
      TypeError, ValueError: an argument doesn't fit; the message names it, and nothing has been written.
    """
    refuse_descale(q_descale)
    tensors = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad,
        "block_table": block_table, "alibi_slopes": alibi_slopes, "s_aux": s_aux, "out": out,
    }  # fmt: skip
    gpu = on_gpu(**tensors, cache_seqlens=None if isinstance(cache_seqlens, int) else cache_seqlens)
    if not gpu:
        check_tensors(**tensors)
    check_activation("q", q, ("batch", "seqlen_q", "num_heads", "head_size"))
    batch, seqlen_q, num_heads, _ = q.shape
    options = attention_options(
        q, batch, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, s_aux=s_aux,
    )  # fmt: skip
    check_caches(q, k_cache, v_cache, ("k_cache", "v_cache"))
    check_out(out, (*q.shape[:3], v_cache.shape[-1]), q.dtype)
    rotary = Rotary.of(rotary_cos, rotary_sin, rotary_interleaved, q.shape[-1])
    if gpu:
        if cache_leftpad is not None:
            raise NotImplementedError("cache_leftpad: not supported on a GPU, expected None")
        scales = (
            descale_on_gpu("k_descale", k_descale, k_cache, batch),
            descale_on_gpu("v_descale", v_descale, k_cache, batch),
        )
        given = (cache_seqlens, block_table, cache_batch_idx)
        gpu_cache = GpuCache.of(k_cache, v_cache, scales, batch, *given, lens_needed=k is not None)
        how = (given_plan(scheduler_metadata), options, out, return_softmax_lse)
        result, lse = attend_with_new(q, (k, v), gpu_cache, rotary, *how)
        return result if lse is None else (result, lse)
    k_scale, v_scale = (
        cache_scale(name, descale, k_cache, batch)
        for name, descale in (("k_descale", k_descale), ("v_descale", v_descale))
    )
    place = CachePlace.of(k_cache, batch, block_table, cache_batch_idx, cache_leftpad)
    lens = place.cached_lens(cache_seqlens, required=k is not None)
    cache = TorchCache.of(k_cache, v_cache, k_scale=k_scale, v_scale=v_scale)
    new = _new_tokens(q, k, v, rotary, cache, place, lens)
    if rotary is not None:
        q = rotary.rotate(q, lens, steps=options.causal or options.window != (None, None))
    if k is not None:
        lens = lens + np.int32(k.shape[1])
    caches, table, lens = place.without_leftpad((k_cache, v_cache, k_scale, v_scale), lens)
    shared = cache_view(*caches)
    if new is not None:  # the first thing to be written, after all checks
        write_kv_(cache, *new)
    starts = np.arange(batch + 1, dtype=np.int32) * np.int32(seqlen_q)
    packed = q.reshape(batch * seqlen_q, num_heads, q.shape[-1])
    result, lse = paged_call(packed, shared, table, lens, starts, options, return_softmax_lse)
    if lse is not None:
        lse = lse.view(num_heads, batch, seqlen_q).transpose(0, 1).contiguous()
    return finished(result.view(*q.shape[:3], v_cache.shape[-1]), lse, out)


def _new_tokens(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary: Rotary | None,
    cache: TorchCache,
    place: CachePlace,
    cached: np.ndarray,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Keys, values and slots to write, checked; None where there are none."""
    if k is None or v is None:
        if k is not None or v is not None:
            raise ValueError("k, v: expected both or neither")
        if rotary is not None:
            raise ValueError("rotary_cos: queries are rotated together with new keys, expected k, got None")
        return None
    dims = cache.dims
    check_activation("k", k, (q.shape[0], "seqlen_new", dims.num_kv_heads, dims.head_size), q.dtype)
    check_activation("v", v, (*k.shape[:3], dims.v_head_size), q.dtype)
    slots = place.new_slots(cached, k.shape[1])
    if rotary is not None:
        k = rotary.rotate(k, cached, steps=True)
    new = k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:]), slots
    check_new_tokens(cache, *new)
    return new
