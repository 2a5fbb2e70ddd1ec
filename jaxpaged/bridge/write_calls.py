"""Writes of new tokens to a cache of PyTorch's on a GPU: from an engine's tensors to launches of the write kernel.

What a call needs to know is found once for tensors of such shapes, strides and dtypes, and remembered.
"""

import math
from collections.abc import Callable, Container, Iterable
from typing import Any

import jax
import torch

from jaxpaged.bridge.cache_shapes import (
    CacheShapes,
    array_shape,
    cache_shapes,
    check_one_device,
    places_of,
    refuse_addresses,
)
from jaxpaged.bridge.dlpack import refuse_grad
from jaxpaged.bridge.kernel_functions import write_rows
from jaxpaged.bridge.launch import ALIGNMENT, program
from jaxpaged.bridge.process import forget_after_fork
from jaxpaged.bridge.torch_cache import ACTIVATION_DTYPES, check_ints, stored_dtype
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.metadata.checks import check_positive, check_shape
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas import cache_write

Addresses = tuple[int, int, int, int, int, int, int]
"""Of the key cache, the value cache, both scales, key, value and slot mapping."""
_MISALIGNED = ALIGNMENT - 1
_writers: dict[Any, "_Writer"] = {}
_sizes: dict[Any, set[int]] = {}
forget_after_fork(_writers.clear)


