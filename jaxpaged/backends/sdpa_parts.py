"""The parts of a batch of vLLM's CPU backend: where the keys of decodes and of prompts lie, by type of attention."""

import dataclasses

import numpy as np
import torch

from jaxpaged.backends.attention_type import AttentionType, MetadataError
from jaxpaged.backends.biases import bias_score
from jaxpaged.backends.padded_calls import Options
from jaxpaged.backends.parts import PackedPart, PagedPart, Part, check_num_tokens
from jaxpaged.backends.sdpa_metadata import TorchSDPAMetadata

_LENGTHS = {
    AttentionType.DECODER: ("seq_lens", "seq_lens"),
    AttentionType.ENCODER_ONLY: ("seq_lens", "seq_lens"),
    AttentionType.ENCODER: ("encoder_seq_lens", "encoder_seq_lens"),
    AttentionType.ENCODER_DECODER: ("seq_lens", "encoder_seq_lens"),
}
"""The fields that hold the lengths of whole prompts' queries and keys."""


def check_metadata(meta: TorchSDPAMetadata, attn_type: AttentionType) -> None:
    """Raise unless the metadata have what this type of attention needs, and no requests that it can't have."""
    encoder = ("encoder_seq_lens", "encoder_seq_lens_tensor", "max_encoder_seq_len")
    needed: dict[AttentionType, tuple[str, ...]] = {
        AttentionType.ENCODER: (*encoder, "num_encoder_tokens"),
        AttentionType.ENCODER_DECODER: (*encoder, "cross_slot_mapping", "cross_block_tables"),
    }
    missing = [name for name in needed.get(attn_type, ()) if getattr(meta, name) is None]
    if missing:
        raise MetadataError(f"attn_metadata: {attn_type} attention needs {', '.join(missing)}, got None")
    if attn_type == AttentionType.ENCODER_ONLY and meta.num_decode_tokens:
        raise MetadataError(
            f"attn_metadata.num_decode_tokens: a model without a decoder has none, got {meta.num_decode_tokens}"
        )
    if attn_type == AttentionType.ENCODER_DECODER and meta.num_decode_tokens and meta.num_prefill_tokens:
        raise MetadataError(
            f"attn_metadata: cross-attention takes prompts or decodes, not both at once, got {meta.num_prefill_tokens} "
            f"tokens of prompts and {meta.num_decode_tokens} of decodes"
        )


def batch_parts(
    meta: TorchSDPAMetadata,
    attn_type: AttentionType,
    options: Options,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    *,
    from_cache: bool,
) -> list[Part]:
    """The decodes and the prompts of checked metadata.

    Args:
      query, key, value: [num_tokens, heads, head_size].
      from_cache: even whole prompts attend to the cache, which another layer has written.
    """
    num_decode, num_prefill = meta.num_decode_tokens, meta.num_prefill_tokens
    if attn_type == AttentionType.ENCODER:
        assert meta.num_encoder_tokens is not None  # checked
        num_decode, num_prefill = 0, meta.num_encoder_tokens
    check_num_tokens("query", query, num_prefill, num_decode)
    if attn_type == AttentionType.DECODER and key is not None:
        check_num_tokens("key", key, num_prefill, num_decode)
    parts: list[Part] = []
    if num_decode:
        parts.append(_decodes(meta, attn_type, options, slice(0, num_decode)))
    if num_prefill:
        tokens = slice(num_decode, num_decode + num_prefill)
        if key is None or value is None:
            from_cache = True
        if attn_type == AttentionType.ENCODER_DECODER and from_cache:
            parts.append(_cross_prompts(meta, options, tokens))
        elif attn_type != AttentionType.ENCODER and (meta.chunked_prefill or from_cache):
            parts.append(_cached_prompts(meta, options, tokens))
        else:
            parts.append(_whole_prompts(meta, attn_type, options, tokens, query.shape[1], key, value))
    return parts


def _decodes(meta: TorchSDPAMetadata, attn_type: AttentionType, options: Options, tokens: slice) -> PagedPart:
    lens, _, tables = meta.get_seq_len_block_table_args(attn_type)
    names = ("decode_block_tables", "decode_seq_lens_tensor")
    if attn_type == AttentionType.ENCODER_DECODER:
        names = ("cross_block_tables", "encoder_seq_lens_tensor")
    return PagedPart.of(tokens, options, block_table=tables, seq_lens=lens, names=names)


def _cross_prompts(meta: TorchSDPAMetadata, options: Options, tokens: slice) -> PagedPart:
    """Prompts of a decoder whose encoder's keys are in the cache already."""
    if meta.seq_lens is None:
        raise MetadataError("attn_metadata.seq_lens: expected the prompts' lengths, got None")
    starts = torch.tensor([0, *np.cumsum(meta.seq_lens, dtype=np.int32)], dtype=torch.int32)
    return PagedPart.of(
        tokens, options, block_table=meta.cross_block_tables, seq_lens=meta.encoder_seq_lens_tensor,
        query_start_loc=starts, names=("cross_block_tables", "encoder_seq_lens_tensor"),
    )  # fmt: skip


def _cached_prompts(meta: TorchSDPAMetadata, options: Options, tokens: slice) -> PagedPart:
    if meta.prefill_query_start_loc is None or meta.prefill_seq_start_loc is None:
        raise MetadataError(
            "attn_metadata.prefill_query_start_loc, prefill_seq_start_loc: expected tensors for prompts in the cache, "
            "got None"
        )
    return PagedPart.of(
        tokens, options, block_table=meta.prefill_block_tables, seq_lens=meta.prefill_seq_start_loc.diff(),
        query_start_loc=meta.prefill_query_start_loc, names=("prefill_block_tables", "prefill_seq_start_loc"),
    )  # fmt: skip


def _whole_prompts(
    meta: TorchSDPAMetadata,
    attn_type: AttentionType,
    options: Options,
    tokens: slice,
    num_heads: int,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
) -> PackedPart:
    """They need no cache. The metadata's own biases take the place of the layer's mask, window and ALiBi."""
    query_lens, kv_lens = meta.get_seq_lens(attn_type)
    names = _LENGTHS[attn_type]
    if key is None or value is None or query_lens is None or kv_lens is None:
        raise MetadataError(f"key, value, attn_metadata.{names[0]}: expected all of them for whole prompts, got None")
    biases = meta.get_attn_bias(attn_type)
    if biases is not None:
        score_mod = bias_score(biases, query_lens, kv_lens, num_heads=num_heads, causal=options.causal)
        options = dataclasses.replace(
            options, causal=False, window=(None, None), alibi_slopes=None, score_mod=score_mod
        )
    if attn_type == AttentionType.DECODER:
        key, value = key[tokens], value[tokens]
    return PackedPart.of(tokens, options, key=key, value=value, query_lens=query_lens, kv_lens=kv_lens, names=names)
