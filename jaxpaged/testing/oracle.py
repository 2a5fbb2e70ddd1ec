"""The oracle: attention and cache operations in float64 NumPy, written as plainly as possible.

It shares no code with the rest of the package. Loops over requests and heads, whole score matrices, nothing clever:
slow, and easy to believe.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_NUMPY_DTYPES = {"int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def gather(
    key_cache: Array, value_cache: Array, block_table: Array, seq_lens: Array
) -> tuple[list[Array], list[Array], list[Array]]:
    """Each request's keys, values and readable positions from a logical cache.

    Args:
      key_cache: [num_blocks, block_size, num_kv_heads, head_size]; value_cache likewise.
      block_table: [num_reqs, max_blocks_per_req].
      seq_lens: [num_reqs], clamped to the table's width.

    Returns:
      For each request keys [seq_len, num_kv_heads, head_size], values, and valid [seq_len] bool, false where the block
      is out of range (keys and values are 0 there).
    """
    num_blocks, block_size = key_cache.shape[:2]
    keys, values, valid = [], [], []
    for row, seq_len in zip(block_table, seq_lens, strict=True):
        length = min(int(seq_len), len(row) * block_size)
        k = np.zeros((length, *key_cache.shape[2:]))
        v = np.zeros((length, *value_cache.shape[2:]))
        ok = np.zeros(length, bool)
        for position in range(length):
            block = row[position // block_size]
            if 0 <= block < num_blocks:
                k[position] = key_cache[block, position % block_size]
                v[position] = value_cache[block, position % block_size]
                ok[position] = True
        keys.append(k)
        values.append(v)
        valid.append(ok)
    return keys, values, valid


def attention(
    query: Array,
    keys: list[Array],
    values: list[Array],
    query_lens: Array,
    *,
    valid: list[Array] | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
) -> tuple[Array, Array]:
    """Attention of packed queries, request by request, head by head; `jaxpaged.paged_attention` explains the arguments.

    Args:
      query: [num_tokens, num_heads, head_size].
      keys, values, valid: of each request, as `gather` returns them.

    Returns:
      The output [num_tokens, num_heads, v_head_size] and the lse [num_heads, num_tokens], float64.
    """
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, v_head_size = values[0].shape[1:] if values else (1, head_size)
    out = np.zeros((num_tokens, num_heads, v_head_size))
    lse = np.full((num_heads, num_tokens), -np.inf)
    scale = head_size**-0.5 if scale is None else scale
    first = 0
    for b, query_len in enumerate(int(n) for n in query_lens):
        kv_len = len(keys[b])
        q_pos = np.int32(kv_len - query_len) + np.arange(query_len, dtype=np.int32)[:, None]
        kv_pos = np.arange(kv_len, dtype=np.int32)[None, :]
        for h in range(num_heads):
            q = query[first : first + query_len, h].astype(np.float64)
            scores = scale * (q @ keys[b][:, h // (num_heads // num_kv_heads)].T)
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if score_mod is not None:
                scores = np.asarray(score_mod(scores, np.int32(b), np.int32(h), q_pos, kv_pos), np.float64)
            if alibi_slopes is not None:
                slope = np.float64(alibi_slopes[h] if alibi_slopes.ndim == 1 else alibi_slopes[b, h])
                scores = scores + slope * (kv_pos - q_pos)
            kept = np.ones((query_len, kv_len), bool) if valid is None else np.tile(valid[b], (query_len, 1))
            kept &= scores != -np.inf  # a score_mod may mask, too
            if causal:
                kept &= kv_pos <= q_pos
            left, right = window if window is not None else (None, None)
            if left is not None:
                kept &= kv_pos >= q_pos.astype(np.int64) - left
            if right is not None:
                kept &= kv_pos <= q_pos.astype(np.int64) + right
            if mask_mod is not None:
                kept &= np.asarray(mask_mod(np.int32(b), np.int32(h), q_pos, kv_pos))
            v = values[b][:, h // (num_heads // num_kv_heads)]
            for i in np.flatnonzero(kept.any(1)):
                row = scores[i, kept[i]]
                weights = np.exp(row - row.max())
                lse[h, first + i] = row.max() + np.log(weights.sum())
                own = lse[h, first + i]
                share = 1.0 if sinks is None else np.exp(own - np.logaddexp(own, np.float64(sinks[h])))
                out[first + i, h] = share * (weights / weights.sum()) @ v[kept[i]]
        first += query_len
    return out, lse


def merge_states(outputs: Array, lses: Array) -> tuple[Array, Array]:
    """Merge states [num_states, num_tokens, num_heads, v_head_size] with lses [num_states, num_heads, num_tokens]."""
    _, num_tokens, num_heads, v_head_size = outputs.shape
    out, lse = np.zeros((num_tokens, num_heads, v_head_size)), np.full((num_heads, num_tokens), -np.inf)
    for token in range(num_tokens):
        for head in range(num_heads):
            present = [s for s in range(len(outputs)) if np.isfinite(lses[s, head, token])]
            if present:
                row = lses[present, head, token].astype(np.float64)
                weights = np.exp(row - row.max())
                lse[head, token] = row.max() + np.log(weights.sum())
                states = outputs[present, token, head].astype(np.float64)
                out[token, head] = (weights / weights.sum()) @ states
    return out, lse


def quantize(x: Array, dtype: str, scale: Any) -> Array:
    """`x / scale` in int8, float8_e4m3fn or float8_e5m2: to nearest, ties to even, saturated; NaN is 0 in int8."""
    limit = _LARGEST[dtype]
    scaled = np.asarray(x, np.float32) / np.asarray(scale, np.float32)
    if dtype == "int8":
        scaled = np.rint(np.where(np.isnan(scaled), 0, scaled))
    return np.clip(scaled, -limit, limit).astype(_NUMPY_DTYPES[dtype])


def row_scales(x: Array, dtype: str) -> Array:
    """The scale of each row [.., head_size]: its largest magnitude over the dtype's largest number, 1 for zeros."""
    peak = np.abs(np.asarray(x, np.float32)).max(-1)
    return np.where(peak > 0, peak / np.float32(_LARGEST[dtype]), 1).astype(np.float32)


