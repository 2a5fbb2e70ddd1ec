"""One attention layer of a model in vLLM: what its implementation class does, without vLLM's base class."""

import dataclasses
from typing import Any

import torch

from jaxpaged.backends.attention_type import AttentionType
from jaxpaged.backends.checks import check_activation, on_gpu
from jaxpaged.backends.gpu_parts import (
    GpuLayerCache,
    GpuPackedPart,
    GpuPagedPart,
    GpuPart,
    attend_into,
    plan_of,
)
from jaxpaged.backends.layer_cache import layer_cache
from jaxpaged.backends.outputs import check_output, store
from jaxpaged.backends.padded_calls import Options
from jaxpaged.backends.parts import PackedPart, PagedPart, Part, attend
from jaxpaged.backends.settings import Settings, check_head_size
from jaxpaged.bridge.torch_cache import TorchCache, write_kv_
from jaxpaged.integrations.vllm.masks import CausalRequests
from jaxpaged.integrations.vllm.metadata import JaxpagedMetadata
from jaxpaged.metadata.checks import check_shape

HEAD_SIZES = [*range(8, 257, 8), 512]
UNQUANTIZED_CACHES = ("auto", "float16", "bfloat16")
FLOAT8_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2")
FLOAT8_HEAD_SIZES = (64, 128, 192)
"""Those of 8-bit caches that prompts can attend to on a GPU."""
_WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def gpu_refusal(head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None) -> str | None:
    """Why layers like this can't run on a GPU, or None."""
    if dtype == torch.float32:
        return "float32 not supported on a GPU"
    if head_size > 256:
        return f"head_size {head_size} not supported on a GPU"
    if kv_cache_dtype in FLOAT8_CACHES and head_size not in FLOAT8_HEAD_SIZES:
        return f"kv_cache_dtype {kv_cache_dtype} not supported on a GPU with head_size {head_size}"
    if block_size is not None and block_size % 8:
        return f"block_size {block_size} not supported on a GPU, where it has to be a multiple of 8"
    return None


