"""What transformers' continuous batching says of a step and of a layer, as block tables and lengths.

A group of layers shares its blocks, so what is computed here is computed once a step for each group.
"""

import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from jaxpaged.backends.functional import AttentionPlan, plan_attention
from jaxpaged.backends.gpu_kvcache import GpuCache

FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' names of layer types."""

_ALWAYS_PASSED = ("read_index", "write_index", "cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q", "max_seqlen_k")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step's batch. Build it with `of`.

    Attributes:
      read_index: for each group of layers [n] int64, where in the cache the keys lie that its queries see, in the order
        of the requests and their positions; the cache's `sentinel_index` stands for new tokens of rolling groups. All
        are empty where no request has a past.
      write_index: for each group [num_tokens] int64, where the new tokens go.
      cu_seq_lens_q: [num_reqs + 1] int32.
      cu_seq_lens_k: the same of the keys that are seen; a dict by layer type in models with several.
      max_seqlen_q: an int.
      max_seqlen_k: an int, or a dict of ints.
      block_table: [num_groups, num_reqs, max_blocks] int32, filled up with -1, where every request has one new token
        and transformers has made one; the index tensors are then empty. None otherwise.
    """

    read_index: Sequence[torch.Tensor]
    write_index: Sequence[torch.Tensor]
    cu_seq_lens_q: torch.Tensor
    cu_seq_lens_k: torch.Tensor | Mapping[str, torch.Tensor]
    max_seqlen_q: int
    max_seqlen_k: int | Mapping[str, int]
    block_table: torch.Tensor | None

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Self:
        """From the keyword arguments of a layer's attention.

        Raises:
          TypeError: some are missing.
        """
        missing = [name for name in _ALWAYS_PASSED if batch.get(name) is None]
        if missing:
            raise TypeError(f"{', '.join(missing)}: expected from transformers' continuous batching, got nothing")
        return cls(**{name: batch[name] for name in _ALWAYS_PASSED}, block_table=batch.get("block_table"))

    def cu_seq_lens_k_of(self, layer_type: str) -> torch.Tensor:
        lens = self.cu_seq_lens_k
        return lens[layer_type] if isinstance(lens, Mapping) else lens

    def max_seqlen_k_of(self, layer_type: str) -> int:
        longest = self.max_seqlen_k
        return longest[layer_type] if isinstance(longest, Mapping) else longest

    def decodes_from_cache(self, group: int) -> bool:
        """Whether every request has one new token, and some have a past."""
        return self.max_seqlen_q == 1 and self.read_index[group].numel() > 0


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer and its place in the cache. Build it with `of`.

    Attributes:
      group: of which group of layers it is one.
      window: how many positions a query sees, its own included; None for all.
      ring: how many tokens the cache keeps of a request, that at position p in the place p modulo `ring`; None for all.
    """

    cache: Any
    index: int
    group: int
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    window: int | None
    ring: int | None

    @classmethod
    def of(cls, module: Any, cache: Any, sliding_window: int | None) -> Self:
        """The layer `module`, which may say how many positions its queries see.

        Raises:
          TypeError, ValueError: there is no cache, or it has no such layer, or keeps another number of positions.
        """
        if cache is None:
            raise ValueError(
                "cache: expected that of continuous batching, got None; call model.generate_batch, or give the model "
                'another attn_implementation, say "sdpa", for its own forward and generate'
            )
        index = getattr(module, "layer_idx", None)
        if index is None or index not in cache.layer_index_to_group_indices:
            raise ValueError(f"module.layer_idx: expected a layer of the cache, got {index!r}")
        group, place = cache.layer_index_to_group_indices[index]
        kept = cache.sliding_windows[index]
        ring = None if kept == 1 else kept  # so transformers writes that a layer keeps all
        if sliding_window is not None and (isinstance(sliding_window, bool) or not isinstance(sliding_window, int)):
            raise TypeError(f"sliding_window: expected an int or None, got {sliding_window!r}")
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window: expected 1 or more, or None, got {sliding_window}")
        if ring is not None and sliding_window not in (None, ring):
            raise ValueError(f"sliding_window: expected {ring}, which the cache keeps, or None, got {sliding_window}")
        window = sliding_window if ring is None else ring
        return cls(cache, index, group, cache.key_cache[place], cache.value_cache[place], window, ring)

    @property
    def layer_type(self) -> str:
        return FULL if self.ring is None else SLIDING

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    @property
    def window_size(self) -> tuple[int, int]:
        """(left, right) as FlashAttention's functions take it; -1 for no bound."""
        return (-1, -1) if self.window is None else (self.window - 1, 0)

    def blocks(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches seen as [num_blocks, block_size, num_kv_heads, head_size]."""
        key, value = (x.view(-1, block_size, *x.shape[1:]) for x in (self.key_cache, self.value_cache))
        return key, value


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where the keys of a group's layers lie.

    Attributes:
      block_table: [num_reqs, max_blocks] int32; -1 past a request's blocks.
      block_size: of the blocks in the table, which divides the cache's.
      seq_lens: [num_reqs] int32, the keys in the cache: with the new ones; without where transformers made the table,
        but not on a GPU.
      new_slots: [num_tokens] int64, where the new tokens go; None where transformers made the table, but on a GPU.
      attention: what the group's layers share on a GPU; None elsewhere.
    """

    block_table: torch.Tensor
    block_size: int
    seq_lens: torch.Tensor
    new_slots: torch.Tensor | None
    attention: AttentionPlan | None = None

    def on_gpu(self, layer: Layer, step: Step) -> "Plan":
        """The plan with what layers share on a GPU."""
        lens, slots, longest = self.seq_lens, self.new_slots, step.max_seqlen_q
        if slots is None:
            slots = GpuCache(*layer.blocks(self.block_size), (None, None), self.block_table, lens).new_slots(1)
            lens, longest = step.cu_seq_lens_k_of(layer.layer_type).diff(), 1
        attention = plan_attention(self.block_table, lens, step.cu_seq_lens_q, longest)
        return dataclasses.replace(self, seq_lens=lens, new_slots=slots, attention=attention)


_latest = threading.local()


def plan_of(layer: Layer, step: Step, gpu: bool) -> Plan:
    """The plan of a layer's group, made by the first layer that asks in a step.

    Steps are told apart by their list of read indices, a new one in each, while the tensors in it are written anew.
    What was planned before a CUDA graph's capture is planned again in it, so that replays plan, too.
    """
    capturing = step.cu_seq_lens_q.is_cuda and torch.cuda.is_current_stream_capturing()
    if getattr(_latest, "read_index", None) is not step.read_index or _latest.capturing != capturing:
        _latest.read_index, _latest.capturing, _latest.plans = step.read_index, capturing, {}
    if layer.group not in _latest.plans:
        plan = _make_plan(layer, step)
        _latest.plans[layer.group] = plan.on_gpu(layer, step) if gpu else plan
    return _latest.plans[layer.group]


def _make_plan(layer: Layer, step: Step) -> Plan:
    ends = step.cu_seq_lens_k_of(layer.layer_type)
    lens = ends.diff()
    if step.block_table is not None:
        # Rows of padding have no keys at all.
        return Plan(step.block_table[layer.group], layer.block_size, (lens - 1).clamp_min(0), None)
    slots, new = step.read_index[layer.group], step.write_index[layer.group]
    block_size, longest = layer.block_size, step.max_seqlen_k_of(layer.layer_type)
    if layer.ring is not None:
        # The last of a ring's blocks may be full in part, and be followed by the first: smaller ones are not.
        block_size, longest = math.gcd(block_size, layer.ring), min(longest, layer.ring)
        slots = slots.clone()
        slots[ends[1:] - 1] = new[: len(lens)]
    elif slots.numel() == 0:
        slots = new
    columns = -(-longest // block_size)
    return Plan(_block_table(slots, ends[:-1], lens, columns, block_size, layer.ring), block_size, lens, new)


def _block_table(
    slots: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, columns: int, block_size: int, ring: int | None
) -> torch.Tensor:
    """The blocks [num_reqs, columns] int32 of requests whose keys lie at the `slots` from their `starts` on.

    A request that fills its ring may start within a block, and ends in the same: it is taken from the next block on.
    The order of its keys is another then, which a single query that sees them all can't tell.
    """
    last = max(slots.numel() - 1, 0)  # rows of padding start past it
    at = torch.arange(columns, device=slots.device) * block_size
    if ring is not None:
        into_next_block = -slots[starts.clamp(max=last)] % block_size
        at = (into_next_block[:, None] + at) % ring
    table = slots[(starts[:, None] + at).clamp(max=last)] // block_size
    return torch.where(at < lens[:, None], table, -1).to(torch.int32)
