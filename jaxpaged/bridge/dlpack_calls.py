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
from jaxpaged.bridge.decode_calls import decode_on_gpu
from jaxpaged.bridge.decode_shapes import ScoreOptions, decode_shapes, plan_sizes
from jaxpaged.bridge.dlpack import ALIGNMENT, tensor_cache, words_to_slots
from jaxpaged.bridge.op_arguments import Arguments
from jaxpaged.bridge.plan_calls import Plan, plan_on_gpu
from jaxpaged.bridge.prefill_calls import prefill_on_gpu
from jaxpaged.bridge.prefill_plan_calls import plan_prefill_on_gpu
from jaxpaged.bridge.prefill_shapes import plan_numbers, prefill_shapes, prefill_workspace_bytes
from jaxpaged.bridge.torch_cache import check_ints, stored_dtype
from jaxpaged.bridge.torch_call import torch_call
from jaxpaged.bridge.write_calls import engine_cache, pieces, write_on_gpu
from jaxpaged.cache import write_kv
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.checks import check_shape
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas import decode_plan as field

_WORD_BYTES = 4
_UNIT = ALIGNMENT // _WORD_BYTES
"""Tokens: this many slots take a multiple of `ALIGNMENT` bytes."""


def write_by_dlpack(*given: Any, **named: Any) -> None:
    """See `write_calls.write_on_gpu`; of tokens that share a slot the last is kept."""
    call = Arguments.of(write_on_gpu, given, named)
    engine_cache(call.key_cache, call.value_cache, call.kv_cache_dtype, call.k_scale, call.v_scale)  # checks them
    dtype, slots = stored_dtype(call.kv_cache_dtype), call.slot_mapping
    scaled = {} if dtype is None else {"k_scale": call.k_scale, "v_scale": call.v_scale, "dtype": dtype}
    cache = tensor_cache(call.key_cache, call.value_cache, **scaled)
    check_ints("slot_mapping", slots)
    check_shape("slot_mapping", slots.shape, ("num_slots",))
    key, value = call.key.contiguous(), call.value.contiguous()
    for first, size in aligned_pieces(min(len(key), len(slots))):
        rows = slice(first, first + size)
        words, lead = _aligned_words(slots[rows])
        write = _Write(lead, slots.element_size() // _WORD_BYTES)
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


def plan_by_dlpack(*given: Any, **named: Any) -> Plan:
    """See `plan_calls.plan_on_gpu`; lengths and starts alone are in it, for `decode_by_dlpack`."""
    call = Arguments.of(plan_on_gpu, given, named)
    _check_batch(call)
    *sizes, workspace = plan_sizes(*call.layer, *call.how)
    requests, shares = (torch.zeros(size, dtype=torch.int32, device=call.query.device) for size in sizes)
    num_reqs = call.block_table.shape[0]
    requests[:num_reqs, field.KV_LEN] = call.seq_lens
    requests[: num_reqs + 1, field.Q_START] = call.query_start_loc
    return requests, shares, torch.empty(workspace, dtype=torch.uint8, device=call.query.device)


def decode_by_dlpack(*given: Any, **named: Any) -> None:
    """See `decode_calls.decode_on_gpu`."""
    call = Arguments.of(decode_on_gpu, given, named)
    found, num_reqs = decode_shapes(*call.layer, *call.how), call.block_table.shape[0]
    check_shape("requests", call.requests.shape, (found.rows + 1, field.NUM_FIELDS))
    lens, starts = call.requests[:num_reqs, field.KV_LEN], call.requests[: num_reqs + 1, field.Q_START]
    lse = None if call.lse is None else call.lse.T
    _Attention.of(call, call.max_query_len).write(call, (lens, starts), call.by_query_head, lse)


def plan_prefill_by_dlpack(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `prefill_plan_calls.plan_prefill_on_gpu`; lengths and starts come first in the plan, and no more is in it."""
    call = Arguments.of(plan_prefill_on_gpu, given, named)
    _check_batch(call)
    found, device = prefill_shapes(*call.layer, *call.how), call.query.device
    lengths = numbers = 2 * call.block_table.shape[0] + 1
    workspace = 0
    if device.type == "cuda":  # as large as the operator's fake says
        numbers = max(numbers, plan_numbers(found.fields()))
        workspace = prefill_workspace_bytes(found, call.block_table, call.query)
    plan = torch.zeros(numbers, dtype=torch.int32, device=device)
    torch.cat([call.seq_lens, call.query_start_loc], out=plan[:lengths])
    return plan, torch.empty(workspace, dtype=torch.uint8, device=device)


def prefill_by_dlpack(*given: Any, **named: Any) -> None:
    """See `prefill_calls.prefill_on_gpu`."""
    call = Arguments.of(prefill_on_gpu, given, named)
    prefill_shapes(*call.layer, *call.how)  # checks them
    num_reqs = call.block_table.shape[0]
    batch = (call.plan[:num_reqs], call.plan[num_reqs : 2 * num_reqs + 1])
    sinks = None if call.sinks is None else call.sinks[None]
    _Attention.of(call, None).write(call, batch, (call.slopes, sinks), call.lse)


def _check_batch(call: Arguments) -> None:
    num_reqs = call.block_table.shape[0]
    for name, size in (("seq_lens", num_reqs), ("query_start_loc", num_reqs + 1)):
        x = getattr(call, name)
        check_shape(name, x.shape, (size,))
        check_one_device(call.key_cache, **{name: x})
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
    def of(cls, call: Arguments, max_query_len: int | None) -> Self:
        rows = _whole_rows(call.block_table)
        table = (*call.block_table.shape, rows.shape[1])
        return cls(call.scores, max_query_len, call.batch_invariant, _aligned_words(rows)[1], table)

    def write(
        self,
        call: Arguments,
        batch: Sequence[torch.Tensor],
        by_head: Sequence[torch.Tensor | None],
        lse: torch.Tensor | None,
    ) -> None:
        """Attention to the call's `out` [num_tokens, num_heads, v_head_size] and `lse` [num_heads, num_tokens].

        Args:
          batch: lengths and starts.
          by_head: slopes [1 or num_reqs, num_heads] and sinks [1, num_heads].
        """
        query, out = call.query, call.out
        cache = tensor_cache(call.key_cache, call.value_cache, k_scale=call.k_scale, v_scale=call.v_scale)
        check_shape("out", out.shape, (*query.shape[:2], cache.v_head_size))
        if out.dtype != query.dtype:
            raise TypeError(f"out: expected {query.dtype}, the dtype of query, got {out.dtype}")
        if lse is not None:
            check_shape("lse", lse.shape, (query.shape[1], query.shape[0]))
        words, _ = _aligned_words(_whole_rows(call.block_table))
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