def dequantize(stored: Array, scale: Any) -> Array:
    """Stored numbers times their scale, float64."""
    return stored.astype(np.float64) * np.asarray(scale, np.float64)


def write_kv(
    cache: Array, scale: Array | None, rows: Array, slot_mapping: Array, dtype: str
) -> tuple[Array, Array | None]:
    """New tokens put into the keys or the values of a cache, token by token.

    Args:
      cache: [num_blocks, block_size, num_kv_heads, head_size], in its stored dtype.
      scale: of an 8-bit cache: [], [num_kv_heads], or [num_blocks, block_size, num_kv_heads], then renewed; None for 1.
      rows: [num_tokens, num_kv_heads, head_size].
      slot_mapping: [num_slots]; slots out of range are skipped.
      dtype: name of the stored dtype.

    Returns:
      Copies of the cache and of the scale, written.
    """
    cache, scale = cache.copy(), None if scale is None else np.array(scale)
    num_blocks, block_size = cache.shape[:2]
    for row, slot in zip(rows, slot_mapping, strict=False):
        if not 0 <= slot < num_blocks * block_size:
            continue
        block, offset = divmod(int(slot), block_size)
        if dtype not in _LARGEST:
            cache[block, offset] = row.astype(cache.dtype)
            continue
        own = np.array(1, np.float32) if scale is None else scale
        if scale is not None and scale.ndim == 3:
            own = scale[block, offset] = row_scales(row, dtype)
        cache[block, offset] = quantize(row, dtype, own if own.ndim == 0 else own[:, None])
    return cache, scale


def swap_blocks(src: Array, dst: Array, src_to_dst: Any) -> Array:
    """A copy of `dst` [num_blocks, ...] with blocks of `src` in it; pairs with a block out of range are skipped."""
    result = dst.copy()
    for source, target in src_to_dst:
        if 0 <= source < len(src) and 0 <= target < len(dst):
            result[target] = src[source]
    return result


def copy_blocks(cache: Array, src_to_dst: Any) -> Array:
    """A copy of `cache` [num_blocks, ...] with blocks copied within it, all read before any is written."""
    return swap_blocks(cache, cache, src_to_dst)
