"""The parts of an engine's flattened batch, each attending in a way of its own, and how they are run as one.

Engines order a batch's tokens: first those of all prompts, say, then those of all decodes. A part is a run of tokens
whose keys and values lie in one place: in the paged cache, or packed beside the queries. Making a part checks all that
it is given, so whatever doesn't fit raises before anything is written.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from jaxpaged.backends.arguments import check_caches
from jaxpaged.backends.checks import (
    check_activation,
    check_heads,
    check_int_tensor,
    check_tensors,
    cumulative,
    lengths,
)
from jaxpaged.backends.layer_cache import numbers, shared
from jaxpaged.backends.padded_calls import Options, paged_call, ragged_call
from jaxpaged.bridge.torch_cache import TorchCache, write_kv_

NewTokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Keys and values [num_tokens, num_kv_heads, head_size] and their slots [num_slots]."""


@dataclasses.dataclass(frozen=True)
class PagedPart:
    """Requests that attend to the cache. Build it with `of`.

    Attributes:
      tokens: which rows of the query are theirs.
      starts: [num_reqs + 1] int32, where each request's tokens start among these.
      seq_lens: [num_reqs] int32.
      block_table: [num_reqs, max_blocks_per_req] int32 or int64.
      shares_prefix: see `jaxpaged.PagedBatch`.
    """

    tokens: slice
    starts: np.ndarray
    seq_lens: np.ndarray
    block_table: Any
    options: Options
    shares_prefix: bool = False

    @classmethod
    def of(
        cls,
        tokens: slice,
        options: Options,
        *,
        block_table: torch.Tensor | None,
        seq_lens: torch.Tensor | np.ndarray | None,
        query_start_loc: torch.Tensor | None = None,
        names: tuple[str, str] = ("block_tables", "seq_lens_tensor"),
    ) -> Self:
        """Checked; without `query_start_loc` each request has one token. `names` are of table and lengths."""
        table_name, lens_name = names
        for name, x in ((table_name, block_table), (lens_name, seq_lens)):
            if x is None:
                raise ValueError(f"attn_metadata.{name}: expected a tensor for requests in the cache, got None")
        assert block_table is not None and seq_lens is not None
        check_tensors(**{table_name: block_table, "query_start_loc": query_start_loc})
        num_tokens = tokens.stop - tokens.start
        if query_start_loc is None:
            starts = np.arange(num_tokens + 1, dtype=np.int32)
        else:
            starts = cumulative("query_start_loc", query_start_loc, None, num_tokens)
        num_reqs = len(starts) - 1
        check_int_tensor(table_name, block_table, (num_reqs, "max_blocks_per_req"))
        if isinstance(seq_lens, torch.Tensor):
            check_tensors(**{lens_name: seq_lens})
            seq_lens = lengths(lens_name, seq_lens, num_reqs)
        elif len(seq_lens) != num_reqs:
            raise ValueError(f"{lens_name}: expected {num_reqs} lengths, got {len(seq_lens)}")
        return cls(tokens, starts, seq_lens, block_table, options)

    def check(self, query: torch.Tensor, cache: TorchCache | None) -> None:
        if cache is None:
            raise ValueError("kv_cache: expected a cache, since requests attend to tokens in it, got none")
        check_caches(query, *numbers(cache), ("kv_cache", "kv_cache"))

    def attend(self, query: torch.Tensor, cache: TorchCache | None) -> torch.Tensor:
        assert cache is not None  # checked
        rows = query[self.tokens]
        out, _ = paged_call(
            rows, shared(cache), self.block_table, self.seq_lens, self.starts, self.options, False, self.shares_prefix
        )
        return out


@dataclasses.dataclass(frozen=True)
class PackedPart:
    """Requests that attend to keys and values packed as the queries are. Build it with `of`.

    Attributes:
      tokens: which rows of the query are theirs.
      starts, kv_starts: [num_reqs + 1] int32, where each request's queries and keys start.
      key, value: [total_kv, num_kv_heads, head_size].
    """

    tokens: slice
    starts: np.ndarray
    kv_starts: np.ndarray
    key: torch.Tensor
    value: torch.Tensor
    options: Options

    @classmethod
    def of(
        cls,
        tokens: slice,
        options: Options,
        *,
        key: torch.Tensor,
        value: torch.Tensor,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        names: tuple[str, str],
    ) -> Self:
        """Checked; `names` are of the two lists of lengths."""
        if len(query_lens) != len(kv_lens):
            raise ValueError(f"{names[1]}: expected {len(query_lens)} lengths, as in {names[0]}, got {len(kv_lens)}")
        starts, kv_starts = (
            _starts(name, lens, total)
            for name, lens, total in (
                (names[0], query_lens, tokens.stop - tokens.start),
                (names[1], kv_lens, key.shape[0]),
            )
        )
        return cls(tokens, starts, kv_starts, key, value, options)

    def check(self, query: torch.Tensor, cache: TorchCache | None) -> None:
        check_activation("key", self.key, ("num_tokens", "num_kv_heads", query.shape[-1]), query.dtype)
        check_activation("value", self.value, (*self.key.shape[:2], "v_head_size"), query.dtype)
        check_heads(query, self.key.shape[1])

    def attend(self, query: torch.Tensor, cache: TorchCache | None) -> torch.Tensor:
        rows = query[self.tokens]
        return ragged_call(rows, self.key, self.value, self.starts, self.kv_starts, self.options, False)[0]


Part = PagedPart | PackedPart


def attend(query: torch.Tensor, parts: Sequence[Part], cache: TorchCache | None, new: NewTokens | None) -> torch.Tensor:
    """Put new tokens into the cache, in place, then let every part attend.

    Args:
      query: [num_tokens, num_heads, head_size].
      parts: of tokens that don't overlap; rows of no part give 0.
      new: what to write, or None.

    Returns:
      [num_tokens, num_heads, head_size], in the dtype of `query`.
    """
    check_tensors(query=query)
    check_activation("query", query, ("num_tokens", "num_heads", "head_size"))
    for part in parts:
        part.check(query, cache)
    if new is not None and cache is not None:
        write_kv_(cache, *new)  # it checks what is new before it writes
    if len(parts) == 1 and parts[0].tokens == slice(0, query.shape[0]):
        return parts[0].attend(query, cache)
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    for part in parts:
        out[part.tokens] = part.attend(query, cache)
    return out


def check_num_tokens(name: str, x: torch.Tensor, num_prefill: int, num_decode: int) -> None:
    """Raise unless there are as many tokens as the metadata say."""
    if x.shape[0] != num_prefill + num_decode:
        raise ValueError(
            f"{name}: expected {num_prefill} tokens of prompts and {num_decode} of decodes, as in attn_metadata, "
            f"got {x.shape[0]}"
        )


def _starts(name: str, lens: Sequence[int], total: int) -> np.ndarray:
    values = np.asarray(lens)
    if values.size and (values.dtype.kind not in "iu" or values.min() < 0):
        raise ValueError(f"{name}: expected lengths of 0 or more, got {list(lens)}")
    starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(values, dtype=np.int32)])
    if starts[-1] != total:
        raise ValueError(f"{name}: expected lengths of the {total} tokens there are, got {list(lens)}")
    return starts
