"""How cache tensors lie in memory, read from their strides: nothing here touches their contents."""

import math
from typing import TYPE_CHECKING, Any

from jaxpaged.metadata.layout import KVLayout

if TYPE_CHECKING:
    import torch

Axes = tuple[str, ...]


def compact_order(tensor: Any) -> tuple[int, ...]:
    """The permutation that puts the tensor's axes in the order in which they lie in memory, outermost first."""
    return _outermost_first(_effective_strides(tensor))


def axes_in_memory(tensor: "torch.Tensor", axes: Axes) -> "tuple[torch.Tensor, Axes]":
    """A cache tensor with its axes in the order in which they lie in memory, and the axes' names in that order."""
    order = _outermost_first(_cache_strides(tensor, axes))
    return tensor.permute(order), tuple(axes[i] for i in order)


def one_buffer(
    key: "torch.Tensor", value: "torch.Tensor", key_axes: Axes, value_axes: Axes
) -> "tuple[torch.Tensor, Axes] | None":
    """The compact tensor that holds keys and values side by side, with its axes; None when there is no such tensor."""
    distance = int(value.storage_offset() - key.storage_offset())
    same_memory = key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    if not same_memory or distance <= 0 or key_axes != value_axes or "x" in key_axes:
        return None
    sizes, value_sizes = (dict(zip(key_axes, t.shape, strict=True)) for t in (key, value))
    strides, value_strides = (dict(zip(key_axes, _cache_strides(t, key_axes), strict=True)) for t in (key, value))
    if any(strides[axis] != value_strides[axis] for axis in key_axes if sizes[axis] > 1):
        return None
    if strides["d"] == 1 and distance == sizes["d"]:  # a row holds a key and then its value
        sizes["(2d)"], strides["(2d)"] = sizes.pop("d") + value_sizes["d"], strides.pop("d")
    elif sizes["d"] == value_sizes["d"]:
        sizes["2"], strides["2"] = 2, distance
    else:
        return None
    axes = tuple(sorted(sizes, key=lambda axis: (-strides[axis], axis != "2")))
    shape = [sizes[axis] for axis in axes]
    compact = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(sizes[axis] > 1 and strides[axis] != want for axis, want in zip(axes, compact, strict=True)):
        return None
    return key.as_strided(shape, compact, key.storage_offset()), axes


def memory_layout(key_axes: Axes, value_axes: Axes | None) -> KVLayout:
    """The layout of buffers with these axes; ValueError where blocks lie too far inside for a layout."""
    key, value = " ".join(key_axes), None if value_axes is None else " ".join(value_axes)
    try:
        return KVLayout(key, value)
    except ValueError as error:
        memory = key if value is None else f"{key} and {value}"
        raise ValueError(
            f"key_cache: its axes lie in memory in the order {memory}, but n, the blocks, must be outermost, or "
            f"next to an outermost axis 2 of keys and values"
        ) from error


def _outermost_first(strides: list[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=lambda i: (-strides[i], i)))


def _cache_strides(tensor: Any, axes: Axes) -> list[int]:
    """Strides to order a cache's axes by. A single block may be thought to lie anywhere, so it goes outermost."""
    strides = _effective_strides(tensor)
    block = axes.index("n")
    if tensor.shape[block] == 1:
        strides[block] = max(strides) * max(2, *tensor.shape)
    return strides


def _effective_strides(tensor: Any) -> list[int]:
    """The tensor's strides, with those of axes of size 1, which may be anything, as if they were compact."""
    strides = list(tensor.stride())
    for i in reversed(range(tensor.ndim)):
        if tensor.shape[i] == 1:
            strides[i] = strides[i + 1] * max(1, tensor.shape[i + 1]) if i + 1 < tensor.ndim else 1
    return strides
