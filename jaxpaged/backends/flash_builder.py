"""Aphrodite's metadata builder: from the runner's lists of sequences to tensors."""

from collections.abc import Sequence
from typing import Any

import torch

from jaxpaged.backends.flash_metadata import FlashAttentionMetadata
from jaxpaged.metadata.slots import (
    PAD_SLOT_ID,
    compute_slot_mapping,
    compute_slot_mapping_start_idx,
    is_block_tables_empty,
)


class FlashAttentionMetadataBuilder:
    """Collects a step's sequences.

    Attributes:
      slot_mapping: slots of all new tokens so far.
      prefill_seq_lens: lengths of prompts.
      context_lens: of all sequences, tokens before the new ones.
      block_tables: of all sequences; empty for whole prompts.
      curr_seq_lens: of decodes, lengths as the block manager keeps them, so within a sliding window.
    """

    def __init__(self, input_builder: Any) -> None:
        """A builder for one step.

        Args:
          input_builder: its `runner`, `sliding_window`, `block_size` and `scheduler_config.use_v2_block_manager` are
            used here, its `inter_data_list` and `chunked_prefill_enabled` in `build`.
        """
        self.input_builder, self.runner = input_builder, input_builder.runner
        self.block_size, self.sliding_window = input_builder.block_size, input_builder.sliding_window
        self.use_v2_block_manager = input_builder.scheduler_config.use_v2_block_manager

        self.num_prefills = self.num_prefill_tokens = self.num_decode_tokens = 0
        self.has_prefix_cache_hit = False
        self.block_tables: list[list[int]] = []
        self.context_lens: list[int] = []
        self.curr_seq_lens: list[int] = []
        self.prefill_seq_lens: list[int] = []
        self.slot_mapping: list[int] = []

    def _add_seq_group(self, inter_data: Any, chunked_prefill_enabled: bool, prefix_cache_hit: bool) -> None:
        """Add a group's sequences: their counts, context lengths, block tables and slots.

        Args:
          inter_data: lists with an entry for each sequence, `seq_ids`, `input_tokens`, `orig_seq_lens`, `seq_lens`,
            `query_lens`, `context_lens`, `curr_sliding_window_blocks`; and `is_prompt` and `block_tables`, by sequence.
          prefix_cache_hit: prompts attend to a cached prefix, so they need their whole tables.
        """
        sequences = zip(
            inter_data.seq_ids, inter_data.input_tokens, inter_data.orig_seq_lens, inter_data.seq_lens,
            inter_data.query_lens, inter_data.context_lens, inter_data.curr_sliding_window_blocks, strict=True,
        )  # fmt: skip
        for seq_id, tokens, seq_len, curr_seq_len, query_len, context_len, window_blocks in sequences:
            self.context_lens.append(context_len)
            if inter_data.is_prompt:
                self.num_prefills += 1
                self.num_prefill_tokens += len(tokens)
                self.prefill_seq_lens.append(seq_len)
            else:
                if query_len != 1:
                    raise ValueError(
                        f"inter_data.query_lens: expected 1 new token for decode {seq_id!r} of {seq_len} tokens, "
                        f"{context_len} of them cached, got {query_len}"
                    )
                self.num_decode_tokens += query_len
                self.curr_seq_lens.append(curr_seq_len)
            self.block_tables.append(
                _block_table(inter_data, seq_id, window_blocks, chunked_prefill_enabled, prefix_cache_hit)
            )
            start_idx = compute_slot_mapping_start_idx(
                inter_data.is_prompt, query_len, context_len, self.sliding_window, self.use_v2_block_manager
            )
            compute_slot_mapping(
                is_block_tables_empty(inter_data.block_tables), self.slot_mapping, seq_id, seq_len, context_len,
                start_idx, self.block_size, inter_data.block_tables,
            )  # fmt: skip

    def build(
        self, seq_lens: list[int], query_lens: list[int], cuda_graph_pad_size: int, batch_size: int
    ) -> FlashAttentionMetadata:
        """The metadata of all groups of `input_builder`.

        Args:
          seq_lens: of each sequence, those that pad a CUDA graph included.
          query_lens: of each sequence.
          cuda_graph_pad_size: how many decodes pad the CUDA graph; -1 without one.
          batch_size: decodes of the CUDA graph, the padding included. Their tables are rows of the runner's
            `graph_block_tables`, which is written.

        Raises:
          ValueError: no sequence has a new token, or a decode has several.
        """
        if max(query_lens, default=0) <= 0:
            raise ValueError(f"query_lens: expected a sequence with a new token, got {query_lens}")
        groups = self.input_builder.inter_data_list
        self.has_prefix_cache_hit = any(group.prefix_cache_hit for group in groups)
        for group in groups:
            self._add_seq_group(group, self.input_builder.chunked_prefill_enabled, self.has_prefix_cache_hit)
        use_cuda_graph = cuda_graph_pad_size != -1
        num_decode_tokens = self.num_decode_tokens
        if use_cuda_graph:
            self.slot_mapping.extend([PAD_SLOT_ID] * cuda_graph_pad_size)
            num_decode_tokens = batch_size
            block_tables = self._graph_block_tables(batch_size)
        else:
            block_tables = self._tensor(_rectangular(self.block_tables), torch.int)
        return FlashAttentionMetadata(
            num_prefills=self.num_prefills,
            slot_mapping=self._tensor(self.slot_mapping, torch.long),
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            seq_lens=seq_lens,
            seq_lens_tensor=self._tensor(seq_lens, torch.int),
            max_query_len=max(query_lens),
            max_prefill_seq_len=max(self.prefill_seq_lens, default=0),
            max_decode_seq_len=max(self.curr_seq_lens, default=0),
            query_start_loc=self._cumulative(query_lens),
            seq_start_loc=self._cumulative(seq_lens),
            context_lens_tensor=self._tensor(self.context_lens, torch.int),
            block_tables=block_tables,
            use_cuda_graph=use_cuda_graph,
        )

    def _graph_block_tables(self, batch_size: int) -> torch.Tensor:
        """The runner's table [max_batch_size, max_blocks_per_seq], a NumPy array, filled and cut to the batch."""
        rows = self.runner.graph_block_tables[:batch_size]
        for row, blocks in zip(rows, self.block_tables, strict=False):  # the last rows pad the graph
            row[: len(blocks)] = blocks
        return torch.from_numpy(rows).to(self.runner.device, non_blocking=True)

    def _tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        on_host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=self.runner.pin_memory)
        return on_host.to(self.runner.device, non_blocking=True)

    def _cumulative(self, lens: Sequence[int]) -> torch.Tensor:
        return torch.nn.functional.pad(self._tensor(lens, torch.int), (1, 0)).cumsum(0, dtype=torch.int32)


def _block_table(
    inter_data: Any, seq_id: Any, window_blocks: int, chunked_prefill_enabled: bool, prefix_cache_hit: bool
) -> list[int]:
    """The blocks that a sequence's new tokens attend to through the cache; none for a whole prompt."""
    tables = inter_data.block_tables
    if prefix_cache_hit:
        return list(tables[seq_id])
    if tables is None or (inter_data.is_prompt and not chunked_prefill_enabled):
        return []
    return list(tables[seq_id][-window_blocks:])  # all of them for 0


def _rectangular(tables: list[list[int]]) -> list[list[int]]:
    width = max(map(len, tables), default=0)
    return [[*table, *[0] * (width - len(table))] for table in tables]
