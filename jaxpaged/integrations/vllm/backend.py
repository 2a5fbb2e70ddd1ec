"""The classes that vLLM 0.32 loads when it is asked for `attention_backend="CUSTOM"`. Importing this needs vLLM."""

from typing import Any, ClassVar

import torch
import vllm

from jaxpaged.backends.attention_type import AttentionType
from jaxpaged.integrations.vllm.layer import FLOAT8_CACHES, HEAD_SIZES, UNQUANTIZED_CACHES, AttentionLayer, gpu_refusal
from jaxpaged.integrations.vllm.metadata import JaxpagedMetadata
from jaxpaged.integrations.vllm.version import check_version

check_version(vllm.__version__)  # before the names that other versions may lack

from vllm.v1.attention.backend import (  # noqa: E402
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout  # noqa: E402


class JaxpagedBackend(AttentionBackend):
    """What the backend can do, as vLLM asks for it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*UNQUANTIZED_CACHES, *FLOAT8_CACHES]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks it up in its own enum

    @staticmethod
    def get_impl_cls() -> type["JaxpagedImpl"]:
        return JaxpagedImpl

    @staticmethod
    def get_builder_cls() -> type["JaxpagedMetadataBuilder"]:
        return JaxpagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Those in which a layer's cache is one run of memory: `KVLayout` NH2D and HN2D.
        return KVCacheLayout.LBNHC, KVCacheLayout.LBHNC

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in list(AttentionType)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None = None,
        use_mla: bool = False,
        has_sink: bool = False,
        use_sparse: bool = False,
        use_mm_prefix: bool = False,
        device_capability: Any = None,
    ) -> str | None:
        """Why not, or None: a cache that is not of 8 bits has the dtype of the activations.

        Args:
          device_capability: of a GPU; None on the CPU.
        """
        if device_capability is not None:
            reason = gpu_refusal(head_size, dtype, kv_cache_dtype, block_size)
            if reason is not None:
                return reason
        if kv_cache_dtype in ("float16", "bfloat16") and dtype != getattr(torch, kv_cache_dtype):
            return f"kv_cache_dtype {kv_cache_dtype} not supported for a model of {dtype}"
        return None


class JaxpagedMetadataBuilder(AttentionMetadataBuilder[JaxpagedMetadata]):
    """Metadata from those that vLLM's runner has for all backends. It asks for no order of requests."""

    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> JaxpagedMetadata:
        """A step's metadata; vLLM 0.32 always gives 0 for `common_prefix_len`."""
        return JaxpagedMetadata.of(common_attn_metadata)

    def update_block_table(
        self, metadata: JaxpagedMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> JaxpagedMetadata:
        """The same batch's metadata in another group of caches."""
        return metadata.with_blocks(blk_table, slot_mapping)


class JaxpagedImpl(AttentionLayer, AttentionImpl[JaxpagedMetadata]):
    """One attention layer."""
