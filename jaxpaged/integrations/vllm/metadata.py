"""What vLLM's runner tells the backend of a step's batch."""

import copy
import dataclasses
from typing import Any, Self

import torch


@dataclasses.dataclass
class JaxpagedMetadata:
    """A batch of requests in any order: decodes, whole prompts and chunks of prompts.

    Attributes:
      num_actual_tokens: new tokens; rows of a query after them are padding.
      query_start_loc: [num_reqs + 1] int32, where each request's new tokens start.
      seq_lens: [num_reqs] int32, all tokens of each, the new ones included; in cross-attention the encoder's.
      block_table: [num_reqs, max_blocks_per_req] int32.
      slot_mapping: [num_slots] int64, `block * block_size + offset` of each new token; in cross-attention of each of
        the encoder's, which vLLM then sets itself.
      causal: whether a query sees nothing past its own position: for all requests, or [num_reqs] bool.
      max_query_len: no request has more new tokens; None when unknown.
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor
    max_query_len: int | None = None

    @classmethod
    def of(cls, common_attn_metadata: Any) -> Self:
        """From vLLM's `CommonAttentionMetadata`, without copying any of its tensors."""
        common, num_reqs = common_attn_metadata, common_attn_metadata.num_reqs
        causal = common.causal
        return cls(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc[: num_reqs + 1],
            seq_lens=common.seq_lens[:num_reqs],
            block_table=common.block_table_tensor[:num_reqs],
            slot_mapping=common.slot_mapping,
            causal=causal[:num_reqs] if isinstance(causal, torch.Tensor) else causal,
            max_query_len=common.max_query_len,
        )

    def with_blocks(self, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> Self:
        """The same batch in another cache. What vLLM's own builders have added to these metadata stays on them."""
        other = copy.copy(self)
        other.block_table, other.slot_mapping = block_table[: len(self.seq_lens)], slot_mapping
        return other
