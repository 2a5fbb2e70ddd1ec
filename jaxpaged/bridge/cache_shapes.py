"""What kernels are compiled for, read off an engine's cache tensors: a KVCache of shapes, and where its buffers lie."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from jaxpaged.bridge.launch import ALIGNMENT
from jaxpaged.bridge.strides import Axes, axes_in_memory, memory_layout, one_buffer
from jaxpaged.bridge.torch_cache import stored_dtype
from jaxpaged.metadata.checks import shape_text
from jaxpaged.metadata.kv_cache import FLOAT8_DTYPES, KVCache
from jaxpaged.metadata.layout import KVLayout


class CacheShapes(NamedTuple):
    """A cache as kernels see it.

    Attributes:
      cache: with shapes instead of arrays.
      distance: where keys and values lie in one buffer, from the first key on, how many bytes behind it the first value
        must lie; None where they have a buffer each.
    """

    cache: KVCache
    distance: int | None


def array_shape(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    """A tensor's shape and dtype as JAX's."""
    return jax.ShapeDtypeStruct(tuple(map(int, tensor.shape)), str(tensor.dtype).removeprefix("torch."))


def cache_shapes(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    dtype: Any = None,
) -> CacheShapes:
    """The caches [num_blocks, block_size, num_kv_heads, head_size] of an engine, of any strides that a layout has.

    Args:
      k_scale, v_scale: compact float32 tensors of one element, [num_kv_heads] or [num_blocks, block_size,
        num_kv_heads].
      dtype: float8_e4m3fn or float8_e5m2 for tensors of uint8 that hold such numbers.

    Raises:
      TypeError, ValueError: the tensors don't fit each other, or are strided as no layout is.
    """
    check_one_device(key_cache, value_cache=value_cache, k_scale=k_scale, v_scale=v_scale)
    axes = KVLayout.of("NHD").axes("key")
    dims = KVLayout.of("NHD").dims(array_shape(key_cache).shape, array_shape(value_cache).shape)
    if key_cache.dtype != value_cache.dtype:
        raise TypeError(f"value_cache: expected {key_cache.dtype}, the dtype of key_cache, got {value_cache.dtype}")
    (key, key_axes), (value, value_axes) = (axes_in_memory(x, axes) for x in (key_cache, value_cache))
    distance = None
    buffers: tuple[torch.Tensor, ...] = (key, value)
    layout_axes: tuple[Axes, Axes | None] = (key_axes, value_axes)
    if not (key.is_contiguous() and value.is_contiguous()):
        whole = one_buffer(key_cache, value_cache, axes, axes)
        if whole is None:
            raise ValueError(
                f"key_cache, value_cache: expected compact tensors, in any order of axes, or views of one buffer that "
                f"hold all of it, got strides {shape_text(key_cache.stride())} and {shape_text(value_cache.stride())} "
                f"for shapes {shape_text(key_cache.shape)} and {shape_text(value_cache.shape)}"
            )
        buffers, layout_axes = whole[:1], (whole[1], None)
        distance = int(value_cache.storage_offset() - key_cache.storage_offset()) * key_cache.element_size()
    scales = [_scale_shape(name, scale) for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))]
    cache = KVCache.from_arrays(
        *(_as_kept(x) for x in buffers),
        layout=memory_layout(*layout_axes),
        k_scale=scales[0],
        v_scale=scales[1],
        head_size=dims.head_size,
        dtype=dtype if dtype is not None else _float8(key_cache),
    )
    return CacheShapes(cache, distance)


def _as_kept(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    """float8 as uint8, as in every KVCache."""
    return jax.ShapeDtypeStruct(tuple(map(int, tensor.shape)), jnp.uint8) if _float8(tensor) else array_shape(tensor)


def _float8(tensor: torch.Tensor) -> Any:
    name = str(tensor.dtype).removeprefix("torch.")
    return jnp.dtype(name) if name in [d.name for d in FLOAT8_DTYPES] else None


def _scale_shape(name: str, scale: torch.Tensor | None) -> jax.ShapeDtypeStruct | None:
    if scale is None:
        return None
    if not scale.is_contiguous():
        raise ValueError(f"{name}: expected a compact tensor, got strides {shape_text(scale.stride())}")
    if scale.numel() == 1 and scale.ndim < 3:
        scale = scale.reshape(())
    return array_shape(scale)


def check_one_device(first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors are where the first one is."""
    for name, x in others.items():
        if x is not None and x.device != first.device:
            raise ValueError(f"{name}: expected a tensor on {first.device}, as the cache is, got one on {x.device}")


def refuse_addresses(distance: int | None, **addresses: int) -> None:
    """Raise ValueError for addresses that a kernel can't begin at."""
    for name, address in addresses.items():
        if address % ALIGNMENT:
            raise ValueError(
                f"{name}: expected memory from a multiple of {ALIGNMENT} bytes on, got an address "
                f"{address % ALIGNMENT} bytes past one"
            )
    raise ValueError(
        f"value_cache: expected to begin {distance} bytes after key_cache, as views of one buffer with these strides "
        f"do, got {addresses['value_cache'] - addresses['key_cache']}"
    )


def engine_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> CacheShapes:
    """The cache that an engine describes as in `reshape_and_cache_flash`; one that is "auto" has no scales."""
    stored = stored_dtype(kv_cache_dtype)
    if stored is None:
        if key_cache.dtype.itemsize == 1:
            raise TypeError(f"kv_cache_dtype: a cache of {key_cache.dtype} is not 'auto'")
        return cache_shapes(key_cache, value_cache, None, None)
    if key_cache.dtype not in (stored, torch.uint8) or (stored == torch.int8 and key_cache.dtype != stored):
        raise TypeError(f"key_cache: expected {stored}, as kv_cache_dtype says, got {key_cache.dtype}")
    number = str(stored).removeprefix("torch.") if key_cache.dtype == torch.uint8 else None
    return cache_shapes(key_cache, value_cache, k_scale, v_scale, number)


def places_of(cache: KVCache, *, key: int = 0, value: int = 1, k_scale: int = 2, v_scale: int = 3) -> tuple[int, ...]:
    """Of a cache's arrays, leaf by leaf, the places in the addresses of a call."""
    arrays = ((cache.key, key), (cache.value, value), (cache.k_scale, k_scale), (cache.v_scale, v_scale))
    return tuple(place for x, place in arrays if x is not None)


def scale_names(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> tuple[Any, ...]:
    """All that kernels are chosen by, of a cache's scales."""
    if k_scale is v_scale is None:
        return ()
    return tuple(None if x is None else tensor_names([x]) for x in (k_scale, v_scale))


def tensor_names(tensors: Iterable[torch.Tensor]) -> tuple[Any, ...]:
    """All that kernels are chosen by, of each tensor."""
    return tuple((x.shape, x.stride(), x.dtype, x.device) for x in tensors)