def write_on_gpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """`reshape_and_cache_flash` for tensors of one CUDA device, on its current stream.

    Tokens that share a slot leave one of them there, or a mixture: no order is kept among CTAs.

    Raises:
      TypeError, ValueError: an argument doesn't fit; nothing has been written.
    """
    name = (
        key.shape, key.stride(), key.dtype, value.shape, value.stride(), value.dtype,
        key_cache.shape, key_cache.stride(), key_cache.dtype,
        value_cache.shape, value_cache.stride(), value_cache.dtype,
        slot_mapping.shape, slot_mapping.stride(), slot_mapping.dtype, kv_cache_dtype,
        key.get_device(), value.get_device(), key_cache.get_device(), value_cache.get_device(),
        slot_mapping.get_device(), _scale_name(k_scale), _scale_name(v_scale),
    )  # fmt: skip
    writer = _writers.get(name)
    if writer is None:
        tensors = (key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
        writer = _writers[name] = _Writer(*tensors)
    if key.requires_grad or value.requires_grad:
        _refuse_grad(key=key, value=value)
    if writer.copied:
        key, value = key.contiguous(), value.contiguous()
    k, v, k_cache, v_cache = key.data_ptr(), value.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
    if (k | v | k_cache | v_cache) & _MISALIGNED or (
        writer.distance is not None and v_cache - k_cache != writer.distance
    ):
        refuse_addresses(writer.distance, key=k, value=v, key_cache=k_cache, value_cache=v_cache)
    scales = (0 if k_scale is None else k_scale.data_ptr(), 0 if v_scale is None else v_scale.data_ptr())
    writer((k_cache, v_cache, *scales, k, v, slot_mapping.data_ptr()))


def warm_up_writes(
    num_tokens: Iterable[int],
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Compile ahead what calls of `write_on_gpu` with these numbers of tokens need, so that each is one launch.

    Args:
      num_tokens: sizes that will come again, such as those of CUDA graphs. Others are written by two launches, of
        powers of two.

    The other arguments are those of such a call, of any number of tokens. Nothing is written.
    """
    cache, _ = engine_cache(key_cache, value_cache, kv_cache_dtype, k_scale, v_scale)
    _check(cache, key, value, slot_mapping)
    sizes = _sizes.setdefault(_class_of(cache, key, slot_mapping), set())
    for size in num_tokens:
        _bound(cache, key, slot_mapping, check_positive("num_tokens", size))
        sizes.add(size)
    _writers.clear()


class _Writer:
    """What calls with tensors of certain shapes launch.

    Attributes:
      distance: see `CacheShapes`.
      copied: whether the new keys and values have gaps between tokens, which the kernel doesn't take.
    """

    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ):
        cache, self.distance = engine_cache(key_cache, value_cache, kv_cache_dtype, k_scale, v_scale)
        _check(cache, key, value, slot_mapping)
        tensors = {"key": key, "value": value, "value_cache": value_cache, "slot_mapping": slot_mapping}
        check_one_device(key_cache, **tensors, k_scale=k_scale, v_scale=v_scale)
        self.copied = not (key.is_contiguous() and value.is_contiguous())
        rows = (key, value, slot_mapping)
        num_tokens = min(key.shape[0], slot_mapping.shape[0])
        exact = _sizes.get(_class_of(cache, key, slot_mapping), ())
        self._pieces = [
            (_bound(cache, key, slot_mapping, size), tuple(first * _row_bytes(x) for x in rows))
            for first, size in pieces(num_tokens, exact)
        ]

    def __call__(self, addresses: Addresses) -> None:
        for launch, (key_step, value_step, slot_step) in self._pieces:
            if key_step:
                *caches, key, value, slots = addresses
                launch((*caches, key + key_step, value + value_step, slots + slot_step))
            else:
                launch(addresses)


def pieces(num_tokens: int, exact: Container[int] = ()) -> list[tuple[int, int]]:
    """Runs of tokens, first one and number, that programs of few sizes write: powers of two, and those in `exact`.

    Two at most. They may have tokens in common, which are then written twice alike.
    """
    if num_tokens == 0:
        return []
    size = next_bucket(num_tokens)
    if size == num_tokens or num_tokens in exact:
        return [(0, num_tokens)]
    rest = next_bucket(num_tokens - size // 2)
    return [(0, size // 2), (num_tokens - rest, rest)]


def engine_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> CacheShapes:
    """The cache that an engine describes as in `reshape_and_cache_flash`."""
    stored = stored_dtype(kv_cache_dtype)
    if stored is None:
        if key_cache.dtype.itemsize == 1:
            raise TypeError(f"kv_cache_dtype: a cache of {key_cache.dtype} is not 'auto'")
        return cache_shapes(key_cache, value_cache, None, None)
    if key_cache.dtype not in (stored, torch.uint8) or (stored == torch.int8 and key_cache.dtype != stored):
        raise TypeError(f"key_cache: expected {stored}, as kv_cache_dtype says, got {key_cache.dtype}")
    number = str(stored).removeprefix("torch.") if key_cache.dtype == torch.uint8 else None
    return cache_shapes(key_cache, value_cache, k_scale, v_scale, number)


def _check(cache: KVCache, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    if key.dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"key: expected one of {', '.join(map(str, ACTIVATION_DTYPES))}, got {key.dtype}")
    if value.dtype != key.dtype:
        raise TypeError(f"value: expected {key.dtype}, the dtype of key, got {value.dtype}")
    check_shape("key", key.shape, ("num_tokens", cache.num_kv_heads, cache.head_size))
    check_shape("value", value.shape, (key.shape[0], cache.num_kv_heads, cache.v_head_size))
    if not cache.quantized and cache.dtype.name not in (array_shape(key).dtype.name, "float32"):
        raise TypeError(f"key: a cache of {cache.dtype.name} takes keys and values of its own dtype, got {key.dtype}")
    check_ints("slot_mapping", slot_mapping)
    check_shape("slot_mapping", slot_mapping.shape, ("num_slots",))
    if not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping: expected slots side by side, got a stride of {slot_mapping.stride(0)}")
    reason = cache_write.refusal(cache, array_shape(key).dtype)
    if reason is not None:
        raise NotImplementedError(reason)


def _bound(
    cache: KVCache, key: torch.Tensor, slot_mapping: torch.Tensor, size: int
) -> Callable[[tuple[int, ...]], None]:
    rows = [jax.ShapeDtypeStruct((size, cache.num_kv_heads, n), array_shape(key).dtype) for n in head_sizes(cache)]
    slots = jax.ShapeDtypeStruct((size,) if slot_mapping.dtype == torch.int32 else (size, 2), "int32")
    made = program(write_rows, cache, *rows, slots, device=key.get_device())
    return made.bind(*places_of(cache), 4, 5, 6)


def head_sizes(cache: KVCache) -> tuple[int, int]:
    return cache.head_size, cache.v_head_size


def _class_of(cache: KVCache, key: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
    return cache, key.dtype, slot_mapping.dtype, key.get_device()


def _row_bytes(x: torch.Tensor) -> int:
    """Of a row of a compact tensor."""
    return x.element_size() * math.prod(x.shape[1:])


def _scale_name(scale: torch.Tensor | None) -> Any:
    return None if scale is None else (scale.shape, scale.stride(), scale.dtype, scale.get_device())


def _refuse_grad(**tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        refuse_grad(x, name)
