"""A stand-in for transformers' `PagedAttentionCache`, by its rules, and steps over it, without transformers.

Full layers keep every token in blocks, rolling ones the last `window`, that at position p in the place p % `window`.
"""

import dataclasses
import math
from typing import Any

import torch

FULL, SLIDING = "full_attention", "sliding_attention"


class FakeCache:
    """One layer for each group: layer 0 is full, layer 1 rolling; with no window there is layer 0 alone.

    Attributes:
      key_cache, value_cache: one tensor [(num_blocks + 2) * block_size, num_kv_heads, head_size] for both groups.
    """

    def __init__(
        self,
        *,
        window: int | None,
        block_size: int,
        num_kv_heads: int = 2,
        head_size: int = 16,
        num_blocks: int = 64,
        dtype: torch.dtype = torch.float32,
    ):
        shape = ((num_blocks + 2) * block_size, num_kv_heads, head_size)
        self.key_cache = [torch.full(shape, torch.nan, dtype=dtype)]
        self.value_cache = [torch.full(shape, torch.nan, dtype=dtype)]
        self.block_size = block_size
        self.window = window
        self.layer_types = [FULL] if window is None else [FULL, SLIDING]
        self.layer_index_to_group_indices = {i: (i, 0) for i in range(len(self.layer_types))}
        self.sliding_windows = {i: 1 if t == FULL else window for i, t in enumerate(self.layer_types)}
        self.read_trash, self.sentinel_index = num_blocks * block_size, num_blocks * block_size + 1
        self.write_trash = (num_blocks + 1) * block_size
        for cache in (self.key_cache[0], self.value_cache[0]):
            cache[self.read_trash : self.write_trash] = 0
        self._free = torch.randperm(num_blocks).tolist()
        self._blocks: dict[tuple[int, int], list[int]] = {}
        self.updates = 0

    def slots(self, group: int, request: int, positions: range) -> list[int]:
        """Where tokens lie, or will."""
        rolling = self.layer_types[group] == SLIDING
        blocks = self._blocks.setdefault((group, request), [])
        slots = []
        for position in positions:
            place = position % self.window if rolling else position
            while len(blocks) <= place // self.block_size:
                blocks.append(self._free.pop())
            slots.append(blocks[place // self.block_size] * self.block_size + place % self.block_size)
        return slots

    def blocks(self, group: int, request: int) -> list[int]:
        return self._blocks[group, request]

    def update(
        self, *, key_states: Any, value_states: Any, layer_idx: int, read_index: Any, write_index: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' own: read what is cached of the keys to see, put the new ones beside them, write."""
        self.updates += 1
        results = []
        read, write = read_index[layer_idx], write_index[layer_idx]
        for cache, states in ((self.key_cache[0], key_states), (self.value_cache[0], value_states)):
            new = states[0].transpose(0, 1)
            seen = cache[read].clone() if len(read) else new.clone()
            if len(read):
                seen[read == self.sentinel_index] = new[: int((read == self.sentinel_index).sum())]
            cache[write] = new
            results.append(seen)
        return results[0], results[1]


@dataclasses.dataclass(frozen=True)
class Part:
    """A request's new tokens in a step."""

    request: int
    past: int
    length: int


def step_arguments(
    cache: FakeCache, parts: list[Part], *, with_table: bool = False, padded_to: int | None = None
) -> dict[str, Any]:
    """The keyword arguments of a step, perhaps padded to a number of tokens and requests, as for CUDA graphs."""
    groups = range(len(cache.layer_types))
    write = [[] for _ in groups]
    read = [[] for _ in groups]
    cu_q, cu_k = [0], {layer_type: [0] for layer_type in cache.layer_types}
    for part in parts:
        cu_q.append(cu_q[-1] + part.length)
        for group, layer_type in enumerate(cache.layer_types):
            end = part.past + part.length
            slots = cache.slots(group, part.request, range(part.past, end))
            if layer_type == FULL:
                read[group] += cache.slots(group, part.request, range(end))
                cu_k[layer_type].append(cu_k[layer_type][-1] + end)
                write[group] += slots
                continue
            kept = min(part.past, cache.window - 1)
            read[group] += cache.slots(group, part.request, range(part.past - kept, part.past))
            read[group] += [cache.sentinel_index] * part.length
            cu_k[layer_type].append(cu_k[layer_type][-1] + kept + part.length)
            dropped = max(part.length - cache.window, 0)
            write[group] += [cache.write_trash] * dropped + slots[dropped:]
    pasts = any(part.past for part in parts) or padded_to is not None
    if padded_to is not None:
        for lens in (cu_q, *cu_k.values()):
            lens += [lens[-1]] * (padded_to - len(parts))
        write = [slots + [cache.write_trash] * (padded_to - len(slots)) for slots in write]
        read = [slots + [cache.read_trash] * padded_to for slots in read]
    longest = {layer_type: int(torch.tensor(lens).diff().max()) for layer_type, lens in cu_k.items()}
    arguments = {
        "read_index": [torch.tensor(slots if pasts and not with_table else [], dtype=torch.int64) for slots in read],
        "write_index": [torch.tensor([] if with_table else slots, dtype=torch.int64) for slots in write],
        "cu_seq_lens_q": torch.tensor(cu_q, dtype=torch.int32),
        "cu_seq_lens_k": {t: torch.tensor(lens, dtype=torch.int32) for t, lens in cu_k.items()},
        "max_seqlen_q": padded_to or max(part.length for part in parts),
        # For CUDA graphs it is rounded up to a power of two.
        "max_seqlen_k": {t: 1 << (n - 1).bit_length() if padded_to else n for t, n in longest.items()},
        "block_table": _table(cache, parts, padded_to or len(parts)) if with_table else None,
    }
    if len(cache.layer_types) == 1:
        for name in ("cu_seq_lens_k", "max_seqlen_k"):
            arguments[name] = arguments[name][FULL]
    return arguments


def _table(cache: FakeCache, parts: list[Part], rows: int) -> torch.Tensor:
    columns = max(math.ceil((part.past + part.length) / cache.block_size) for part in parts) + 2
    tables = torch.full((1, rows, columns), -1, dtype=torch.int32)
    for row, part in enumerate(parts):
        blocks = cache.blocks(0, part.request)
        tables[0, row, : len(blocks)] = torch.tensor(blocks)
    return tables
