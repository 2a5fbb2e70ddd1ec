"""What vLLM's CPU backend is told of a batch, and how that is built from vLLM's own metadata."""

import dataclasses
from typing import Any, Optional

import torch

from jaxpaged.backends.attention_type import AttentionType

_Picked = tuple[torch.Tensor | None, int | None, torch.Tensor | None]


@dataclasses.dataclass
class TorchSDPAMetadata:
    """A batch of decodes, of one token each, and prompts, flattened in this order.

    Attributes:
      num_prefills, num_prefill_tokens: prompts, or chunks of them, and their new tokens.
      num_decode_tokens: decodes, and so their tokens.
      slot_mapping: [num_tokens] int32 or int64, `block * block_size + offset` of each new token; negative: skip it.
      decode_seq_lens_tensor: [num_decodes] int32, all tokens of each.
      decode_max_seq_len: the longest of them; 0 without decodes.
      decode_block_tables: [num_decodes, max_blocks_per_seq] int32.
      chunked_prefill: prompts attend to the cache; else they are whole, and attend to the keys of the call.
      seq_lens: lengths of whole prompts.
      max_query_len, prefill_max_seq_len: not looked at.
      prefill_query_start_loc, prefill_seq_start_loc: [num_prefills + 1] int32, cumulative numbers of new tokens and of
        all tokens, each from 0.
      prefill_block_tables: [num_prefills, max_blocks_per_seq] int32.
      query_start_loc: [num_reqs + 1] int32, for the engine's own use.
      encoder_seq_lens, encoder_seq_lens_tensor: lengths of the encoder's sequences, as a list and as [num_reqs] int32.
      max_encoder_seq_len: the longest of them.
      num_encoder_tokens: their sum.
      cross_slot_mapping: [num_encoder_tokens], where cross-attention keeps the encoder's keys and values.
      cross_block_tables: [num_reqs, max_blocks_per_seq] int32, likewise.
      attn_bias, encoder_attn_bias, cross_attn_bias: None, or for each whole prompt a bias of its scores, which takes
        the place of the layer's mask, window and ALiBi; see `set_attn_bias`. Not arguments of the constructor.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    slot_mapping: torch.Tensor
    decode_seq_lens_tensor: torch.Tensor | None
    decode_max_seq_len: int
    decode_block_tables: torch.Tensor | None
    chunked_prefill: bool
    seq_lens: list[int] | None = None
    max_query_len: int | None = None
    prefill_max_seq_len: int | None = None
    prefill_query_start_loc: torch.Tensor | None = None
    prefill_seq_start_loc: torch.Tensor | None = None
    prefill_block_tables: torch.Tensor | None = None
    query_start_loc: torch.Tensor | None = None
    encoder_seq_lens: list[int] | None = None
    encoder_seq_lens_tensor: torch.Tensor | None = None
    max_encoder_seq_len: int | None = None
    num_encoder_tokens: int | None = None
    cross_slot_mapping: torch.Tensor | None = None
    cross_block_tables: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.attn_bias: list[torch.Tensor] | None = None
        self.encoder_attn_bias: list[torch.Tensor] | None = None
        self.cross_attn_bias: list[torch.Tensor] | None = None

    @property
    def is_all_encoder_attn_metadata_set(self) -> bool:
        """Whether there is all that attention within an encoder needs."""
        needed = (self.encoder_seq_lens, self.encoder_seq_lens_tensor, self.max_encoder_seq_len)
        return all(x is not None for x in needed)

    @property
    def is_all_cross_attn_metadata_set(self) -> bool:
        """Whether there is all that cross-attention needs."""
        needed = (self.cross_slot_mapping, self.cross_block_tables)
        return self.is_all_encoder_attn_metadata_set and all(x is not None for x in needed)

    @property
    def prefill_metadata(self) -> Optional["TorchSDPAMetadata"]:
        """Itself, or None without prompts."""
        return self if self.num_prefill_tokens else None

    @property
    def decode_metadata(self) -> Optional["TorchSDPAMetadata"]:
        """Itself, or None without decodes."""
        return self if self.num_decode_tokens else None

    def get_seq_lens(self, attn_type: str) -> tuple[list[int] | None, list[int] | None]:
        """Lengths of the queries, and of the keys and values, of whole prompts.

        Raises:
          MetadataError: there is no such type.
        """
        attn_type = AttentionType.of(attn_type)
        query_lens = self.encoder_seq_lens if attn_type == AttentionType.ENCODER else self.seq_lens
        of_encoder = attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_DECODER)
        return query_lens, self.encoder_seq_lens if of_encoder else self.seq_lens

    def get_attn_bias(self, attn_type: str) -> list[torch.Tensor] | None:
        """The biases of this type of attention, None where none were set."""
        bias: list[torch.Tensor] | None = getattr(self, _bias_name(attn_type))
        return bias

    def set_attn_bias(self, attn_bias: list[torch.Tensor], attn_type: str) -> None:
        """Have whole prompts use these biases: [query_len, kv_len], or [.., num_heads or 1, query_len, kv_len] each."""
        setattr(self, _bias_name(attn_type), attn_bias)

    def get_seq_len_block_table_args(self, attn_type: str) -> _Picked:
        """Lengths of the keys, the longest one, and block tables (None for an encoder), as decodes need them.

        Raises:
          MetadataError: there is no such type.
        """
        attn_type = AttentionType.of(attn_type)
        if attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
            return self.decode_seq_lens_tensor, self.decode_max_seq_len, self.decode_block_tables
        tables = self.cross_block_tables if attn_type == AttentionType.ENCODER_DECODER else None
        return self.encoder_seq_lens_tensor, self.max_encoder_seq_len, tables


class TorchSDPAMetadataBuilderV1:
    """Metadata from those that vLLM's runner has for all backends."""

    reorder_batch_threshold: int = 1
    """vLLM puts requests with so many new tokens, or fewer, first."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device
        self.scheduler_config = vllm_config.scheduler_config

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TorchSDPAMetadata:
        """A step's metadata.

        Args:
          common_prefix_len, fast_build: not looked at.
          common_attn_metadata: its `num_reqs`, `max_query_len`, `query_start_loc_cpu`, `seq_lens_cpu`, `slot_mapping`
            and `block_table_tensor` are used. Decodes, with one new token and others before it, come first; what
            follows the first other request counts as prompts, whatever it is.
        """
        common = common_attn_metadata
        num_reqs = common.num_reqs
        starts = common.query_start_loc_cpu[: num_reqs + 1]
        lens = common.seq_lens_cpu[:num_reqs]
        tables = common.block_table_tensor[:num_reqs]
        decode = ((starts.diff() == 1) & (lens > 1)).int()
        num_decodes = int(decode.cumprod(0).sum())  # those before the first prompt
        num_decode_tokens = int(starts[num_decodes])
        query_lens, prefill_lens = starts.diff()[num_decodes:], lens[num_decodes:]
        has_context = bool((query_lens != prefill_lens).any())
        return TorchSDPAMetadata(
            num_prefills=num_reqs - num_decodes,
            num_prefill_tokens=int(starts[-1]) - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
            slot_mapping=common.slot_mapping,
            decode_seq_lens_tensor=lens[:num_decodes],
            decode_max_seq_len=int(lens[:num_decodes].max()) if num_decodes else 0,
            decode_block_tables=tables[:num_decodes],
            chunked_prefill=self.scheduler_config.chunked_prefill_enabled or has_context,
            seq_lens=prefill_lens.tolist(),
            max_query_len=common.max_query_len,
            prefill_max_seq_len=int(prefill_lens.max()) if len(prefill_lens) else 0,
            prefill_query_start_loc=starts[num_decodes:] - num_decode_tokens,
            prefill_seq_start_loc=torch.nn.functional.pad(prefill_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            prefill_block_tables=tables[num_decodes:],
            query_start_loc=starts,
        )


def _bias_name(attn_type: str) -> str:
    attn_type = AttentionType.of(attn_type)
    if attn_type == AttentionType.ENCODER:
        return "encoder_attn_bias"
    return "cross_attn_bias" if attn_type == AttentionType.ENCODER_DECODER else "attn_bias"
