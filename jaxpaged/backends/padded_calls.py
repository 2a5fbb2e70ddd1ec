"""Calls of the compiled attention functions on PyTorch's tensors, padded to sizes that few programs serve.

A program is compiled for each set of shapes, and that takes seconds, while engines come with other numbers of tokens
and requests in every step. So tokens, requests and table columns are rounded up. What is padded is what changes from
step to step: queries, dense keys and values, and lengths. Caches are shared as they are, and a block table is read
where it lies, by a compiled function of its own.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxpaged.attention import join_options, make_options, paged_attention, split_options
from jaxpaged.backends.positions import ByPhysicalIndex, OneBatch
from jaxpaged.bridge.dlpack import ALIGNMENT, on_cpu, to_numpy, to_torch
from jaxpaged.bridge.shared_table import SharedTable
from jaxpaged.merge import merge_attention_states
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.metadata.masks import compose_scores
from jaxpaged.reference import attention as reference

State = tuple[torch.Tensor, torch.Tensor | None]
_LEAST = 16
_QUERY_LENS = tuple(shape.longest_query for shape in reference.TILE_SHAPES if shape.longest_query is not None)


@dataclasses.dataclass(frozen=True)
class Options:
    """What the scores go through, as `jaxpaged.paged_attention` takes it; arrays are tensors."""

    scale: float
    causal: bool
    window: tuple[int | None, int | None]
    soft_cap: float | None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    mask_mod: Any = None
    score_mod: Any = None
    physical_score_mod: Any = None  # of rows of the query and physical indices, and b = 0; for paged calls

    def with_repeated_requests(self, times: int) -> "Options":
        """The options of a batch that has each request as many times."""
        slopes = self.alibi_slopes
        if slopes is None or slopes.ndim == 1:
            return self
        return dataclasses.replace(self, alibi_slopes=slopes.repeat_interleave(times, 0))


def paged_call(
    query: torch.Tensor,
    cache: KVCache,
    table: Any,
    seq_lens: np.ndarray,
    starts: np.ndarray,
    options: Options,
    return_lse: bool,
    shares_prefix: bool = False,
) -> State:
    """Attention to a paged cache.

    Args:
      query: [num_tokens, num_heads, head_size].
      table: [num_reqs, columns] int, a tensor, read where it lies, or a NumPy array.
      seq_lens: [num_reqs] int32.
      starts: [num_reqs + 1] int32, where each request's tokens start in `query`.

    Returns:
      The output [num_tokens, num_heads, v_head_size] and the lse [num_heads, num_tokens] or None, finished.
    """
    num_reqs, columns = table.shape
    rows, width = coarse(num_reqs), coarse(columns)
    lens = np.minimum(seq_lens, columns * cache.block_size)
    with on_cpu():
        batch = PagedBatch(
            block_table=_padded_table(table, rows, width),
            seq_lens=_extended(lens, rows, 0),
            query_start_loc=_extended(starts, rows + 1, starts[-1]),
            slot_mapping=None,
            max_query_len=_query_len_class(starts),
            shares_prefix=shares_prefix,
        )
        arguments = _for_jax(options, rows)
        if options.physical_score_mod is not None:
            arguments["score_mod"] = score_by_index(options.physical_score_mod, arguments["score_mod"], batch, cache)
        out, lse = paged_attention(_padded(query, fine(query.shape[0])), cache, batch, return_lse=True, **arguments)
        return _results(out, lse if return_lse else None, query.shape[0])


def ragged_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: np.ndarray,
    kv_starts: np.ndarray,
    options: Options,
    return_lse: bool,
) -> State:
    """Attention to packed keys and values [total_kv, num_kv_heads, head_size]; otherwise as `paged_call`."""
    rows = coarse(len(starts) - 1)
    total_kv = fine(key.shape[0])
    with on_cpu():
        checked = make_options(num_heads=query.shape[1], num_reqs=rows, **_for_jax(options, rows))
        arrays, static = split_options(checked)
        out, lse = _ragged(
            _padded(query, fine(query.shape[0])),
            _padded(key, total_kv),
            _padded(value, total_kv),
            _extended(starts, rows + 1, starts[-1]),
            _extended(kv_starts, rows + 1, kv_starts[-1]),
            arrays,
            static,
            _query_len_class(starts),
        )
        return _results(out, lse if return_lse else None, query.shape[0])


def merge_call(outputs: list[torch.Tensor], lses: list[torch.Tensor]) -> State:
    """The merged state of states [num_tokens, num_heads, v_head_size] with lses [num_heads, num_tokens]."""
    num_tokens, num_heads, v_head_size = outputs[0].shape
    size = fine(num_tokens)
    states = torch.zeros(len(outputs), size, num_heads, v_head_size, dtype=outputs[0].dtype, device="cpu")
    state_lses = torch.full((len(lses), num_heads, size), -torch.inf, dtype=torch.float32, device="cpu")
    for i, (out, lse) in enumerate(zip(outputs, lses, strict=True)):
        states[i, :num_tokens] = out.detach()
        state_lses[i, :, :num_tokens] = lse.detach()
    with on_cpu():
        out, lse = merge_attention_states(to_numpy(states), to_numpy(state_lses))
        return _results(out, lse, num_tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _DistanceBias:
    """ALiBi as FlashAttention has it without a causal mask: it falls with the distance, to both sides."""

    slopes: Any  # [num_heads] or [num_reqs, num_heads] float32

    def __call__(self, score: Any, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        slopes = self.slopes[h] if self.slopes.ndim == 1 else self.slopes[b, h]
        return score - slopes * jnp.abs(kv_pos - q_pos)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _ragged(
    query: Any, key: Any, value: Any, starts: Any, kv_starts: Any, arrays: Any, static: Any, max_query_len: int | None
) -> tuple[Any, Any]:
    options = join_options(arrays, static)
    return reference.ragged_attention(
        query, key, value, starts, kv_starts, options, out_dtype=query.dtype, max_query_len=max_query_len
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _read_table(table: SharedTable, rows: int, columns: int) -> Any:
    return table.read(rows, columns)


def _padded_table(table: Any, rows: int, columns: int) -> Any:
    """The table as an array [rows, columns] int32 for a jitted function."""
    if isinstance(table, np.ndarray):
        padded = np.full((rows, columns), -1, np.int32)
        padded[: table.shape[0], : table.shape[1]] = table
        return padded
    as_it_is = table.dtype == torch.int32 and table.is_contiguous() and table.data_ptr() % ALIGNMENT == 0
    if as_it_is and table.shape == (rows, columns):
        return to_numpy(table)
    return _read_table(SharedTable.of(table, "block_table"), rows, columns)


def score_by_index(function: Any, score_mod: Any, batch: PagedBatch, cache: KVCache) -> Any:
    """`physical_score_mod` under `paged_attention`, after another function of scores if there is one."""
    arrays = (batch.block_table, batch.seq_lens, batch.query_start_loc)
    by_index = ByPhysicalIndex(OneBatch(function), *arrays, cache.block_size)
    return by_index if score_mod is None else compose_scores(by_index, score_mod)


def _for_jax(options: Options, num_reqs: int) -> dict[str, Any]:
    """Keyword arguments of `paged_attention` for a batch padded to `num_reqs`."""
    slopes, sinks = (None if x is None else to_numpy(x.detach()) for x in (options.alibi_slopes, options.sinks))
    if slopes is not None and slopes.ndim == 2:
        slopes = _extended(slopes, num_reqs, 0)
    return arguments_of(options, slopes, sinks)


def arguments_of(options: Options, slopes: Any, sinks: Any) -> dict[str, Any]:
    """Keyword arguments of `paged_attention`, but for `physical_score_mod`, with these for slopes and sinks."""
    names = [field.name for field in dataclasses.fields(options) if field.name != "physical_score_mod"]
    arguments = {name: getattr(options, name) for name in names} | {"alibi_slopes": slopes, "sinks": sinks}
    if slopes is not None and not options.causal:
        bias = _DistanceBias(slopes)
        score_mod = bias if options.score_mod is None else compose_scores(options.score_mod, bias)
        arguments |= {"alibi_slopes": None, "score_mod": score_mod}
    return arguments


def _padded(x: torch.Tensor, size: int) -> np.ndarray:
    """Rows [n, ...] as a NumPy array [size, ...]: the tensor's memory where that fits, else a copy, and zeros."""
    x = x.detach()
    if x.shape[0] == size and x.is_contiguous():
        return to_numpy(x)
    padded = torch.empty(size, *x.shape[1:], dtype=x.dtype, device="cpu")
    padded[: x.shape[0]] = x
    padded[x.shape[0] :] = 0
    return to_numpy(padded)


def _extended(x: np.ndarray, size: int, fill: Any) -> np.ndarray:
    """A copy of rows [n, ...] with rows of `fill` after them, up to `size`."""
    extended = np.full((size, *x.shape[1:]), fill, x.dtype)
    extended[: len(x)] = x
    return extended


def _results(out: Any, lse: Any, num_tokens: int) -> State:
    # PyTorch may free or rewrite what the computation reads once this returns: it must have finished.
    jax.block_until_ready((out, lse))
    return to_torch(out)[:num_tokens], None if lse is None else to_torch(lse)[:, :num_tokens].contiguous()


def fine(size: int) -> int:
    """What a number of tokens is padded to."""
    return next_bucket(max(size, _LEAST))


def coarse(size: int) -> int:
    """What a number of requests or table columns is padded to, a power of four: unused ones cost next to nothing."""
    bits = max(size - 1, _LEAST - 1).bit_length()
    return 1 << (bits + bits % 2)


def _query_len_class(starts: np.ndarray) -> int | None:
    """The longest query of the tile shapes that the requests need; None when they need all."""
    longest = int(np.diff(starts).max(initial=1))
    return next((bound for bound in _QUERY_LENS if longest <= bound), None)
