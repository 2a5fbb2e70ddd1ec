"""Attention of packed, ragged batches of queries to paged or packed keys and values, with an online softmax.

The new tokens are cut into tiles, each of one request. A tile walks over the chunks of keys and values that it may
attend to and keeps a running maximum, sum and output, as FlashAttention does (Dao et al., 2022): memory grows with the
number of new tokens, time with the pairs of positions attended.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.metadata.manual_axes import Axes, manual_axes, varying
from jaxpaged.reference.kv_source import DenseKV, KVSource, PagedKV


@dataclasses.dataclass(frozen=True)
class TileShape:
    """How requests with up to `longest_query` new tokens are cut: so many tokens a tile, so many positions a chunk."""

    longest_query: int | None
    tile_len: int
    chunk_size: int


# With 8 kv heads of 128 a chunk of K and V in float32 is 2 MB at most, the scores of a tile of 64 are 1 MB.
TILE_SHAPES = (TileShape(1, 1, 256), TileShape(32, 16, 256), TileShape(None, 64, 128))
_FEW_ROWS = 8
"""Up to so many rows XLA on the CPU is faster with products and sums, which read keys as they lie, than with a dot."""


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What the scores go through; see `jaxpaged.paged_attention`."""

    scale: float
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    alibi_slopes: Any = None
    sinks: Any = None
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None

    @property
    def arrays(self) -> list[Any]:
        """The arrays among them, those inside functions that are pytrees included."""
        return jax.tree.leaves((self.alibi_slopes, self.sinks, self.mask_mod, self.score_mod))


def paged_attention(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    *,
    out_dtype: Any,
    batch_invariant: bool = False,
) -> tuple[Any, Any]:
    """`jaxpaged.paged_attention` on checked arguments: the output and the lse."""
    capacity = batch.max_blocks_per_req * cache.block_size
    source = PagedKV(cache, batch.block_table, batch.kv_lens(cache.block_size), fixed_chunk=batch_invariant)
    max_query_len = None if batch_invariant else batch.max_query_len
    empty = capacity == 0 or cache.num_blocks == 0
    return _attend(query, source, batch.query_start_loc, options, out_dtype, max_query_len, empty)


def ragged_attention(
    query: Any,
    key: Any,
    value: Any,
    query_start_loc: Any,
    kv_start_loc: Any,
    options: AttentionOptions,
    *,
    out_dtype: Any,
    max_query_len: int | None = None,
) -> tuple[Any, Any]:
    """The same attention to packed keys and values: request r's are rows `kv_start_loc[r]` to `kv_start_loc[r + 1]`.

    Args:
      query: [num_tokens, num_heads, head_size].
      key, value: [total_kv, num_kv_heads, head_size] and [total_kv, num_kv_heads, v_head_size].
      query_start_loc, kv_start_loc: [num_reqs + 1] int32.
      max_query_len: an upper bound of new tokens per request; it steers speed, never results.

    Returns:
      The output [num_tokens, num_heads, v_head_size] in `out_dtype` and the lse [num_heads, num_tokens] float32.
    """
    source = DenseKV(key, value, kv_start_loc)
    return _attend(query, source, query_start_loc, options, out_dtype, max_query_len, empty=key.shape[0] == 0)


def _attend(
    query: Any,
    source: KVSource,
    query_start_loc: Any,
    options: AttentionOptions,
    out_dtype: Any,
    max_query_len: int | None,
    empty: bool,
) -> tuple[Any, Any]:
    num_tokens, num_heads, _ = query.shape
    out = jnp.zeros((num_tokens, num_heads, source.v_head_size), out_dtype)
    lse = jnp.full((num_tokens, num_heads), -jnp.inf, jnp.float32)
    if empty or num_tokens == 0 or query_start_loc.shape[0] == 1:
        return out, lse.T
    axes = manual_axes((query, source.arrays, query_start_loc, options.arrays))
    out, lse = varying((out, lse), axes)
    shortest = 1
    for shape in TILE_SHAPES:
        longest = shape.longest_query
        tiles = _Tiles(query_start_loc, shape.tile_len, shortest, longest)
        step = functools.partial(_attend_tile, query, source.with_chunk_size(shape.chunk_size), options, tiles, axes)
        out, lse = lax.fori_loop(0, tiles.count, step, (out, lse))
        if longest is None or (max_query_len is not None and max_query_len <= longest):
            break
        shortest = longest + 1
    return out, lse.T


