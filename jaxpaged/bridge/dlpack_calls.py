"""The operators of `torch_ops.py` by XLA and DLPack: what serves where kernels can't be launched on PyTorch's stream.

They mean what the operators on a GPU mean, keep to the order of the current stream, and copy no cache, block table or
slot mapping. No CUDA graph can capture them, and each number of requests is compiled.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
import torch

from jaxpaged.attention import paged_attention
from jaxpaged.bridge.cache_shapes import check_one_device
from jaxpaged.bridge.copy_calls import Blocks, block_pairs, blocks_of_layers, blocks_to_swap, swap_between_devices
from jaxpaged.bridge.decode_calls import by_query_head
from jaxpaged.bridge.decode_shapes import ScoreOptions, decode_shapes, plan_sizes
from jaxpaged.bridge.dlpack import ALIGNMENT, tensor_cache, words_to_slots
from jaxpaged.bridge.plan_calls import Plan
from jaxpaged.bridge.prefill_shapes import plan_numbers, prefill_shapes, prefill_workspace_bytes
from jaxpaged.bridge.torch_cache import check_ints, stored_dtype
from jaxpaged.bridge.torch_call import torch_call
from jaxpaged.bridge.write_calls import engine_cache, pieces
from jaxpaged.cache import write_kv
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.checks import check_shape
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas import decode_plan as field

_WORD_BYTES = 4
_UNIT = ALIGNMENT // _WORD_BYTES
"""Tokens: this many slots take a multiple of `ALIGNMENT` bytes."""


def write_by_dlpack(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """See `write_calls.write_on_gpu`; of tokens that share a slot the last is kept."""
    engine_cache(key_cache, value_cache, kv_cache_dtype, k_scale, v_scale)  # checks them
    dtype = stored_dtype(kv_cache_dtype)
    if dtype is None:
        cache = tensor_cache(key_cache, value_cache)
    else:
        cache = tensor_cache(key_cache, value_cache, k_scale=k_scale, v_scale=v_scale, dtype=dtype)
    check_ints("slot_mapping", slot_mapping)
    check_shape("slot_mapping", slot_mapping.shape, ("num_slots",))
    key, value = key.contiguous(), value.contiguous()
    for first, size in aligned_pieces(min(len(key), len(slot_mapping))):
        rows = slice(first, first + size)
        words, lead = _aligned_words(slot_mapping[rows])
        write = _Write(lead, slot_mapping.element_size() // _WORD_BYTES)
        torch_call(write, cache, key[rows], value[rows], words, donate=[0])


def copy_by_dlpack(
    key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor], block_mapping: torch.Tensor
) -> None:
    """See `copy_calls.copy_on_gpu`."""
    layers = blocks_of_layers(key_caches, value_caches, block_mapping)
    if block_mapping.shape[0] == 0:
        return
    for blocks in layers:
        pairs = block_pairs(block_mapping, blocks.num_blocks, blocks.num_blocks, within=True)
        torch_call(_copied, _words(blocks), pairs.source, pairs.target, donate=[0])


def swap_by_dlpack(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor) -> None:
    """See `copy_calls.swap_on_gpu`."""
    if src.device != dst.device:
        swap_between_devices(src, dst, block_mapping)
        return
    source, target = blocks_to_swap(src, dst, block_mapping)
    if block_mapping.shape[0] == 0:
        return
    pairs = block_pairs(block_mapping, source.num_blocks, target.num_blocks, within=False)
    if source.first == target.first and source.num_blocks == target.num_blocks:
        torch_call(_copied, _words(target), pairs.source, pairs.target, donate=[0])
    else:
        torch_call(_swapped, _words(target), _words(source), pairs.source, pairs.target, donate=[0])


def plan_by_dlpack(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    batch_invariant: bool,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> Plan:
    """See `plan_calls.plan_on_gpu`; lengths and starts alone are in it, for `decode_by_dlpack`."""
    _check_batch(key_cache, block_table, seq_lens, query_start_loc)
    scores = ScoreOptions(scale, causal, window_left, window_right, soft_cap)
    how: Any = (max_query_len, batch_invariant, scores, k_scale, v_scale)
    *sizes, workspace = plan_sizes(query, key_cache, value_cache, block_table, *how)
    requests, shares = (torch.zeros(size, dtype=torch.int32, device=query.device) for size in sizes)
    num_reqs = block_table.shape[0]
    requests[:num_reqs, field.KV_LEN] = seq_lens
    requests[: num_reqs + 1, field.Q_START] = query_start_loc
    return requests, shares, torch.empty(workspace, dtype=torch.uint8, device=query.device)


def decode_by_dlpack(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor,
    shares: torch.Tensor,
    workspace: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_query_len: int,
    batch_invariant: bool,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    out: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """See `decode_calls.decode_on_gpu`."""
    scores = ScoreOptions(scale, causal, window_left, window_right, soft_cap)
    how: Any = (max_query_len, batch_invariant, scores, k_scale, v_scale)
    found = decode_shapes(query, key_cache, value_cache, block_table, *how)
    check_shape("requests", requests.shape, (found.rows + 1, field.NUM_FIELDS))
    num_reqs = block_table.shape[0]
    kind = {"num_kv_heads": key_cache.shape[2], "max_query_len": max_query_len}
    lens, starts = requests[:num_reqs, field.KV_LEN], requests[: num_reqs + 1, field.Q_START]
    cache = tensor_cache(key_cache, value_cache, k_scale=k_scale, v_scale=v_scale)
    attend = _Attention.of(scores, max_query_len, batch_invariant, block_table)
    attend.write(
        cache,
        query,
        block_table,
        (lens, starts),
        [by_query_head(x, **kind) for x in (slopes, sinks)],
        out,
        None if lse is None else lse.T,
    )


def plan_prefill_by_dlpack(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    batch_invariant: bool,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `prefill_plan_calls.plan_prefill_on_gpu`; lengths and starts come first in the plan, and no more is in it."""
    _check_batch(key_cache, block_table, seq_lens, query_start_loc)
    scores = ScoreOptions(scale, causal, window_left, window_right, soft_cap)
    how: Any = (batch_invariant, scores, k_scale, v_scale)
    found = prefill_shapes(query, key_cache, value_cache, block_table, *how)
    numbers, workspace = 2 * block_table.shape[0] + 1, 0
    if query.device.type == "cuda":  # as large as the operator's fake says
        numbers = max(numbers, plan_numbers(found.fields()))
        workspace = prefill_workspace_bytes(found, block_table, query)
    plan = torch.zeros(numbers, dtype=torch.int32, device=query.device)
    torch.cat([seq_lens, query_start_loc], out=plan[: 2 * block_table.shape[0] + 1])
    return plan, torch.empty(workspace, dtype=torch.uint8, device=query.device)


