"""Aphrodite's FlashAttention backend: prompts, chunks of prompts and decodes in one flattened batch."""

from typing import Any

import torch

from jaxpaged.backends import cache_functions
from jaxpaged.backends.attention_type import AttentionType, MetadataError
from jaxpaged.backends.checks import on_gpu
from jaxpaged.backends.flash_builder import FlashAttentionMetadataBuilder
from jaxpaged.backends.flash_metadata import FlashAttentionMetadata
from jaxpaged.backends.gpu_parts import (
    GpuLayerCache,
    GpuPackedPart,
    GpuPagedPart,
    GpuPart,
    attend_on_gpu,
    plan_of,
)
from jaxpaged.backends.layer_cache import layer_cache
from jaxpaged.backends.parts import NewTokens, PackedPart, PagedPart, Part, attend, check_num_tokens
from jaxpaged.backends.settings import Settings, check_head_size
from jaxpaged.bridge.torch_cache import TorchCache
from jaxpaged.metadata.checks import check_positive, check_shape
from jaxpaged.metadata.slots import (
    PAD_SLOT_ID,
    compute_slot_mapping,
    compute_slot_mapping_start_idx,
    is_block_tables_empty,
)

__all__ = [
    "PAD_SLOT_ID",
    "AttentionType",
    "FlashAttentionBackend",
    "FlashAttentionImpl",
    "FlashAttentionMetadata",
    "FlashAttentionMetadataBuilder",
    "compute_slot_mapping",
    "compute_slot_mapping_start_idx",
    "is_block_tables_empty",
]


class FlashAttentionBackend:
    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return [32, 64, 96, 128, 160, 192, 224, 256]

    @staticmethod
    def get_name() -> str:
        return "flash-attn"

    @staticmethod
    def get_impl_cls() -> type["FlashAttentionImpl"]:
        return FlashAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type["FlashAttentionMetadata"]:
        return FlashAttentionMetadata

    @staticmethod
    def get_builder_cls() -> type["FlashAttentionMetadataBuilder"]:
        return FlashAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
    ) -> tuple[int, ...]:
        """(2, num_blocks, block_size, num_kv_heads, head_size).

        Raises:
          ValueError: `block_size` is not a multiple of 16.
        """
        if check_positive("block_size", block_size) % 16:
            raise ValueError(f"block_size: expected a multiple of 16, got {block_size}")
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @staticmethod
    def swap_blocks(
        src_kv_cache: torch.Tensor,
        dst_kv_cache: torch.Tensor,
        src_to_dst: torch.Tensor,
    ) -> None:
        """Copy blocks of one cache [2, num_blocks, ...] into another, in place.

        Args:
          src_to_dst: [n, 2] int32 or int64; see `jaxpaged.backends.functional.swap_blocks`.
        """
        src, dst = _blocks_first("src_kv_cache", src_kv_cache), _blocks_first("dst_kv_cache", dst_kv_cache)
        for side in (0, 1):  # each has its blocks one after the other, as kernels need them
            cache_functions.swap_blocks(src[:, side], dst[:, side], src_to_dst)

    @staticmethod
    def copy_blocks(
        kv_caches: list[torch.Tensor],
        src_to_dists: torch.Tensor,
    ) -> None:
        """Copy blocks within the caches [2, num_blocks, ...] of all layers, in place.

        Args:
          src_to_dists: [n, 2] int32 or int64; see `jaxpaged.backends.functional.copy_blocks`.
        """
        for i, cache in enumerate(kv_caches):
            _blocks_first(f"kv_caches[{i}]", cache)
        keys, values = ([cache[side] for cache in kv_caches] for side in (0, 1))
        cache_functions.copy_blocks(keys, values, src_to_dists)