class _Tiles:
    """The tiles of `tile_len` new tokens of all requests that have `shortest` to `longest` of them."""

    def __init__(self, query_start_loc: Any, tile_len: int, shortest: int, longest: int | None):
        self.tile_len = tile_len
        self.starts = query_start_loc
        self.query_lens = query_start_loc[1:] - query_start_loc[:-1]
        chosen = self.query_lens >= shortest
        if longest is not None:
            chosen &= self.query_lens <= longest
        per_request = jnp.where(chosen, (self.query_lens + tile_len - 1) // tile_len, 0)
        self._ends = jnp.cumsum(per_request)
        self._begins = self._ends - per_request

    @property
    def count(self) -> Any:
        return self._ends[-1]

    def locate(self, tile: Any) -> tuple[Any, Any, Any]:
        """The tile's request, its first token's index within the request, and its number of tokens."""
        request = jnp.searchsorted(self._ends, tile, side="right").astype(jnp.int32)
        first = (tile - self._begins[request]) * self.tile_len
        return request, first, jnp.minimum(self.query_lens[request] - first, self.tile_len)


def _attend_tile(
    query: Any,
    source: KVSource,
    options: AttentionOptions,
    tiles: _Tiles,
    axes: Axes,
    tile: Any,
    carry: tuple[Any, Any],
) -> tuple[Any, Any]:
    """Compute one tile's rows and put them into the output and the lse."""
    out, lse = carry
    num_tokens, num_heads, head_size = query.shape
    groups = num_heads // source.num_kv_heads
    request, first, count = tiles.locate(tile)
    kv_len = source.kv_lens[request]
    token = jnp.arange(tiles.tile_len)
    row = tiles.starts[request] + first + token
    q_pos = kv_len - tiles.query_lens[request] + first + token

    q = query[jnp.minimum(row, num_tokens - 1)].astype(jnp.float32) * options.scale
    q = q.reshape(tiles.tile_len, source.num_kv_heads, groups, head_size).transpose(1, 2, 0, 3)
    low, high = attended_range(options, q_pos[0], q_pos[0] + count - 1, kv_len)
    state = _softmax_over_chunks(varying(q, axes), q_pos, source, request, options, low, high)
    o, row_lse = _finish(*state, options.sinks)

    o = o.transpose(2, 0, 1, 3).reshape(tiles.tile_len, num_heads, -1)
    row_lse = row_lse.transpose(2, 0, 1).reshape(tiles.tile_len, num_heads)
    target = jnp.where(token < count, row, num_tokens)  # rows past the tile's tokens are dropped
    return (
        out.at[target].set(o.astype(out.dtype), mode="drop"),
        lse.at[target].set(row_lse, mode="drop"),
    )


def attended_range(options: AttentionOptions, first_pos: Any, last_pos: Any, kv_len: Any) -> tuple[Any, Any]:
    """Positions [low, high) outside of which no query at `first_pos` to `last_pos` attends."""
    left, right = options.window
    low = jnp.zeros_like(kv_len) if left is None else jnp.maximum(first_pos - left, 0)
    high = kv_len
    if right is not None:
        high = jnp.minimum(high, last_pos + right + 1)
    if options.causal:
        high = jnp.minimum(high, last_pos + 1)
    return low, jnp.maximum(high, low)


def _softmax_over_chunks(
    q: Any, q_pos: Any, source: KVSource, request: Any, options: AttentionOptions, low: Any, high: Any
) -> tuple[Any, Any, Any]:
    """Running maximum and sum [num_kv_heads, groups, tile_len] and output [.., v_head_size] over [low, high)."""
    rows = q.shape[:3]
    flat = (source.num_kv_heads, rows[1] * rows[2])

    def step(chunk: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        # The barriers keep integer arithmetic out of the loops over scores and values, which would repeat it.
        kv_pos, valid = lax.optimization_barrier(source.positions(request, chunk))
        keep = lax.optimization_barrier(_kept(options, request, rows, q_pos, kv_pos, valid))

        def update() -> tuple[Any, Any, Any]:
            m, total, acc = state
            # A value that no row attends to may be anything, NaN too: 0 * NaN is NaN.
            used = jnp.any(keep, axis=tuple(range(keep.ndim - 1)))
            keys, values = source.load(request, chunk, lax.optimization_barrier(used))
            s = _scores(q.reshape(*flat, -1), keys).reshape(*rows, -1)
            s = _modified(s, options, request, q_pos, kv_pos)
            s = jnp.where(keep, s, -jnp.inf)
            m_new = jnp.maximum(m, s.max(-1))
            shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
            p = jnp.exp(s - shift[..., None])
            decay = jnp.exp(m - shift)
            pv = jnp.einsum("hmc,hcd->hmd", p.reshape(*flat, -1), values, precision=lax.Precision.HIGHEST)
            return m_new, total * decay + p.sum(-1), acc * decay[..., None] + pv.reshape(acc.shape)

        # Only a user's mask can leave a chunk empty that the range did not exclude.
        return update() if options.mask_mod is None else lax.cond(jnp.any(keep), update, lambda: state)

    start = (
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, source.v_head_size), jnp.float32),
    )
    start = varying(start, manual_axes(q))
    first, last = source.chunk_of(low), source.chunk_of(high - 1) + 1
    return lax.fori_loop(first, jnp.where(high > low, last, first), step, start)


