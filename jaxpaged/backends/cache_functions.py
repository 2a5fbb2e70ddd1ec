"""vLLM's cache functions for PyTorch tensors, with their signatures; all of them write in place."""

from collections.abc import Sequence
from typing import Any

import torch

from jaxpaged.backends.checks import check_tensors, on_gpu
from jaxpaged.backends.gpu_cache import write_on_gpu
from jaxpaged.bridge import torch_ops  # noqa: F401  registers the operators
from jaxpaged.bridge.torch_cache import CACHE_DTYPE_NAMES, TorchCache, stored_dtype, valid_pairs, write_kv_
from jaxpaged.metadata.checks import check_shape
from jaxpaged.metadata.layout import KVLayout

Scale = float | torch.Tensor


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """Write new tokens' keys and values to their slots of a cache, in place. Nothing is copied but the new rows.

    Args:
      key, value: [num_tokens, num_kv_heads, head_size] float32, bfloat16 or float16, of any strides; heads of `value`
        may differ in size. There may be more tokens than slots: the first ones are written.
      key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size], of any strides.
      slot_mapping: [num_slots] int32 or int64, `block * block_size + offset`. Negative slots and slots past the cache
        are skipped; of tokens with one slot the last is kept, and on a GPU any, or a mixture.
      kv_cache_dtype: "auto" for a cache of the dtype of `key`, or float32, which takes no scales; "fp8" (e4m3),
        "fp8_e4m3" or "fp8_e5m2" for a cache of that dtype or of uint8; "int8".
      k_scale, v_scale: what keys and values are divided by to be stored in 8 bits: numbers, or float32 tensors of one
        element or [num_kv_heads]; of [num_blocks, block_size, num_kv_heads] to be renewed for the tokens written.

    Raises:
      NotImplementedError: on a GPU, what the kernel doesn't take.
      TypeError, ValueError: an argument doesn't fit; nothing has been written.
    """
    tensors = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    if on_gpu(**tensors, slot_mapping=slot_mapping):
        write_on_gpu(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
        return
    _write(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, KVLayout.of("NHD"))


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """The same for the cache of vLLM's first paged attention kernels.

    Args:
      key_cache: [num_blocks, num_kv_heads, head_size / x, block_size, x].
      value_cache: [num_blocks, num_kv_heads, head_size, block_size].

    Raises:
      NotImplementedError: tensors of a GPU: no kernel takes such a cache.
      TypeError, ValueError: an argument doesn't fit; nothing has been written.
    """
    if on_gpu(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping):
        raise NotImplementedError(
            "key_cache: on a GPU, expected a cache [num_blocks, block_size, num_kv_heads, head_size] and "
            "reshape_and_cache_flash: no kernel takes heads whose elements lie apart"
        )
    _write(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, KVLayout.of("VLLM_V0"))


def copy_blocks(
    key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor], block_mapping: torch.Tensor
) -> None:
    """Copy blocks within the caches of all layers, in place.

    Args:
      key_caches, value_caches: a tensor [num_blocks, ...] for each layer, of any strides.
      block_mapping: [n, 2] int32 or int64 pairs of a source and a target block. All sources of a cache are read before
        its targets are written; pairs with a block out of range are skipped; of pairs with the same target the last
        one counts.

    Raises:
      NotImplementedError: on a GPU, blocks that are no multiple of 16 bytes.
      TypeError, ValueError: an argument doesn't fit; nothing has been written.
    """
    caches = {f"{name}[{i}]": cache for name, layers in (("key_caches", key_caches), ("value_caches", value_caches))
              for i, cache in enumerate(layers)}  # fmt: skip
    if on_gpu(block_mapping=block_mapping, **caches):
        torch.ops.jaxpaged.copy_blocks(list(key_caches), list(value_caches), block_mapping)
        return
    check_tensors(block_mapping=block_mapping, **caches)
    if len(key_caches) != len(value_caches):
        raise ValueError(f"value_caches: expected {len(key_caches)} layers, as in key_caches, got {len(value_caches)}")
    for name, cache in caches.items():
        _check_blocks(name, cache)
    pairs = {size: valid_pairs(block_mapping, size, size) for size in {cache.shape[0] for cache in caches.values()}}
    for cache in caches.values():
        _copy(cache, cache, pairs[cache.shape[0]])


def swap_blocks(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor) -> None:
    """Copy blocks of one cache into another, in place: how an engine swaps them out and in.

    Args:
      src, dst: [num_blocks, ...] of one dtype, of any strides; all but the first axis have the same sizes.
      block_mapping: [n, 2] int32 or int64 pairs of a block of `src` and one of `dst`, as in `copy_blocks`; on the CPU
        or where a cache is. One of both caches may be on a GPU and the other on the CPU: then PyTorch copies.
    """
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in (src, dst)):
        if src.device == dst.device:
            block_mapping = block_mapping.to(src.device, non_blocking=True)
        torch.ops.jaxpaged.swap_blocks(src, dst, block_mapping)
        return
    check_tensors(src=src, dst=dst, block_mapping=block_mapping)
    _check_blocks("src", src)
    check_shape("dst", dst.shape, ("num_blocks", *src.shape[1:]))
    if src.dtype != dst.dtype:
        raise TypeError(f"dst: expected {src.dtype}, the dtype of src, got {dst.dtype}")
    _copy(src, dst, valid_pairs(block_mapping, src.shape[0], dst.shape[0]))


def engine_cache(
    key_cache: Any, value_cache: Any, kv_cache_dtype: str, k_scale: Scale, v_scale: Scale, layout: KVLayout
) -> TorchCache:
    """The cache that an engine describes as `reshape_and_cache_flash` says, checked."""
    check_tensors(key_cache=key_cache, value_cache=value_cache)
    if kv_cache_dtype == "auto":
        if key_cache.dtype.itemsize == 1:
            raise TypeError(f"kv_cache_dtype: a cache of {key_cache.dtype} is not 'auto', expected {CACHE_DTYPE_NAMES}")
        return TorchCache.of(key_cache, value_cache, layout=layout)
    dtype = stored_dtype(kv_cache_dtype)
    check_tensors(**{n: s for n, s in (("k_scale", k_scale), ("v_scale", v_scale)) if isinstance(s, torch.Tensor)})
    return TorchCache.of(key_cache, value_cache, layout=layout, k_scale=k_scale, v_scale=v_scale, dtype=dtype)


def _write(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    layout: KVLayout,
) -> None:
    check_tensors(key=key, value=value, slot_mapping=slot_mapping)
    cache = engine_cache(key_cache, value_cache, kv_cache_dtype, k_scale, v_scale, layout)
    write_kv_(cache, key, value, slot_mapping)


def _check_blocks(name: str, cache: torch.Tensor) -> None:
    if cache.ndim == 0:
        raise ValueError(f"{name}: expected shape [num_blocks, ...], got []")


def _copy(src: torch.Tensor, dst: torch.Tensor, pairs: torch.Tensor) -> None:
    if src.dtype.is_floating_point and src.dtype.itemsize == 1:  # torch can't index float8
        src, dst = src.view(torch.uint8), dst.view(torch.uint8)
    with torch.no_grad():
        dst[pairs[:, 1]] = src[pairs[:, 0]]
