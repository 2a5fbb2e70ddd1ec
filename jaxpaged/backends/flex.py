"""vLLM's FlexAttention backend: batches of any requests, with masks and scores that users may replace."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from jaxpaged.backends.attention_type import AttentionType, MetadataError
from jaxpaged.backends.checks import on_gpu
from jaxpaged.backends.flex_builder import FlexAttentionMetadataBuilder
from jaxpaged.backends.flex_call import flex_attention_compiled, run_part, tile_mask
from jaxpaged.backends.flex_masks import causal_mask_mod, physical_to_logical_mapping
from jaxpaged.backends.flex_masks import offsets_to_doc_ids as _offsets_to_doc_ids_tensor
from jaxpaged.backends.flex_metadata import FlexAttentionMetadata, create_block_mask_compiled
from jaxpaged.backends.gpu_parts import GpuLayerCache, GpuPagedPart, attend_into, plan_of
from jaxpaged.backends.gpu_plan import AttentionPlan, plan_attention
from jaxpaged.backends.layer_cache import layer_cache
from jaxpaged.backends.outputs import check_output, store
from jaxpaged.backends.padded_calls import Options
from jaxpaged.backends.parts import NewTokens, PagedPart, attend
from jaxpaged.backends.positions import OneBatch
from jaxpaged.backends.settings import Settings, check_head_size
from jaxpaged.bridge.dlpack import to_numpy
from jaxpaged.bridge.torch_functions import POSITIONS, SCORE_AND_POSITIONS, jax_function
from jaxpaged.metadata.checks import check_shape
from jaxpaged.metadata.masks import and_masks

__all__ = [
    "AttentionType",
    "FlexAttentionBackend",
    "FlexAttentionImpl",
    "FlexAttentionMetadata",
    "FlexAttentionMetadataBuilder",
    "_offsets_to_doc_ids_tensor",
    "causal_mask_mod",
    "create_block_mask_compiled",
    "flex_attention_compiled",
    "physical_to_logical_mapping",
]

logger = logging.getLogger(__name__)


class FlexAttentionBackend:
    accept_output_buffer: bool = True

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return [16, 32, 64, 96, 128, 160, 192, 224, 256]

    @staticmethod
    def get_name() -> str:
        return "FLEX_ATTENTION"

    @staticmethod
    def get_impl_cls() -> type["FlexAttentionImpl"]:
        return FlexAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type["FlexAttentionMetadata"]:
        return FlexAttentionMetadata

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
    ) -> tuple[int, ...]:
        """(2, num_blocks, block_size, num_kv_heads, head_size)."""
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @staticmethod
    def get_builder_cls() -> type["FlexAttentionMetadataBuilder"]:
        return FlexAttentionMetadataBuilder

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        return False


class FlexAttentionImpl:
    """One attention layer."""

    sliding_window: tuple[int, int] | None
    alibi_slopes: torch.Tensor | None
    logits_soft_cap: float | None

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
        attn_type: Any = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        """A layer's settings.

        Args:
          alibi_slopes: [num_heads].
          sliding_window: positions that a query sees to each side, its own included; to its left in a decoder.
          kv_cache_dtype: see `jaxpaged.backends.functional.reshape_and_cache_flash`.
          blocksparse_params: see `jaxpaged.backends.block_sparse.BlockSparseMask.of`.
          attn_type: an encoder sees both sides, unless its batch's `logical_mask_mod` was replaced.
          kv_sharing_target_layer_name: the layer whose cache this one reads; it writes nothing then.

        Raises:
          TypeError, ValueError: an argument doesn't fit, or it is cross-attention, for which these metadata have no
            lengths; the message names it.
        """
        check_head_size(head_size, FlexAttentionBackend.get_supported_head_sizes(), "FlexAttention")
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
        self.logits_soft_cap = logits_soft_cap
        self.num_queries_per_kv = num_heads // num_kv_heads
        self.attn_type = AttentionType.of(attn_type)
        if self.attn_type == AttentionType.ENCODER_DECODER:
            raise MetadataError(
                "attn_type: FlexAttentionMetadata have no lengths and block tables of an encoder, expected another "
                "type than cross-attention"
            )
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._options = self._settings.options(self.attn_type)

    @staticmethod
    def view_as_4d(tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of 3 axes with an axis of size 1 before them; one of 4 axes as it is.

        Raises:
          ValueError: it has another number of axes.
        """
        if tensor.ndim not in (3, 4):
            raise ValueError(f"tensor: expected 3 or 4 axes, got shape {list(tensor.shape)}")
        return tensor if tensor.ndim == 4 else tensor.unsqueeze(0)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlexAttentionMetadata | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Put the new keys and values into the cache, in place, and attend.

        Args:
          layer: its `_k_scale` and `_v_scale` are the cache's scales.
          query: [num_tokens, num_heads, head_size] float32, bfloat16 or float16.
          key, value: [num_tokens, num_kv_heads, head_size] in the dtype of `query`.
          kv_cache: [2, num_blocks, block_size, num_kv_heads, head_size].
          attn_metadata: None in a profiling run, which returns `output` as it is.
          output: [num_tokens, num_heads, head_size] or [num_tokens, num_heads * head_size]. Its first
            `num_actual_tokens` rows are written, and it is returned.
          output_scale: one float32 number by which results are divided to be stored in an `output` of 8 bits.

        Raises:
          NotImplementedError, RuntimeError: in the capture of a CUDA graph, what the kernels don't take, such as masks
            and scores that a user replaced.
          TypeError, ValueError: an argument, a user's function or the metadata don't fit; nothing has been written.
        """
        if output is None:
            raise ValueError("output: expected a tensor to write to, got None")
        if attn_metadata is None:
            return output
        gpu = on_gpu(query=query, key=key, value=value, kv_cache=kv_cache, output=output)
        query, by_head, value_by_head = self._settings.heads(query, key, value, gpu)
        rows = query[: attn_metadata.num_actual_tokens]
        check_output(output, output_scale, None, rows)
        self._check_batch(attn_metadata, rows, kv_cache)
        new: NewTokens | None = None
        if self.kv_sharing_target_layer_name is None:
            if by_head is None or value_by_head is None:
                raise ValueError("key, value: expected the new tokens' keys and values, got None")
            new = by_head, value_by_head, attn_metadata.slot_mapping
        if gpu:
            self._attend_on_gpu(layer, rows, new, kv_cache, attn_metadata, output, output_scale)
            return output
        cache = layer_cache(kv_cache[0], kv_cache[1], self.kv_cache_dtype, layer._k_scale, layer._v_scale)
        store(attend(rows, [self._part(attn_metadata, rows, kv_cache)], cache, new), output, output_scale)
        return output

    def _check_batch(self, meta: FlexAttentionMetadata, rows: torch.Tensor, kv_cache: torch.Tensor) -> None:
        check_shape("kv_cache", kv_cache.shape, (2, "num_blocks", "block_size", self.num_kv_heads, self.head_size))
        if rows.shape[0] != meta.num_actual_tokens:
            raise ValueError(f"query: expected {meta.num_actual_tokens} tokens or more, got {rows.shape[0]}")
        if kv_cache.shape[2] != meta.block_size:
            raise ValueError(
                f"kv_cache: expected blocks of {meta.block_size}, as in attn_metadata, got {kv_cache.shape[2]}"
            )

    def _attend_on_gpu(
        self,
        layer: Any,
        rows: torch.Tensor,
        new: NewTokens | None,
        kv_cache: torch.Tensor,
        meta: FlexAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None,
    ) -> None:
        """`forward` on a GPU, of what has been checked but the cache."""
        cache = GpuLayerCache.of(kv_cache[0], kv_cache[1], self.kv_cache_dtype, layer._k_scale, layer._v_scale)
        plan, options = self._gpu_batch(meta, rows, kv_cache)
        attend_into(output, output_scale, rows, GpuPagedPart(slice(0, len(rows)), plan, options), cache, new)

    def _gpu_batch(
        self, meta: FlexAttentionMetadata, rows: torch.Tensor, kv_cache: torch.Tensor
    ) -> tuple[AttentionPlan, Options]:
        if meta.is_logical:
            plan = plan_of(meta, *meta.requests(), int(meta.max_query_len), ("block_table", "seq_lens"))
            return plan, self._logical_options(meta, rows.device)
        part = self._physical_part(meta, rows, kv_cache)
        table, lens, starts = (
            torch.as_tensor(x, device=rows.device) for x in (part.block_table, part.seq_lens, part.starts)
        )
        return plan_attention(table, lens, starts), part.options

    def _part(self, meta: FlexAttentionMetadata, rows: torch.Tensor, kv_cache: torch.Tensor) -> PagedPart:
        if meta.is_logical:
            return self._logical_part(meta, rows)
        return self._physical_part(meta, rows, kv_cache)

    def _logical_options(self, meta: FlexAttentionMetadata, device: torch.device) -> Options:
        """What the scores go through where each request attends to its own tokens."""
        options, mask = self._options, meta.logical_mask_mod
        if mask is not causal_mask_mod:
            function = meta.translated(mask, lambda f: jax_function("logical_mask_mod", f, POSITIONS, device))
            logical = OneBatch(function)
            mask_mod = logical if options.mask_mod is None else and_masks(options.mask_mod, logical)
            options = dataclasses.replace(options, causal=False, mask_mod=mask_mod)
        return dataclasses.replace(options, physical_score_mod=self._score_mod(meta, device))

    def _logical_part(self, meta: FlexAttentionMetadata, rows: torch.Tensor) -> PagedPart:
        """Each request attends to its own tokens, through its block table."""
        options, num_tokens = self._logical_options(meta, rows.device), rows.shape[0]
        block_table, seq_lens, starts = meta.requests()
        part = PagedPart.of(
            slice(0, num_tokens), options, block_table=block_table, seq_lens=seq_lens, query_start_loc=starts,
            names=("block_table", "seq_lens"),
        )  # fmt: skip
        offset = to_numpy(meta.decode_offset[: meta.num_reqs], "decode_offset")
        if not np.array_equal(offset, part.seq_lens - np.diff(part.starts)):
            raise ValueError(
                f"attn_metadata.decode_offset: expected each request's seq_len without its new tokens, "
                f"{(part.seq_lens - np.diff(part.starts)).tolist()}, got {offset.tolist()}"
            )
        return dataclasses.replace(part, shares_prefix=meta.use_cascade)

    def _physical_part(self, meta: FlexAttentionMetadata, rows: torch.Tensor, kv_cache: torch.Tensor) -> PagedPart:
        """All rows attend to whatever of the whole cache a user's mask keeps."""
        options, num_tokens, device = self._options, rows.shape[0], rows.device
        if options.window != (None, None) or options.alibi_slopes is not None or options.mask_mod is not None:
            raise ValueError(
                "attn_metadata.mask_mod, block_mask: a layer with a window, ALiBi or a block-sparse mask needs "
                "positions in requests, expected logical_mask_mod to be replaced instead"
            )
        total = kv_cache.shape[1] * kv_cache.shape[2]
        if total != meta.total_cache_tokens:
            raise ValueError(f"kv_cache: expected {meta.total_cache_tokens} tokens, as in attn_metadata, got {total}")
        if meta.replaced_block_mask is not None:
            shape = (1, self.num_heads, num_tokens, total)
            mask = meta.translated(meta.replaced_block_mask, lambda block_mask: tile_mask(block_mask, shape, device))
        else:
            mask = meta.translated(meta.replaced_mask_mod, lambda f: jax_function("mask_mod", f, POSITIONS, device))
        table = np.arange(kv_cache.shape[1], dtype=np.int32)[None]
        return run_part(table, num_tokens, total, options, mask_mod=mask, score_mod=self._score_mod(meta, device))

    def _score_mod(self, meta: FlexAttentionMetadata, device: torch.device) -> Callable[..., Any] | None:
        if meta.score_mod is None:
            return None
        return meta.translated(meta.score_mod, lambda f: jax_function("score_mod", f, SCORE_AND_POSITIONS, device))