def _scores(q: Any, keys: Any) -> Any:
    """Scores [num_kv_heads, rows, chunk_size] of q [num_kv_heads, rows, head_size]."""
    if q.shape[1] <= _FEW_ROWS:
        by_position = keys.swapaxes(0, 1)[:, :, None, :] * q
        return by_position.sum(-1).transpose(1, 2, 0)
    return jnp.einsum("hmd,hcd->hmc", q, keys, precision=lax.Precision.HIGHEST)


def _heads(rows: tuple[int, int, int]) -> Any:
    """Index of the query head of each score, [num_kv_heads, groups, 1, 1]."""
    return jnp.arange(rows[0] * rows[1], dtype=jnp.int32).reshape(rows[0], rows[1], 1, 1)


def _kept(options: AttentionOptions, request: Any, rows: Any, q_pos: Any, kv_pos: Any, valid: Any) -> Any:
    """Which scores take part; broadcasts against [num_kv_heads, groups, tile_len, chunk_size]."""
    left, right = options.window
    q_pos, kv_pos = q_pos[:, None], kv_pos[None, :]
    keep = jnp.broadcast_to(valid[None, :], (q_pos.shape[0], kv_pos.shape[1]))
    if options.causal:
        keep &= kv_pos <= q_pos
    if left is not None:
        keep &= kv_pos >= q_pos - left
    if right is not None:
        keep &= kv_pos <= q_pos + right
    if options.mask_mod is not None:
        keep = keep & options.mask_mod(request, _heads(rows), q_pos, kv_pos)
    return keep


def _modified(s: Any, options: AttentionOptions, request: Any, q_pos: Any, kv_pos: Any) -> Any:
    """Scaled scores [num_kv_heads, groups, tile_len, chunk_size] after soft cap, score_mod and ALiBi, in that order."""
    q_pos, kv_pos = q_pos[:, None], kv_pos[None, :]
    if options.soft_cap is not None:
        s = options.soft_cap * jnp.tanh(s / options.soft_cap)
    if options.score_mod is not None:
        s = options.score_mod(s, request, _heads(s.shape[:3]), q_pos, kv_pos)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes
        slopes = slopes if slopes.ndim == 1 else slopes[request]
        s = s + slopes.reshape(s.shape[0], s.shape[1], 1, 1) * (kv_pos - q_pos)
    return s.astype(jnp.float32)


def _finish(m: Any, total: Any, acc: Any, sinks: Any) -> tuple[Any, Any]:
    """Output and lse from the running maximum, sum and output; rows that attended to nothing give 0 and -inf."""
    attended = total > 0
    lse = jnp.where(attended, m + jnp.log(jnp.where(attended, total, 1.0)), -jnp.inf)
    weight = jnp.where(attended, 1.0 / jnp.where(attended, total, 1.0), 0.0)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(*total.shape[:2], 1)
        weight = jnp.where(attended, weight * jax.nn.sigmoid(lse - sinks), 0.0)
    return acc * weight[..., None], lse
