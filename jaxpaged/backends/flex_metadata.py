"""What vLLM's FlexAttention backend is told of a batch: its tokens, and the masks and scores that users may replace."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from jaxpaged.backends.flex_masks import MaskMod, PagedMask, ScoreMod, causal_mask_mod, request_of_token

create_block_mask_compiled = create_block_mask
"""Not compiled here: it would be for each number of tokens anew."""

Requests = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Block table, lengths and starts of requests."""

_built: weakref.WeakSet[BlockMask] = weakref.WeakSet()


@dataclasses.dataclass
class FlexAttentionMetadata:
    """A batch of requests with any number of new tokens each.

    Attributes:
      num_actual_tokens: new tokens; rows of the query after them are padding.
      max_query_len: no request has more new tokens; looked at on a GPU alone, where few of them have a kernel of their
        own.
      max_seq_len, max_possible_sequence_length: not looked at.
      query_start_loc: [num_reqs + 1] int32, where each request's tokens start in the query.
      seq_lens: [num_reqs] int32, all tokens of each request.
      block_table: [num_reqs, max_blocks_per_req] int32.
      slot_mapping: [num_actual_tokens] int64, `block * block_size + offset` of each new token; negative: skip it.
      use_cascade, common_prefix_len: whether the requests' tables begin with the same blocks, and so many tokens. It
        steers speed, never results.
      cu_prefix_query_lens, prefix_kv_lens, suffix_kv_lens: the cascade's parts, for whoever reads them.
      total_cache_tokens: `num_blocks * block_size`.
      physical_to_logical: [num_reqs, num_blocks], see `physical_to_logical_mapping`.
      decode_offset: [num_reqs], tokens of each request before the new ones.
      num_input_tokens: tokens with padding, for whoever reads it.
      num_blocks: of the cache; computed.
      logical_mask_mod: a mask function of logical positions: of tokens within their request.
      mask_mod: a mask function of rows of the query and physical indices; `get_mask_mod()` unless replaced.
      block_mask: `build_block_mask()`, made when it is first read, unless replaced.
      score_mod: a score function of rows of the query and physical indices.

    Attention uses a block mask if there is one that was not built here, else a mask function that was not made here,
    else the logical mask. They, and `score_mod`, are called with b = 0, on tensors of PyTorch, or of JAX if they are
    written for it; see `jaxpaged.bridge.torch_functions.jax_function`.

    Raises:
      ValueError: the fields of a cascade contradict each other.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    use_cascade: bool
    common_prefix_len: int
    cu_prefix_query_lens: torch.Tensor | None
    prefix_kv_lens: torch.Tensor | None
    suffix_kv_lens: torch.Tensor | None
    total_cache_tokens: int
    block_size: int
    max_possible_sequence_length: int
    num_reqs: int
    physical_to_logical: torch.Tensor
    decode_offset: torch.Tensor
    num_input_tokens: int = 0
    num_blocks = 0
    block_mask: BlockMask | None = dataclasses.field(default=None, repr=False, compare=False)
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    logical_mask_mod: MaskMod = causal_mask_mod
    _block_mask: BlockMask | None = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.common_prefix_len < 0 or self.use_cascade != (self.common_prefix_len > 0):
            raise ValueError(
                f"use_cascade, common_prefix_len: expected a prefix of 1 token or more with a cascade, of 0 without, "
                f"got {self.use_cascade} and {self.common_prefix_len}"
            )
        self._translations: dict[int, tuple[Any, Any]] = {}
        self._requests: tuple[Requests, Requests] | None = None
        self.num_blocks = self.total_cache_tokens // self.block_size
        # Copies by `dataclasses.replace` come with what was made for the original.
        if self.mask_mod is None or isinstance(self.mask_mod, PagedMask):
            self.mask_mod = self.get_mask_mod()
        if self._block_mask in _built:
            self._block_mask = None

    def get_mask_mod(self) -> MaskMod:
        """The mask function of this batch: each token attends to its own request's, as `logical_mask_mod` says."""
        return PagedMask(self, request_of_token(self.query_start_loc, self.num_actual_tokens))

    def build_block_mask(self) -> BlockMask:
        """PyTorch's block mask of `mask_mod`, over [num_actual_tokens, total_cache_tokens].

        It evaluates the mask for each of these pairs at once. Attention here needs no block mask, so this is for
        readers alone.
        """
        if self.mask_mod is None:
            raise ValueError("mask_mod: expected a function, got None")
        mask = create_block_mask_compiled(
            self.mask_mod, None, None, self.num_actual_tokens, self.total_cache_tokens, device=self.block_table.device
        )
        _built.add(mask)
        return mask

    def requests(self) -> Requests:
        """The block table, lengths and starts of the `num_reqs` requests there are: the same tensors for all layers."""
        given = self.block_table, self.seq_lens, self.query_start_loc
        if self._requests is None or any(x is not y for x, y in zip(self._requests[0], given, strict=True)):
            n = self.num_reqs
            self._requests = given, (self.block_table[:n], self.seq_lens[:n], self.query_start_loc[: n + 1])
        return self._requests[1]

    def translated(self, function: Any, translate: Callable[[Any], Any]) -> Any:
        """`translate(function)`, once for all layers of the step."""
        if id(function) not in self._translations:
            self._translations[id(function)] = function, translate(function)
        return self._translations[id(function)][1]

    @property
    def is_logical(self) -> bool:
        """Whether each request attends to its own tokens: no mask of physical indices was replaced."""
        return self.replaced_block_mask is None and self.replaced_mask_mod is None

    @property
    def replaced_block_mask(self) -> BlockMask | None:
        """A block mask that was not built here."""
        return None if self._block_mask is None or self._block_mask in _built else self._block_mask

    @property
    def replaced_mask_mod(self) -> MaskMod | None:
        """A mask function that says something else than `logical_mask_mod` about this batch."""
        own = isinstance(self.mask_mod, PagedMask) and self.mask_mod.metadata is self
        return None if own else self.mask_mod


def _get_block_mask(self: FlexAttentionMetadata) -> BlockMask:
    if self._block_mask is None:
        self._block_mask = self.build_block_mask()
    return self._block_mask


def _set_block_mask(self: FlexAttentionMetadata, block_mask: BlockMask | None) -> None:
    self._block_mask = block_mask


# A field for the constructor, but built when it is read: it costs memory for every pair of a token and a slot.
FlexAttentionMetadata.block_mask = property(_get_block_mask, _set_block_mask)  # type: ignore[assignment]