class AttentionLayer:
    """The settings of a layer, and its calls."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """A layer's settings.

        Args:
          num_kv_heads: `num_heads` when None.
          alibi_slopes: [num_heads].
          sliding_window: positions that a query sees to each side, its own included; to its left in a decoder.
          kv_cache_dtype: "auto", "float16" or "bfloat16" for a cache in the dtype of the activations; "fp8" (e4m3),
            "fp8_e4m3" or "fp8_e5m2".
          logits_soft_cap: scores become `cap * tanh(score / cap)`.
          kv_sharing_target_layer_name: the layer whose cache this one reads; vLLM has it write nothing then.
          sinks: [num_heads], logits that take part in the softmax's denominator alone; read in each call, since the
            weights are loaded later.

        Raises:
          TypeError, ValueError: an argument doesn't fit; the message names it.
        """
        check_head_size(head_size, HEAD_SIZES, "vLLM")
        if kv_cache_dtype not in (*UNQUANTIZED_CACHES, *FLOAT8_CACHES):
            expected = [*UNQUANTIZED_CACHES, *FLOAT8_CACHES]
            raise ValueError(f"kv_cache_dtype: expected one of {expected}, got {kv_cache_dtype!r}")
        self._stored = "auto" if kv_cache_dtype in UNQUANTIZED_CACHES else kv_cache_dtype
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self._settings = Settings.of(
            num_heads=num_heads, head_size=head_size, scale=scale, num_kv_heads=num_kv_heads,
            alibi_slopes=alibi_slopes, sliding_window=sliding_window, kv_cache_dtype=self._stored,
            logits_soft_cap=logits_soft_cap,
        )  # fmt: skip
        if sinks is not None:
            check_activation("sinks", sinks, (num_heads,))
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.num_queries_per_kv = num_heads // num_kv_heads
        self.scale = self._settings.scale
        self.alibi_slopes, self.sinks = self._settings.alibi_slopes, sinks
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = AttentionType.of(attn_type)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        both_sides = AttentionType.ENCODER_ONLY if self.attn_type == AttentionType.DECODER else self.attn_type
        self._causal = dataclasses.replace(self._settings.options(AttentionType.DECODER), sinks=sinks)
        self._both_sides = dataclasses.replace(self._settings.options(both_sides), sinks=sinks)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Put new keys and values into the cache, in place; an encoder, which has none, does nothing.

        Args:
          layer: vLLM's module, whose scales are those of an 8-bit cache.
          key, value: [num_tokens, num_kv_heads, head_size], of any strides; there may be more tokens than slots.
          kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], a row a key and then its value, with the
            axes of a block in either order in memory.
          slot_mapping: [num_slots] int32 or int64; tokens with a negative slot are skipped.

        Raises:
          TypeError, ValueError: an argument doesn't fit; nothing has been written.
        """
        if self.attn_type in _WITHOUT_CACHE:
            return
        if on_gpu(key=key, value=value, kv_cache=kv_cache, slot_mapping=slot_mapping):
            self._gpu_cache(layer, kv_cache).write(key, value, slot_mapping)
        else:
            write_kv_(self._cache(layer, kv_cache), key, value, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: JaxpagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache, or in an encoder to `key` and `value`.

        Args:
          layer, kv_cache: as in `do_kv_cache_update`, which has been called with the new tokens.
          query: [num_tokens, num_heads, head_size] float32, bfloat16 or float16.
          key, value: [num_tokens, num_kv_heads, head_size], looked at in an encoder only.
          attn_metadata: None in a profiling run, which gives 0.
          output: [num_tokens, num_heads, head_size], or with the last two axes as one. Its first `num_actual_tokens`
            rows are written, and it is returned.
          output_scale: one float32 number by which results are divided to be stored in an `output` of 8 bits.

        Raises:
          NotImplementedError: `output_block_scale`.
          NotImplementedError, RuntimeError: in the capture of a CUDA graph, what the kernels don't take.
          TypeError, ValueError: an argument or the metadata don't fit; nothing has been written.
        """
        if attn_metadata is None:
            return output.zero_()
        gpu = on_gpu(query=query, output=output)
        query, key, value = self._settings.heads(query, key, value, gpu)
        num_tokens = attn_metadata.num_actual_tokens
        if query.shape[0] < num_tokens:
            raise ValueError(f"query: expected {num_tokens} tokens or more, as in attn_metadata, got {query.shape[0]}")
        rows = query[:num_tokens]
        check_output(output, output_scale, output_block_scale, rows)
        if gpu:
            self._attend_on_gpu(layer, rows, key, value, kv_cache, attn_metadata, output, output_scale)
            return output
        if self.attn_type in _WITHOUT_CACHE:
            part, cache = self._packed_part(attn_metadata, key, value), None
        else:
            part, cache = self._paged_part(attn_metadata), self._cache(layer, kv_cache)
        store(attend(rows, [part], cache, None), output, output_scale)
        return output

    def _attend_on_gpu(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        meta: JaxpagedMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None,
    ) -> None:
        """Write the first rows of `output`."""
        tokens = slice(0, meta.num_actual_tokens)
        part: GpuPart
        cache = None
        if self.attn_type in _WITHOUT_CACHE:
            key, value = _needed(key, value)
            own = (key[tokens], value[tokens])
            options = self._options(meta)
            part = GpuPackedPart(tokens, meta.query_start_loc, *own, options, meta.max_query_len)
        else:
            cache = self._gpu_cache(layer, kv_cache)
            batch = (meta.block_table, meta.seq_lens, meta.query_start_loc, meta.max_query_len)
            part = GpuPagedPart(tokens, plan_of(meta, *batch, ("block_table", "seq_lens")), self._options(meta))
        attend_into(output, output_scale, query, part, cache, None)

    def _sides(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_blocks, block_size, num_kv_heads, head_size]."""
        shape = ("num_blocks", self.num_kv_heads, "block_size", 2 * self.head_size)
        check_shape("kv_cache", kv_cache.shape, shape)
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, -1)
        return key_cache, value_cache

    def _gpu_cache(self, layer: Any, kv_cache: torch.Tensor) -> GpuLayerCache:
        scales = (1.0, 1.0) if self._stored == "auto" else (layer._k_scale, layer._v_scale)
        return GpuLayerCache.of(*self._sides(kv_cache), self._stored, *scales)

    def _cache(self, layer: Any, kv_cache: torch.Tensor) -> TorchCache:
        key_cache, value_cache = self._sides(kv_cache)
        k_scale, v_scale = (1.0, 1.0) if self._stored == "auto" else (_scale(layer, "k"), _scale(layer, "v"))
        return layer_cache(key_cache, value_cache, self._stored, k_scale, v_scale)

    def _options(self, meta: JaxpagedMetadata) -> Options:
        if not isinstance(meta.causal, torch.Tensor):
            return self._causal if meta.causal else self._both_sides
        return dataclasses.replace(self._both_sides, mask_mod=CausalRequests.of(meta.causal))

    def _paged_part(self, meta: JaxpagedMetadata) -> Part:
        return PagedPart.of(
            slice(0, meta.num_actual_tokens), self._options(meta), block_table=meta.block_table,
            seq_lens=meta.seq_lens, query_start_loc=meta.query_start_loc, names=("block_table", "seq_lens"),
        )  # fmt: skip

    def _packed_part(self, meta: JaxpagedMetadata, key: torch.Tensor | None, value: torch.Tensor | None) -> Part:
        """Whole sequences, each of which attends to its own keys of this call."""
        key, value = _needed(key, value)
        tokens = slice(0, meta.num_actual_tokens)
        return PackedPart.of(
            tokens, self._options(meta), key=key[tokens], value=value[tokens],
            query_lens=meta.query_start_loc.diff().tolist(), kv_lens=meta.seq_lens.tolist(),
            names=("query_start_loc", "seq_lens"),
        )  # fmt: skip


def _needed(key: torch.Tensor | None, value: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if key is None or value is None:
        raise ValueError("key, value: expected an encoder's keys and values, got None")
    return key, value


def _scale(layer: Any, side: str) -> float | torch.Tensor:
    """A scale on the host, where there is one for all heads: vLLM keeps it there, too."""
    scale: torch.Tensor = getattr(layer, f"_{side}_scale")
    number: float = getattr(layer, f"_{side}_scale_float")
    return number if scale.numel() == 1 else scale
