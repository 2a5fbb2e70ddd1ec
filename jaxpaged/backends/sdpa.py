"""vLLM's CPU backend, TORCH_SDPA: decoder, encoder, encoder-only and cross-attention layers."""

from typing import Any

import torch

from jaxpaged.backends.attention_type import AttentionType
from jaxpaged.backends.biases import make_alibi_bias as _make_alibi_bias
from jaxpaged.backends.biases import make_sliding_window_bias as _make_sliding_window_bias
from jaxpaged.backends.flat_cache import FlatCache
from jaxpaged.backends.layer_cache import layer_cache
from jaxpaged.backends.outputs import check_output, store
from jaxpaged.backends.parts import NewTokens, attend
from jaxpaged.backends.sdpa_metadata import TorchSDPAMetadata, TorchSDPAMetadataBuilderV1
from jaxpaged.backends.sdpa_parts import batch_parts, check_metadata
from jaxpaged.backends.settings import Settings
from jaxpaged.bridge.torch_cache import TorchCache

__all__ = [
    "AttentionType",
    "TorchSDPABackend",
    "TorchSDPABackendImpl",
    "TorchSDPAMetadata",
    "TorchSDPAMetadataBuilderV1",
    "_make_alibi_bias",
    "_make_sliding_window_bias",
]


def _get_paged_attn_impl() -> type[FlatCache]:
    return FlatCache


class TorchSDPABackend:
    accept_output_buffer: bool = False

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def validate_head_size(cls, head_size: int) -> None:
        """Raise ValueError unless there are caches for heads of this size."""
        is_valid, supported = _get_paged_attn_impl().validate_head_size(head_size)
        if not is_valid:
            name = cls.__name__.removesuffix("Backend")
            raise ValueError(f"head_size: expected one of {supported} for {name}, got {head_size!r}")

    @staticmethod
    def get_name() -> str:
        return "TORCH_SDPA"

    @staticmethod
    def get_impl_cls() -> type["TorchSDPABackendImpl"]:
        return TorchSDPABackendImpl

    @staticmethod
    def get_metadata_cls() -> type["TorchSDPAMetadata"]:
        return TorchSDPAMetadata

    @staticmethod
    def get_builder_cls() -> type["TorchSDPAMetadataBuilderV1"]:
        return TorchSDPAMetadataBuilderV1

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """(2, num_blocks, block_size * num_kv_heads * head_size)."""
        return _get_paged_attn_impl().get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False


class TorchSDPABackendImpl:
    """One attention layer. Tokens lie with those of decodes first, then those of prompts."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        """A layer's settings.

        Args:
          alibi_slopes: [num_heads].
          sliding_window: positions that a query sees to each side, its own included; to its left in a decoder.
          kv_cache_dtype: see `jaxpaged.backends.functional.reshape_and_cache_flash`.
          kv_sharing_target_layer_name: the layer whose cache this one reads; it writes nothing then.

        Raises:
          TypeError, ValueError: an argument doesn't fit; the message names it.
        """
        self._settings = Settings.of(
            num_heads=num_heads, head_size=head_size, scale=scale, num_kv_heads=num_kv_heads,
            alibi_slopes=alibi_slopes, sliding_window=sliding_window, kv_cache_dtype=kv_cache_dtype,
            logits_soft_cap=logits_soft_cap,
        )  # fmt: skip
        self.paged_attn_impl = _get_paged_attn_impl()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = self._settings.scale
        self.num_kv_heads = num_kv_heads
        self.alibi_slopes = self._settings.alibi_slopes
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.num_queries_per_kv = num_heads // num_kv_heads
        self.need_mask = self.alibi_slopes is not None or sliding_window is not None
        self.attn_type = AttentionType.of(attn_type)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._options = self._settings.options(self.attn_type)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: TorchSDPAMetadata | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Put the new keys and values into the cache, in place, and attend.

        Args:
          layer: its `_k_scale` and `_v_scale` are the cache's scales.
          query: [num_tokens, num_heads * head_size] float32, bfloat16 or float16.
          key, value: [num_tokens, num_kv_heads * head_size] in the dtype of `query`; of an encoder's tokens in
            cross-attention, and None there once they are in the cache.
          kv_cache: [2, num_blocks, block_size * num_kv_heads * head_size], or empty in a profiling run. A block holds
            [block_size, num_kv_heads, head_size].
          attn_metadata: None in a run that warms up, which returns `query`.
          output: [num_tokens, num_heads * head_size], written and returned where given.
          output_scale: one float32 number by which results are divided to be stored in an `output` of 8 bits.

        Returns:
          [num_tokens, num_heads * head_size].

        Raises:
          NotImplementedError: `output_block_scale`, or tensors that are not on the CPU.
          TypeError, ValueError: an argument or the metadata don't fit; nothing has been written.
        """
        if attn_metadata is None:
            return query
        check_output(output, output_scale, output_block_scale, query)
        query, key, value = self._settings.heads(query, key, value)
        check_metadata(attn_metadata, self.attn_type)
        cache = self._cache(layer, kv_cache)
        shared = self.kv_sharing_target_layer_name is not None
        parts = batch_parts(attn_metadata, self.attn_type, self._options, query, key, value, from_cache=shared)
        result = attend(query, parts, cache, self._new_tokens(attn_metadata, key, value))
        if output is None:
            return result.flatten(1)
        store(result, output, output_scale)
        return output

    def _cache(self, layer: Any, kv_cache: torch.Tensor) -> TorchCache | None:
        """None for an encoder, which keeps nothing, and in a profiling run."""
        if self.attn_type == AttentionType.ENCODER or kv_cache.numel() == 0:
            return None
        key_cache, value_cache = self.paged_attn_impl.split_kv_cache(kv_cache, self.num_kv_heads, self.head_size)
        return layer_cache(key_cache, value_cache, self.kv_cache_dtype, layer._k_scale, layer._v_scale)

    def _new_tokens(
        self, meta: TorchSDPAMetadata, key: torch.Tensor | None, value: torch.Tensor | None
    ) -> NewTokens | None:
        if key is None or value is None or self.kv_sharing_target_layer_name is not None:
            return None
        cross = self.attn_type == AttentionType.ENCODER_DECODER
        slots = meta.cross_slot_mapping if cross else meta.slot_mapping
        assert slots is not None  # checked
        return key, value, slots
