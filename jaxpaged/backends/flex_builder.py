"""vLLM's metadata builder for FlexAttention: from what the runner has of a batch to tensors."""

from typing import Any

import torch

from jaxpaged.backends.flex_masks import physical_to_logical_mapping
from jaxpaged.backends.flex_metadata import FlexAttentionMetadata


class FlexAttentionMetadataBuilder:
    def __init__(self, runner: Any, kv_cache_spec: Any, block_table: Any) -> None:
        """A builder for all steps.

        Args:
          runner: its `model_config`, `parallel_config`, `cache_config.num_gpu_blocks`, `seq_lens_np`, `device` and
            `input_batch.num_computed_tokens_cpu` are used.
          kv_cache_spec: its `block_size` is used.
          block_table: its `get_device_tensor()`, `slot_mapping` and `slot_mapping_cpu` are used.
        """
        self.runner, self.kv_cache_spec, self.block_table = runner, kv_cache_spec, block_table
        self.block_size = kv_cache_spec.block_size
        model, parallel = runner.model_config, runner.parallel_config
        self.headdim = model.get_head_size()
        self.num_heads_kv, self.num_heads_q = model.get_num_kv_heads(parallel), model.get_num_attention_heads(parallel)

    def build(self, common_prefix_len: int, common_attn_metadata: Any) -> FlexAttentionMetadata:
        """A step's metadata.

        Args:
          common_prefix_len: tokens that all requests share, in the same blocks; 0 for no cascade.
          common_attn_metadata: its `num_reqs`, `num_actual_tokens`, `max_query_len`, `query_start_loc` and `seq_lens`
            are used.
        """
        common, block_table = common_attn_metadata, self.block_table
        num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
        slot_mapping = block_table.slot_mapping[:num_tokens]
        slot_mapping.copy_(block_table.slot_mapping_cpu[:num_tokens], non_blocking=True)
        tables = block_table.get_device_tensor()[:num_reqs]
        num_blocks = self.runner.cache_config.num_gpu_blocks
        computed = torch.as_tensor(self.runner.input_batch.num_computed_tokens_cpu[:num_reqs])
        return FlexAttentionMetadata(
            num_actual_tokens=num_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=self.runner.seq_lens_np[:num_reqs].max(),
            seq_lens=common.seq_lens,
            block_table=tables,
            slot_mapping=slot_mapping,
            **_cascade(common_prefix_len, num_tokens, common.seq_lens[:num_reqs]),
            block_size=self.block_size,
            max_possible_sequence_length=self.runner.model_config.max_model_len,
            num_reqs=num_reqs,
            physical_to_logical=physical_to_logical_mapping(tables, num_blocks),
            total_cache_tokens=num_blocks * self.block_size,
            # Of a copy, which is not pinned: neither does the host wait for a GPU, nor does that see later changes.
            decode_offset=computed.clone().to(self.runner.device, non_blocking=True),
        )


def _cascade(common_prefix_len: int, num_tokens: int, seq_lens: torch.Tensor) -> dict[str, Any]:
    """The fields of a batch whose requests share a prefix: it is one request that all tokens attend to."""
    fields: dict[str, Any] = {"use_cascade": common_prefix_len > 0, "common_prefix_len": common_prefix_len}
    if common_prefix_len <= 0:
        return {**fields, "cu_prefix_query_lens": None, "prefix_kv_lens": None, "suffix_kv_lens": None}
    cumulative = torch.tensor([0, num_tokens], dtype=torch.int32, device=seq_lens.device)
    prefix = torch.tensor([common_prefix_len], dtype=torch.int32, device=seq_lens.device)
    return {
        **fields, "cu_prefix_query_lens": cumulative, "prefix_kv_lens": prefix,
        "suffix_kv_lens": seq_lens - common_prefix_len,
    }  # fmt: skip
