"""Writes to, copies within and reads from a paged KV cache."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.metadata.layout import Which
from jaxpaged.metadata.slots import last_writes, request_ids
from jaxpaged.reference.quantize import quantize, row_scale
from jaxpaged.reference.rows import cast_bits, dequantize, to_buffer_axes


def write_kv(cache: KVCache, key: Any, value: Any, slot_mapping: Any) -> KVCache:
    """`jaxpaged.write_kv` on checked arguments."""
    num_tokens = min(key.shape[0], slot_mapping.shape[0])
    slots = last_writes(slot_mapping[:num_tokens], cache.num_slots)
    written = slots >= 0
    # A block past the end is dropped. No two indices are the same, those dropped included, and so XLA may be told: on a
    # GPU it then writes without atomics.
    blocks = jnp.where(written, slots // cache.block_size, cache.num_blocks)
    offsets = jnp.where(written, slots % cache.block_size, jnp.arange(num_tokens, dtype=jnp.int32))
    rows: tuple[tuple[Which, Any], ...] = (("key", key[:num_tokens]), ("value", value[:num_tokens]))
    for which, x in rows:
        stored, new_scale = _stored(cache, which, x)
        index = cache.layout.index(which, cache.dims, blocks, offsets)
        buffer = cache.buffer(which)
        stored = to_buffer_axes(cast_bits(stored, buffer.dtype), cache, which)
        cache = _with_buffer(cache, which, buffer.at[index].set(stored, mode="drop", unique_indices=True))
        if new_scale is not None:
            scale = cache.scale(which).at[blocks, offsets].set(new_scale, mode="drop", unique_indices=True)
            cache = dataclasses.replace(cache, **{f"{which[0]}_scale": scale})
    return cache


def _stored(cache: KVCache, which: Which, x: Any) -> tuple[Any, Any]:
    """Rows [n, num_kv_heads, head_size] as the cache stores them, and their scales where each row has its own."""
    if not cache.quantized:
        return x.astype(cache.dtype), None
    scale = cache.scale(which)
    if scale is None:
        return quantize(x, cache.dtype, 1.0), None
    if scale.ndim == 3:
        new_scale = row_scale(x, cache.dtype)
        return quantize(x, cache.dtype, new_scale[..., None]), new_scale
    return quantize(x, cache.dtype, scale if scale.ndim == 0 else scale[:, None]), None


def _with_buffer(cache: KVCache, which: Which, buffer: Any) -> KVCache:
    name = "key" if which == "key" or cache.value is None else "value"
    return dataclasses.replace(cache, **{name: buffer})


def copy_blocks(source: KVCache, target: KVCache, src_to_dst: Any) -> KVCache:
    """`target` with its blocks `src_to_dst[:, 1]` set to the blocks `src_to_dst[:, 0]` of `source`, scales included.

    All blocks are read before any is written. Pairs with an index out of range are skipped; of pairs with the same
    target the last one counts.
    """
    src, dst = src_to_dst[:, 0], src_to_dst[:, 1]
    in_source = (src >= 0) & (src < source.num_blocks)
    dst = last_writes(jnp.where(in_source, dst, -1), target.num_blocks)
    src = jnp.where(dst >= 0, src, 0)
    dst = jnp.where(dst >= 0, dst, target.num_blocks)

    def moved(old: Any, new: Any, axis: int) -> Any:
        lead = (slice(None),) * axis
        return new.at[(*lead, dst)].set(old[(*lead, src)], mode="drop")

    axis = source.layout.axes("key").index("n")
    new_key = moved(source.key, target.key, axis)
    new_value = target.value
    if target.value is not None:
        new_value = moved(source.value, target.value, source.layout.axes("value").index("n"))
    scales = [
        moved(old, new, 0) if new is not None and new.ndim == 3 else new
        for old, new in ((source.k_scale, target.k_scale), (source.v_scale, target.v_scale))
    ]
    return dataclasses.replace(target, key=new_key, value=new_value, k_scale=scales[0], v_scale=scales[1])


def token_places(cache: KVCache, block_table: Any, seq_lens: Any, total_tokens: int) -> tuple[Any, Any, Any]:
    """Block, offset in it and whether there is one, of each token of requests that are packed one after the other.

    Returns:
      [total_tokens] int32, int32, bool. Block is 0 for tokens of no request or of a block out of range.
    """
    num_reqs, width = block_table.shape
    lens = jnp.minimum(seq_lens, width * cache.block_size)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)])
    request = request_ids(starts, total_tokens)
    row = jnp.minimum(request, num_reqs - 1)
    position = jnp.arange(total_tokens, dtype=jnp.int32) - starts[row]
    block = block_table[row, jnp.clip(position // cache.block_size, 0, width - 1)]
    valid = (request < num_reqs) & (block >= 0) & (block < cache.num_blocks)
    return jnp.where(valid, block, 0), position % cache.block_size, valid


def gather_kv(cache: KVCache, block_table: Any, seq_lens: Any, total_tokens: int, dtype: Any) -> tuple[Any, Any]:
    """`jaxpaged.gather_kv` on checked arguments: rows of no request or of a block out of range are 0."""
    block, offset, valid = token_places(cache, block_table, seq_lens, total_tokens)

    def rows(which: Which) -> Any:
        selected = cache.buffer(which)[cache.layout.index(which, cache.dims, block, offset)]
        axes = ("n", *cache.layout.rest(which, "ns"))
        order = ["h", "n", "d"] + (["x"] if "x" in axes else [])
        by_head = selected.transpose([axes.index(a) for a in order]).reshape(cache.num_kv_heads, total_tokens, -1)
        scale = cache.scale(which)
        token_scale = scale[block, offset].T if scale is not None and scale.ndim == 3 else None
        values = dequantize(by_head, cache, which, token_scale).swapaxes(0, 1)
        return jnp.where(valid[:, None, None], values, 0.0).astype(dtype)

    return rows("key"), rows("value")
