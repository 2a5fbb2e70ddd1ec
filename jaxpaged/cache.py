"""The KV cache and what is done to it: check the arguments, pick an implementation, call it.

Where a cache's kv heads are sharded over a mesh, each device works on its own heads, and nothing is communicated; keys
and values, given or returned, are sharded likewise. See `jaxpaged.sharding` for blocks over devices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpaged.attention import QUERY_DTYPES, check_array_like
from jaxpaged.implementations import choose, static_options
from jaxpaged.metadata.checks import as_int32_indices, check_dtype, check_shape, is_concrete
from jaxpaged.metadata.head_sharding import HeadSharding, head_sharding, local
from jaxpaged.metadata.kv_cache import CACHE_DTYPES, KVCache, scale_ranks
from jaxpaged.metadata.layout import KVLayout
from jaxpaged.operation import operation, refuse_vmap
from jaxpaged.reference import cache_ops

__all__ = ["KVCache", "KVLayout", "copy_blocks", "gather_kv", "swap_blocks", "write_kv"]


def write_kv(cache: KVCache, key: Any, value: Any, slot_mapping: Any, *, implementation: str | None = None) -> KVCache:
    """The cache with new tokens' keys and values in their slots.

    Pure; in place when the cache is donated to the jitted function that calls it, or carried through `lax.scan` or
    `lax.while_loop`. 8-bit caches are quantised: `x / scale`, to nearest even, saturated; scales per token and head are
    renewed from the rows written.

    Args:
      cache: written in its own dtype: that of `key`, float32, or an 8-bit one.
      key: [num_tokens, num_kv_heads, head_size] float32, bfloat16 or float16.
      value: [num_tokens, num_kv_heads, v_head_size], the dtype of `key`.
      slot_mapping: [num_slots] int32 or int64, `block * block_size + offset` for each token. Negative slots and slots
        past the cache are skipped. It may be longer or shorter than `key`: the first min of both are written. Of
        tokens with the same slot the last is kept.
      implementation: "reference", "mosaic_gpu" (Hopper GPUs), or None for the best one.

    Raises:
      TypeError, ValueError: an argument doesn't fit; the message names it.
    """
    _check_cache("cache", cache)
    for name, x, head_size in (("key", key, cache.head_size), ("value", value, cache.v_head_size)):
        check_array_like(name, x)
        check_dtype(name, x.dtype, QUERY_DTYPES)
        check_shape(name, x.shape, ("num_tokens", cache.num_kv_heads, head_size))
    check_dtype("value", value.dtype, [key.dtype])
    check_shape("value", value.shape, (key.shape[0], cache.num_kv_heads, cache.v_head_size))
    if not cache.quantized and cache.dtype not in (key.dtype, jnp.float32):
        raise TypeError(
            f"key: a cache of {cache.dtype.name} takes {cache.dtype.name} keys and values, "
            f"got {jnp.dtype(key.dtype).name}"
        )
    check_array_like("slot_mapping", slot_mapping)
    check_dtype("slot_mapping", slot_mapping.dtype, [jnp.int32, jnp.int64])
    check_shape("slot_mapping", slot_mapping.shape, ("num_slots",))

    def refusal() -> str | None:
        from jaxpaged.pallas import cache_write

        return cache_write.refusal(_own_part(cache, heads), key.dtype)

    heads = head_sharding(cache)
    choice = choose(implementation, (cache, key, value, slot_mapping), refusal)
    return _write_kv(cache, key, value, _kept_in_range(slot_mapping), heads=heads, **static_options(choice))


def copy_blocks(cache: KVCache, src_to_dst: Any, *, implementation: str | None = None) -> KVCache:
    """The cache with blocks copied within it, their scales included.

    Args:
      src_to_dst: [n, 2] int32 or int64 pairs of a source and a target block. All sources are read before any target is
        written. Pairs with a block out of range are skipped; of pairs with the same target the last one counts. In
        NumPy or a list it needs less work and memory on a GPU.
      implementation: "reference", "mosaic_gpu" (Hopper GPUs), or None for the best one.
    """
    _check_cache("cache", cache)
    pairs = _checked_pairs(src_to_dst)
    choice = choose(implementation, (cache, pairs), lambda: _copy_refusal(cache))
    return _copied(None, cache, pairs, choice)


def swap_blocks(src: KVCache, dst: KVCache, src_to_dst: Any, *, implementation: str | None = None) -> KVCache:
    """`dst` with blocks of `src` copied into it: how an engine swaps blocks out to another memory and in again.

    Args:
      src, dst: caches of one layout and dtype whose blocks have the same shape; outside `jit` they may lie on different
        devices, then only the blocks in question travel.
      src_to_dst: [n, 2] int32 or int64 pairs of a block of `src` and one of `dst`, as in `copy_blocks`.
      implementation: as in `copy_blocks`.
    """
    _check_cache("src", src)
    _check_cache("dst", dst)
    for what, ours, theirs in (
        ("layout", src.layout.name, dst.layout.name),
        ("dtype", (src.dtype.name, src.key.dtype.name), (dst.dtype.name, dst.key.dtype.name)),
        ("block shape", _block_dims(src), _block_dims(dst)),
        ("scale shapes", scale_ranks(src), scale_ranks(dst)),
    ):
        if ours != theirs:
            raise ValueError(f"dst: expected the {what} of src, {ours}, got {theirs}")
    pairs = _checked_pairs(src_to_dst)
    if is_concrete(src.key) and is_concrete(dst.key) and src.key.devices() != dst.key.devices():
        pairs = np.asarray(pairs)
        pairs = pairs[(pairs[:, 0] >= 0) & (pairs[:, 0] < src.num_blocks)]  # all that are staged exist there
        num_pairs = pairs.shape[0]
        staged = jax.device_put(_empty_like(src, num_pairs), _shardings(src))
        to_staged = np.stack([pairs[:, 0], np.arange(num_pairs)], 1).astype(np.int32)
        on_source = choose(None, (src,), lambda: _copy_refusal(src))
        src = jax.device_put(_copied(src, staged, to_staged, on_source), _shardings(dst))
        pairs = np.stack([np.arange(num_pairs), pairs[:, 1]], 1).astype(np.int32)
    return _copied(src, dst, pairs, choose(implementation, (dst, pairs), lambda: _copy_refusal(dst)))


def gather_kv(
    cache: KVCache,
    block_table: Any,
    seq_lens: Any,
    *,
    total_tokens: int | None = None,
    dtype: Any = None,
    implementation: str | None = None,
) -> tuple[Any, Any]:
    """Dense keys and values of the requests, packed one after the other.

    Args:
      block_table: [num_reqs, max_blocks_per_req] int32.
      seq_lens: [num_reqs] int32; clamped to the table's width.
      total_tokens: length of the result, the sum of `seq_lens` when None; needed under `jit`. Rows past the sum are 0.
      dtype: of the result; the cache's when None, float32 for an 8-bit cache, whose scales are applied.
      implementation: "reference", "mosaic_gpu" (Hopper GPUs, results in the cache's dtype), or None for the best one.

    Returns:
      Keys [total_tokens, num_kv_heads, head_size] and values [total_tokens, num_kv_heads, v_head_size]; 0 where a block
      is out of range.
    """
    _check_cache("cache", cache)
    for name, x in (("block_table", block_table), ("seq_lens", seq_lens)):
        check_array_like(name, x)
        check_dtype(name, x.dtype, [jnp.int32])
    check_shape("block_table", block_table.shape, ("num_reqs", "max_blocks_per_req"))
    check_shape("seq_lens", seq_lens.shape, (block_table.shape[0],))
    if total_tokens is None:
        if not is_concrete(seq_lens):
            raise ValueError("total_tokens: under jit the sum of seq_lens can't be read, expected an int, got None")
        total_tokens = int(np.minimum(np.asarray(seq_lens), block_table.shape[1] * cache.block_size).sum())
    if dtype is None:
        dtype = jnp.float32 if cache.quantized else cache.dtype
    check_dtype("dtype", dtype, QUERY_DTYPES)
    if total_tokens == 0 or 0 in block_table.shape:
        shapes = [(total_tokens, cache.num_kv_heads, size) for size in (cache.head_size, cache.v_head_size)]
        return jnp.zeros(shapes[0], dtype), jnp.zeros(shapes[1], dtype)
    dtype = jnp.dtype(dtype)

    def refusal() -> str | None:
        from jaxpaged.pallas import gather

        return gather.refusal(_own_part(cache, heads), dtype)

    heads = head_sharding(cache)
    choice = choose(implementation, (cache, block_table, seq_lens), refusal)
    return _gather_kv(cache, block_table, seq_lens, total_tokens, dtype, heads=heads, **static_options(choice))


@functools.partial(jax.jit, static_argnames=("heads", "implementation", "interpret"))
@operation("write_kv")
def _write_kv(
    cache: KVCache,
    key: Any,
    value: Any,
    slot_mapping: Any,
    *,
    heads: HeadSharding | None,
    implementation: str,
    interpret: Any,
) -> KVCache:
    if implementation == "reference":
        write: Callable[..., Any] = cache_ops.write_kv
    else:
        from jaxpaged.pallas import cache_write

        write = functools.partial(cache_write.write_kv, interpret=interpret)
        cache, key, value, slot_mapping = refuse_vmap("write_kv", (cache, key, value, slot_mapping))
    if heads is not None:
        specs = heads.cache(cache)
        write = heads.map(write, (specs, heads.rows, heads.rows, PartitionSpec()), specs)
    return write(cache, key, value, slot_mapping)


def _copied(src: KVCache | None, dst: KVCache, pairs: Any, choice: str) -> KVCache:
    """`dst` with blocks of `src`, or of its own when that is None."""
    heads = head_sharding(dst)
    if src is not None and head_sharding(src) != heads:
        raise ValueError(f"src: expected the sharding of dst, {heads}, got {head_sharding(src)}")
    if choice == "reference":
        return _copy_blocks(src, dst, pairs, heads=heads, **static_options(choice))
    from jaxpaged.pallas.block_pairs import block_pairs

    planned = block_pairs(pairs, (src or dst).num_blocks, dst.num_blocks, within=src is None)
    return _copy_blocks(src, dst, planned, heads=heads, **static_options(choice))


@functools.partial(jax.jit, static_argnames=("heads", "implementation", "interpret"))
@operation("copy_blocks")
def _copy_blocks(
    src: KVCache | None,
    dst: KVCache,
    pairs: Any,
    *,
    heads: HeadSharding | None,
    implementation: str,
    interpret: Any,
) -> KVCache:
    if implementation != "reference":
        src, dst, pairs = refuse_vmap("copy_blocks", (src, dst, pairs))

    def copy(src: KVCache | None, dst: KVCache, pairs: Any) -> KVCache:
        if implementation == "reference":
            return cache_ops.copy_blocks(dst if src is None else src, dst, pairs)
        from jaxpaged.pallas import block_copy

        return block_copy.copy_blocks(src, dst, pairs, interpret=interpret)

    if heads is None:
        return copy(src, dst, pairs)
    specs = None if src is None else heads.cache(src), heads.cache(dst)
    return heads.map(copy, (*specs, PartitionSpec()), specs[1])(src, dst, pairs)


def _copy_refusal(cache: KVCache) -> str | None:
    from jaxpaged.pallas import block_copy

    return block_copy.refusal(_own_part(cache, head_sharding(cache)))


@functools.partial(jax.jit, static_argnames=("total_tokens", "dtype", "heads", "implementation", "interpret"))
@operation("gather_kv")
def _gather_kv(
    cache: KVCache,
    block_table: Any,
    seq_lens: Any,
    total_tokens: int,
    dtype: Any,
    *,
    heads: HeadSharding | None,
    implementation: str,
    interpret: Any,
) -> tuple[Any, Any]:
    if implementation != "reference":
        cache, block_table, seq_lens = refuse_vmap("gather_kv", (cache, block_table, seq_lens))

    def gather(cache: KVCache, block_table: Any, seq_lens: Any) -> tuple[Any, Any]:
        if implementation == "reference":
            return cache_ops.gather_kv(cache, block_table, seq_lens, total_tokens, dtype)
        from jaxpaged.pallas import gather as kernel

        return kernel.gather_kv(cache, block_table, seq_lens, total_tokens, interpret=interpret)

    if heads is not None:
        specs = heads.cache(cache), PartitionSpec(), PartitionSpec()
        return heads.map(gather, specs, heads.rows)(cache, block_table, seq_lens)
    return gather(cache, block_table, seq_lens)


def _own_part(cache: KVCache, heads: HeadSharding | None) -> KVCache:
    """What one device has of a cache, in shapes and dtypes; the cache itself where it isn't sharded."""
    return cache if heads is None else local(cache, heads.cache(cache), heads.mesh)


def _check_cache(name: str, cache: Any) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"{name}: expected a KVCache, got {type(cache).__name__}")
    check_dtype(name, cache.dtype, CACHE_DTYPES)


