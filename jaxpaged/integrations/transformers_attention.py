"""The attention function that transformers' continuous batching calls for each layer."""

import dataclasses
from typing import Any

import torch

from jaxpaged.backends.arguments import attention_options, check_caches
from jaxpaged.backends.checks import check_activation, check_tensors, on_gpu
from jaxpaged.backends.functional import flash_attn_varlen_func, flash_attn_with_kvcache, reshape_and_cache_flash
from jaxpaged.backends.gpu_attention import make_plan
from jaxpaged.backends.padded_calls import Options
from jaxpaged.bridge.dlpack import refuse_grad
from jaxpaged.integrations.transformers_step import Layer, Plan, Step, plan_of

NAME = "paged|jaxpaged"
"""What transformers' `attn_implementation` has to be."""

# What models pass to other attention functions, and what would change the result here.
_REFUSED = ("output_attentions", "head_mask", "position_bias", "indices", "block_indices")


@torch.compiler.disable
def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    cache: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **batch: Any,
) -> tuple[torch.Tensor, None]:
    """Put a layer's new keys and values into transformers' cache, in place, and attend to it.

    Args:
      module: the attention layer; its `layer_idx` says where its keys and values lie in the cache.
      query: [1, num_heads, num_tokens, head_size], of any strides.
      key, value: [1, num_kv_heads, num_tokens, head_size], likewise; `num_heads` is a multiple of `num_kv_heads`.
      attention_mask: None, since continuous batching says by lengths who attends to what.
      cache: the `PagedAttentionCache`: `key_cache[j]` is [num_blocks * block_size, num_kv_heads, head_size].
      scaling: `head_size ** -0.5` when None.
      sliding_window: how many positions a query sees, its own included; None for all, or for what the cache keeps.
      softcap: scores become `softcap * tanh(score / softcap)`; None for none.
      s_aux: [num_heads], sinks: logits that take part in the softmax's denominator alone.
      batch: what continuous batching passes to every layer: see `Step`; other arguments of models, which say nothing
        about attention, are not looked at.

    Returns:
      [1, num_tokens, num_heads, head_size], and None for the weights. Rows of padding are 0.

    Raises:
      TypeError, ValueError: an argument doesn't fit or asks for what can't be had; the message names it, and nothing
        has been written.
    """
    _refuse(module, attention_mask, dropout, batch)
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check_states(name, x, query)
    layer = Layer.of(module, cache, sliding_window)
    step = Step.of(batch)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "s_aux": s_aux}
    gpu = on_gpu(query=q, key=k, value=v, s_aux=s_aux, **{"cache.key_cache": layer.key_cache})
    checked = _check(layer, q, k, v, options, gpu)
    if layer.ring is not None and step.block_table is None and not step.decodes_from_cache(layer.group):
        out = _attend_beside_cache(layer, step, q, k, v, options)
    elif gpu:
        plan = plan_of(layer, step, gpu)
        assert plan.attention is not None
        window = checked if layer.ring is None else dataclasses.replace(checked, window=(None, None))
        make_plan(q, *layer.blocks(plan.block_size), (None, None), plan.attention, window)  # before it writes
        out = _write_and_attend(layer, step, plan, q, k, v, options)
    elif step.block_table is not None:
        out = _decode(layer, step, q, k, v, options)
    else:
        out = _write_and_attend(layer, step, plan_of(layer, step, gpu), q, k, v, options)
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0), None


def _decode(layer: Layer, step: Step, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """One new token a request, and a block table from transformers."""
    plan = plan_of(layer, step, gpu=False)
    key_blocks, value_blocks = layer.blocks(plan.block_size)
    out = flash_attn_with_kvcache(
        q.unsqueeze(1),
        key_blocks,
        value_blocks,
        k=k.unsqueeze(1),
        v=v.unsqueeze(1),
        cache_seqlens=plan.seq_lens,
        block_table=plan.block_table,
        causal=True,
        window_size=layer.window_size,
        **options,
    )
    assert isinstance(out, torch.Tensor)
    return out.squeeze(1)


def _write_and_attend(layer: Layer, step: Step, plan: Plan, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Any batch of a layer that keeps all, and decodes of one with a ring, where a query sees all that is kept."""
    assert plan.new_slots is not None
    key_cache, value_cache = layer.blocks(layer.block_size)
    reshape_and_cache_flash(k, v, key_cache, value_cache, plan.new_slots, "auto", 1.0, 1.0)
    key_blocks, value_blocks = layer.blocks(plan.block_size)
    return flash_attn_varlen_func(
        q,
        key_blocks,
        value_blocks,
        step.cu_seq_lens_q,
        seqused_k=plan.seq_lens,
        max_seqlen_q=step.max_seqlen_q,
        max_seqlen_k=step.max_seqlen_k_of(layer.layer_type),
        causal=True,
        window_size=layer.window_size if layer.ring is None else (-1, -1),
        block_table=plan.block_table,
        scheduler_metadata=plan.attention,
        **options,
    )


def _attend_beside_cache(layer: Layer, step: Step, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Prompts of a layer with a ring: new keys overwrite old ones that their first queries still see.

    So transformers' `update` reads the last ones in the window, and puts the new ones beside them, before it writes.
    """
    keys, values = layer.cache.update(
        key_states=k.transpose(0, 1).unsqueeze(0),
        value_states=v.transpose(0, 1).unsqueeze(0),
        layer_idx=layer.index,
        read_index=step.read_index,
        write_index=step.write_index,
    )
    return flash_attn_varlen_func(
        q,
        keys,
        values,
        step.cu_seq_lens_q,
        step.cu_seq_lens_k_of(layer.layer_type),
        step.max_seqlen_q,
        step.max_seqlen_k_of(layer.layer_type),
        causal=True,
        window_size=layer.window_size,
        **options,
    )


def _refuse(module: torch.nn.Module, attention_mask: Any, dropout: float, batch: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ValueError(
            "attention_mask: continuous batching says by lengths who attends to what, expected None, got "
            f"{type(attention_mask).__name__}"
        )
    if dropout:
        raise ValueError(f"dropout: not supported, expected 0, got {dropout!r}; call model.eval()")
    for name in _REFUSED:
        if batch.get(name) is not None and batch[name] is not False:
            raise ValueError(f"{name}: not supported by {NAME}, expected None, got {type(batch[name]).__name__}")
    if batch.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ValueError(f"is_causal: {NAME} is for decoders, expected True, got False")


def _check(layer: Layer, q: Any, k: Any, v: Any, options: dict[str, Any], gpu: bool) -> Options:
    """What the functions below would find wrong as well, but after the write."""
    if not gpu:
        check_tensors(query=q, key=k, value=v, s_aux=options["s_aux"])
    check_activation("query", q, ("num_tokens", "num_heads", "head_size"))
    key_cache, value_cache = layer.blocks(layer.block_size)
    for name, x, cache in (("key", k, key_cache), ("value", v, value_cache)):
        check_activation(name, x, ("num_tokens", *cache.shape[2:]), q.dtype)
    check_caches(q, key_cache, value_cache, ("cache.key_cache", "cache.value_cache"))
    return attention_options(q, 0, causal=True, window_size=layer.window_size, alibi_slopes=None, **options)


def _check_states(name: str, x: Any, query: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.ndim != 4 or x.shape[0] != 1 or x.shape[2] != query.shape[2]:
        num_tokens = query.shape[2] if query.ndim == 4 else "num_tokens"
        raise ValueError(f"{name}: expected shape [1, heads, {num_tokens}, head_size], got {list(x.shape)}")
    refuse_grad(x, name)