def prefill_by_dlpack(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    plan: torch.Tensor,
    workspace: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    decode_slopes: torch.Tensor | None,
    decode_sinks: torch.Tensor | None,
    batch_invariant: bool,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    out: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """See `prefill_calls.prefill_on_gpu`."""
    scores = ScoreOptions(scale, causal, window_left, window_right, soft_cap)
    how: Any = (batch_invariant, scores, k_scale, v_scale)
    prefill_shapes(query, key_cache, value_cache, block_table, *how)  # checks them
    num_reqs = block_table.shape[0]
    batch = (plan[:num_reqs], plan[num_reqs : 2 * num_reqs + 1])
    by_head = [slopes, None if sinks is None else sinks[None]]
    attend = _Attention.of(scores, None, batch_invariant, block_table)
    cache = tensor_cache(key_cache, value_cache, k_scale=k_scale, v_scale=v_scale)
    attend.write(cache, query, block_table, batch, by_head, out, lse)


def _check_batch(
    key_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    num_reqs = block_table.shape[0]
    for name, x, size in (("seq_lens", seq_lens, num_reqs), ("query_start_loc", query_start_loc, num_reqs + 1)):
        check_shape(name, x.shape, (size,))
        check_one_device(key_cache, **{name: x})
        if x.dtype != torch.int32:
            raise TypeError(f"{name}: expected torch.int32, got {x.dtype}")


def aligned_pieces(num_tokens: int) -> list[tuple[int, int]]:
    """`write_calls.pieces` that begin at multiples of 16 tokens, and so where JAX shares memory; three at most."""
    units, rest = divmod(num_tokens, _UNIT)
    whole = [(first * _UNIT, size * _UNIT) for first, size in pieces(units)]
    return [*whole, (units * _UNIT, rest)] if rest else whole


@dataclasses.dataclass(frozen=True)
class _Write:
    """A write to a cache, as a function that is equal to others of the same options, and so compiled once.

    Attributes:
      lead: words before the slots.
      words_per_slot: 1 for int32, 2 for int64.
    """

    lead: int
    words_per_slot: int

    def __call__(self, cache: KVCache, key: Any, value: Any, words: Any) -> tuple[None, KVCache]:
        slots = words[self.lead :]
        if self.words_per_slot == 2:
            slots = words_to_slots(slots.reshape(-1, 2))
        return None, write_kv(cache, key, value, slots)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Attention of a layer, compiled once, as `_Write` is.

    Attributes:
      lead: words before the block table.
      table: its rows and columns, and how many words apart rows are.
    """

    scores: ScoreOptions
    max_query_len: int | None
    batch_invariant: bool
    lead: int
    table: tuple[int, int, int]

    @classmethod
    def of(
        cls, scores: ScoreOptions, max_query_len: int | None, batch_invariant: bool, block_table: torch.Tensor
    ) -> Self:
        rows = _whole_rows(block_table)
        table = (block_table.shape[0], block_table.shape[1], rows.shape[1])
        return cls(scores, max_query_len, batch_invariant, _aligned_words(rows)[1], table)

    def write(
        self,
        cache: KVCache,
        query: torch.Tensor,
        block_table: torch.Tensor,
        batch: Sequence[torch.Tensor],
        by_head: Sequence[torch.Tensor | None],
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Attention to `out` [num_tokens, num_heads, v_head_size] and `lse` [num_heads, num_tokens].

        Args:
          batch: lengths and starts.
          by_head: slopes [1 or num_reqs, num_heads] and sinks [1, num_heads].
        """
        check_shape("out", out.shape, (*query.shape[:2], cache.v_head_size))
        if out.dtype != query.dtype:
            raise TypeError(f"out: expected {query.dtype}, the dtype of query, got {out.dtype}")
        if lse is not None:
            check_shape("lse", lse.shape, (query.shape[1], query.shape[0]))
        words, _ = _aligned_words(_whole_rows(block_table))
        numbers = (x.clone(memory_format=torch.contiguous_format) for x in batch)  # where JAX shares memory
        given = (None if x is None else x.contiguous() for x in by_head)
        result, lses = torch_call(self, cache, query.contiguous(), words, *numbers, *given)
        out.copy_(result)
        if lse is not None:
            lse.copy_(lses)

    def __call__(
        self, cache: KVCache, query: Any, words: Any, lens: Any, starts: Any, slopes: Any, sinks: Any
    ) -> tuple[Any, Any]:
        num_reqs, columns, apart = self.table
        options = self.scores.options()
        return paged_attention(
            query,
            cache,
            PagedBatch(
                words[self.lead :].reshape(num_reqs, apart)[:, :columns], lens, starts, None, self.max_query_len
            ),
            scale=options.scale,
            causal=options.causal,
            window=options.window,
            soft_cap=options.soft_cap,
            alibi_slopes=slopes[0] if slopes is not None and len(slopes) == 1 else slopes,
            sinks=None if sinks is None else sinks[0],
            batch_invariant=self.batch_invariant,
            return_lse=True,
        )


def _copied(blocks: Any, source: Any, target: Any) -> tuple[None, Any]:
    return _swapped(blocks, blocks, source, target)


def _swapped(blocks: Any, others: Any, source: Any, target: Any) -> tuple[None, Any]:
    """Blocks [n, words], some set to those of `others`; negative targets stand for none."""
    past_the_end = len(blocks) + jnp.arange(len(target), dtype=jnp.int32)
    at = jnp.where(target >= 0, target, past_the_end)
    return None, blocks.at[at].set(others[source], mode="drop", unique_indices=True)


def _words(blocks: Blocks) -> torch.Tensor:
    """Blocks [num_blocks, size / 4] int32, whatever they hold."""
    first, words = blocks.tensor, blocks.size // 4
    offset = first.storage_offset() * first.element_size() // 4
    return torch.empty(0, dtype=torch.int32, device=first.device).set_(
        first.untyped_storage(), offset, (blocks.num_blocks, words), (words, 1)
    )


def _aligned_words(ints: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Ints as [n] int32 words from an address on where JAX shares memory, and how many of them come before the ints.

    An engine's slots and tables may begin anywhere inside of a tensor, and that begins where it may.
    """
    if not ints.is_contiguous():
        raise ValueError(f"slot_mapping: expected slots side by side, got a stride of {ints.stride(0)}")
    words = ints.reshape(-1).view(torch.int32)
    lead = words.data_ptr() % ALIGNMENT // _WORD_BYTES
    if lead > words.storage_offset():
        return words, 0
    return words.as_strided((lead + len(words),), (1,), words.storage_offset() - lead), lead


def _whole_rows(block_table: torch.Tensor) -> torch.Tensor:
    """A block table with what its rows hold up to the next one, which is compact."""
    rows, apart = block_table.shape[0], block_table.stride(0)
    needed = (block_table.storage_offset() + rows * apart) * block_table.element_size()
    if block_table.is_contiguous():
        return block_table
    if block_table.untyped_storage().nbytes() < needed:
        raise ValueError(
            f"block_table: expected whole rows of {apart} columns, of which it is a part, up to its last one"
        )
    return block_table.as_strided((rows, apart), (apart, 1))