def _checked_pairs(src_to_dst: Any) -> Any:
    if isinstance(src_to_dst, list | tuple):
        src_to_dst = np.asarray(src_to_dst, np.int32).reshape(-1, 2) if len(src_to_dst) == 0 else np.asarray(src_to_dst)
    check_array_like("src_to_dst", src_to_dst)
    check_dtype("src_to_dst", src_to_dst.dtype, [jnp.int32, jnp.int64])
    check_shape("src_to_dst", src_to_dst.shape, ("n", 2))
    return _kept_in_range(src_to_dst)


def _kept_in_range(x: Any) -> Any:
    """NumPy int64 indices as int32, since JAX without x64 would wrap large ones around to other indices."""
    return as_int32_indices(x) if isinstance(x, np.ndarray) else x


def _empty_like(cache: KVCache, num_blocks: int) -> KVCache:
    """A cache of zeros like `cache`, with another number of blocks."""

    def zeros(x: Any, axis: int) -> Any:
        return jnp.zeros((*x.shape[:axis], num_blocks, *x.shape[axis + 1 :]), x.dtype)

    scales = [zeros(s, 0) if s is not None and s.ndim == 3 else s for s in (cache.k_scale, cache.v_scale)]
    return dataclasses.replace(
        cache,
        key=zeros(cache.key, cache.layout.axes("key").index("n")),
        value=None if cache.value is None else zeros(cache.value, cache.layout.axes("value").index("n")),
        k_scale=scales[0],
        v_scale=scales[1],
    )


def _shardings(cache: KVCache) -> Any:
    """Where each array of a cache lies; scales that are NumPy's go where the keys are."""
    return jax.tree.map(lambda x: getattr(x, "sharding", cache.key.sharding), cache)


def _block_dims(cache: KVCache) -> tuple[int, ...]:
    return (cache.block_size, cache.num_kv_heads, cache.head_size, cache.v_head_size)
