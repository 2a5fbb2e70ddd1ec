"""What Aphrodite's FlashAttention backend is told of a batch."""

import dataclasses
from typing import Any, Optional

import torch

from jaxpaged.backends.attention_type import MetadataError


@dataclasses.dataclass
class FlashAttentionMetadata:
    """A batch of prompts, or chunks of them, and decodes, of one token each, flattened in this order.

    Attributes:
      num_prefills, num_prefill_tokens: prompts and their new tokens.
      num_decode_tokens: decodes, those that pad a CUDA graph included.
      slot_mapping: [num_tokens] int32 or int64, `block * block_size + offset` of each new token; negative: skip it.
      seq_lens: all tokens of each request, as a list.
      seq_lens_tensor: [batch_size] int32, the same; the prompts' come first.
      max_query_len, max_prefill_seq_len, max_decode_seq_len: the longest ones; 0 without such requests. Not looked at.
      query_start_loc: [batch_size + 1] int32, cumulative numbers of new tokens.
      seq_start_loc: [batch_size + 1] int32, cumulative numbers of all tokens.
      context_lens_tensor: [batch_size] int32, tokens before the new ones.
      block_tables: [batch_size, max_blocks_per_seq] int32; without columns in a batch of whole prompts.
      use_cuda_graph: whether the step is a CUDA graph's.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    slot_mapping: torch.Tensor
    seq_lens: list[int] | None
    seq_lens_tensor: torch.Tensor | None
    max_query_len: int | None
    max_prefill_seq_len: int
    max_decode_seq_len: int
    query_start_loc: torch.Tensor | None
    seq_start_loc: torch.Tensor | None
    context_lens_tensor: torch.Tensor | None
    block_tables: torch.Tensor | None
    use_cuda_graph: bool
    _cached_prefill_metadata: Optional["FlashAttentionMetadata"] = None
    _cached_decode_metadata: Optional["FlashAttentionMetadata"] = None

    @property
    def prefill_metadata(self) -> Optional["FlashAttentionMetadata"]:
        """The prompts alone, as views, made once; None where there is none.

        Raises:
          MetadataError: a field that prompts need is None.
        """
        if self.num_prefills == 0:
            return None
        if self._cached_prefill_metadata is None:
            self._check("seq_lens", "seq_lens_tensor", "query_start_loc", "context_lens_tensor", "block_tables")
            self._check("seq_start_loc")
            n, tokens = self.num_prefills, self.num_prefill_tokens
            self._cached_prefill_metadata = dataclasses.replace(
                self,
                num_decode_tokens=0,
                slot_mapping=self.slot_mapping[:tokens],
                seq_lens=_first(self.seq_lens, n),
                seq_lens_tensor=_first(self.seq_lens_tensor, n),
                max_decode_seq_len=0,
                query_start_loc=_first(self.query_start_loc, n + 1),
                seq_start_loc=_first(self.seq_start_loc, n + 1),
                context_lens_tensor=_first(self.context_lens_tensor, n),
                block_tables=_first(self.block_tables, n),
                use_cuda_graph=False,
                _cached_decode_metadata=None,
            )
        return self._cached_prefill_metadata

    @property
    def decode_metadata(self) -> Optional["FlashAttentionMetadata"]:
        """The decodes alone, as views, made once; None where there is none.

        Raises:
          MetadataError: a field that decodes need is None.
        """
        if self.num_decode_tokens == 0:
            return None
        if self._cached_decode_metadata is None:
            self._check("block_tables", "seq_lens_tensor")
            n, tokens = self.num_prefills, self.num_prefill_tokens
            of_prompts = ("seq_lens", "max_query_len", "query_start_loc", "seq_start_loc", "context_lens_tensor")
            unset: dict[str, Any] = dict.fromkeys((*of_prompts, "_cached_prefill_metadata"))
            unset |= dict.fromkeys(("num_prefills", "num_prefill_tokens", "max_prefill_seq_len"), 0)
            self._cached_decode_metadata = dataclasses.replace(
                self,
                **unset,
                block_tables=_rest(self.block_tables, n),
                seq_lens_tensor=_rest(self.seq_lens_tensor, n),
                slot_mapping=self.slot_mapping[tokens:],
            )
        return self._cached_decode_metadata

    def _check(self, *names: str) -> None:
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            raise MetadataError(f"attn_metadata.{', '.join(missing)}: expected values for these requests, got None")


def _first[T: (torch.Tensor, list[int])](x: T | None, n: int) -> T | None:
    return None if x is None else x[:n]


def _rest(x: torch.Tensor | None, n: int) -> torch.Tensor | None:
    return None if x is None else x[n:]