class FlashAttentionImpl:
    """One attention layer. Tokens lie with those of prompts first, then those of decodes."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        blocksparse_params: dict[str, Any] | None = None,
        logits_soft_cap: float | None = None,
    ) -> None:
        """A layer's settings.

        Args:
          alibi_slopes: [num_heads].
          sliding_window: positions that a query sees, its own included.
          kv_cache_dtype: see `jaxpaged.backends.functional.reshape_and_cache_flash`.
          blocksparse_params: see `jaxpaged.backends.block_sparse.BlockSparseMask.of`.

        Raises:
          TypeError, ValueError: an argument doesn't fit; the message names it.
        """
        check_head_size(head_size, FlashAttentionBackend.get_supported_head_sizes(), "FlashAttention")
        self._settings = Settings.of(
            num_heads=num_heads, head_size=head_size, scale=scale, num_kv_heads=num_kv_heads,
            alibi_slopes=alibi_slopes, sliding_window=sliding_window, kv_cache_dtype=kv_cache_dtype,
            logits_soft_cap=logits_soft_cap, blocksparse_params=blocksparse_params,
        )  # fmt: skip
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = self._settings.scale
        self.num_kv_heads = num_kv_heads
        self.alibi_slopes = self._settings.alibi_slopes
        self.sliding_window = self._settings.window_sides
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = 0 if logits_soft_cap is None else logits_soft_cap
        self.num_queries_per_kv = num_heads // num_kv_heads

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        attn_metadata: FlashAttentionMetadata,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        attn_type: Any = AttentionType.DECODER,
    ) -> torch.Tensor:
        """Put the new keys and values into the cache, in place, and attend.

        Args:
          query: [num_tokens, num_heads * head_size] float32, bfloat16 or float16.
          key, value: [num_tokens, num_kv_heads * head_size] in the dtype of `query`.
          kv_cache: [2, num_blocks, block_size, num_kv_heads, head_size]; None in a profile run, which keeps nothing.
          attn_metadata: prompts without block tables are whole, and attend to `key` and `value`.
          k_scale, v_scale: those of an 8-bit cache, else 1.
          attn_type: an encoder attends to both sides, among whole prompts, and keeps nothing.

        Returns:
          [num_tokens, num_heads * head_size].

        Raises:
          NotImplementedError, RuntimeError: in the capture of a CUDA graph, what the kernels don't take.
          TypeError, ValueError: an argument or the metadata don't fit, or `attn_type` is cross-attention, for which
            these metadata have no lengths; nothing has been written.
        """
        attn_type = AttentionType.of(attn_type)
        if attn_type == AttentionType.ENCODER_DECODER:
            raise MetadataError(
                "attn_type: FlashAttentionMetadata have no lengths and block tables of an encoder, expected another "
                "type than cross-attention"
            )
        gpu = on_gpu(query=query, key=key, value=value, kv_cache=kv_cache)
        query, by_head, value_by_head = self._settings.heads(query, key, value, gpu)
        if by_head is None or value_by_head is None:
            raise ValueError("key, value: expected the new tokens' keys and values, got None")
        meta = attn_metadata
        for name, x in (("query", query), ("key", by_head), ("value", value_by_head)):
            check_num_tokens(name, x, meta.num_prefill_tokens, meta.num_decode_tokens)
        cache: TorchCache | GpuLayerCache | None = None
        new: NewTokens | None = None
        if kv_cache is not None and attn_type == AttentionType.DECODER:
            check_shape("kv_cache", kv_cache.shape, (2, "num_blocks", "block_size", self.num_kv_heads, self.head_size))
            make = GpuLayerCache.of if gpu else layer_cache
            cache = make(kv_cache[0], kv_cache[1], self.kv_cache_dtype, k_scale, v_scale)
            new = (by_head, value_by_head, meta.slot_mapping.flatten())
        given = (meta, attn_type, by_head, value_by_head)
        if gpu:
            assert not isinstance(cache, TorchCache)
            parts = self._gpu_parts(*given, cached=cache is not None)
            return attend_on_gpu(query, parts, cache, new).flatten(1)
        assert not isinstance(cache, GpuLayerCache)
        return attend(query, self._parts(*given, cached=cache is not None), cache, new).flatten(1)

    def _gpu_parts(
        self,
        meta: FlashAttentionMetadata,
        attn_type: AttentionType,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cached: bool,
    ) -> list[GpuPart]:
        options = self._settings.options(attn_type)
        split, end = meta.num_prefill_tokens, meta.num_prefill_tokens + meta.num_decode_tokens
        parts: list[GpuPart] = []
        prefill, decode = meta.prefill_metadata, meta.decode_metadata
        if prefill is not None and _whole_prompts(prefill, cached):
            starts = _starts_of_prompts(prefill)
            parts.append(GpuPackedPart(slice(0, split), starts, key[:split], value[:split], options))
        elif prefill is not None:
            batch = (prefill.block_tables, prefill.seq_lens_tensor, prefill.query_start_loc)
            plan = plan_of(prefill, *batch, longest=None)
            parts.append(GpuPagedPart(slice(0, split), plan, options))
        if decode is not None:
            plan = plan_of(decode, decode.block_tables, decode.seq_lens_tensor, None, longest=1)
            parts.append(GpuPagedPart(slice(split, end), plan, options))
        return parts

    def _parts(
        self,
        meta: FlashAttentionMetadata,
        attn_type: AttentionType,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cached: bool,
    ) -> list[Part]:
        options = self._settings.options(attn_type)
        split, end = meta.num_prefill_tokens, meta.num_prefill_tokens + meta.num_decode_tokens
        parts: list[Part] = []
        prefill, decode = meta.prefill_metadata, meta.decode_metadata
        if prefill is not None and _whole_prompts(prefill, cached):
            lens = _starts_of_prompts(prefill).diff().tolist()
            parts.append(
                PackedPart.of(
                    slice(0, split), options, key=key[:split], value=value[:split], query_lens=lens, kv_lens=lens,
                    names=("seq_start_loc", "seq_start_loc"),
                )
            )  # fmt: skip
        elif prefill is not None:
            parts.append(
                PagedPart.of(
                    slice(0, split), options, block_table=prefill.block_tables, seq_lens=prefill.seq_lens_tensor,
                    query_start_loc=prefill.query_start_loc,
                )
            )  # fmt: skip
        if decode is not None:
            tables, seq_lens = decode.block_tables, decode.seq_lens_tensor
            parts.append(PagedPart.of(slice(split, end), options, block_table=tables, seq_lens=seq_lens))
        return parts


def _whole_prompts(prefill: FlashAttentionMetadata, cached: bool) -> bool:
    """Whether prompts attend to their new keys, and not to the cache."""
    return not cached or prefill.block_tables is None or prefill.block_tables.numel() == 0


def _starts_of_prompts(prefill: FlashAttentionMetadata) -> torch.Tensor:
    if prefill.seq_start_loc is None:
        raise MetadataError("attn_metadata.seq_start_loc: expected a tensor for whole prompts, got None")
    return prefill.seq_start_loc


def _blocks_first(name: str, kv_cache: torch.Tensor) -> torch.Tensor:
    """A cache [2, num_blocks, ...] as [num_blocks, 2, ...]."""
    if not isinstance(kv_cache, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(kv_cache).__name__}")
    if kv_cache.ndim < 2 or kv_cache.shape[0] != 2:
        raise ValueError(f"{name}: expected shape [2, num_blocks, ...], got {list(kv_cache.shape)}")
    return kv_cache.transpose(0, 1)
