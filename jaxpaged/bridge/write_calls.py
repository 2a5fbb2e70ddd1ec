"""Writes of new tokens to a cache of PyTorch's on a GPU: from an engine's tensors to launches of the write kernel.

What a call needs to know is found once for tensors of such shapes, strides and dtypes, and remembered. Most calls have
tensors like the last call's: then one comparison is all (`alike.py`).
"""

import math
from collections.abc import Callable, Container, Iterable
from typing import Any

import jax
import torch

from jaxpaged.bridge.alike import Alike, alike, never
from jaxpaged.bridge.cache_shapes import (
    array_shape,
    check_one_device,
    engine_cache,
    places_of,
    refuse_addresses,
    tensor_names,
)
from jaxpaged.bridge.dlpack import refuse_grad
from jaxpaged.bridge.kernel_functions import write_rows
from jaxpaged.bridge.launch import ALIGNMENT, Bound, Launches, moved, program
from jaxpaged.bridge.process import forget_after_fork
from jaxpaged.bridge.torch_cache import ACTIVATION_DTYPES, check_ints
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.metadata.checks import check_positive, check_shape
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas import cache_write

_MISALIGNED = ALIGNMENT - 1
_address = torch.Tensor.data_ptr
_last: dict[Any, "_Writer"] = {}
_writers: dict[Any, "_Writer"] = {}
_sizes: dict[Any, set[int]] = {}


_also_forgotten: list[Callable[[], None]] = []


def forget_with_writers(forget: Callable[[], None]) -> None:
    """Call a function whenever other launches may be better than those of earlier calls."""
    _also_forgotten.append(forget)


def forget_writers() -> None:
    _last.clear()
    _writers.clear()


forget_after_fork(forget_writers)


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

    Each slot in range may be given once: tokens that share one leave there the row of any of them, or parts of several
    rows, in every run others perhaps. (`write_kv` keeps the last one.)

    Args:
      key, value: [num_tokens, num_kv_heads, head_size] float32, bfloat16 or float16. Those with gaps between tokens are
        copied first.
      key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size], strided as any layout.
      slot_mapping: [num_slots] int32 or int64; negative slots and slots past the cache are skipped.
      kv_cache_dtype: "auto" for a cache of the dtype of `key` or float32, which has no scales: what is given is not
        read. Else the name of an 8-bit dtype.
      k_scale, v_scale: float32, of one element, [num_kv_heads], or [num_blocks, block_size, num_kv_heads], which are
        renewed.

    Raises:
      TypeError, ValueError: an argument doesn't fit; nothing has been written.
    """
    how, tensors = _asked((key, value, key_cache, value_cache, slot_mapping), kv_cache_dtype, k_scale, v_scale)
    writer = _last.get(how)
    if writer is None or not writer.alike(*tensors):
        writer = _last[how] = _writer_of(how, tensors, kv_cache_dtype, k_scale, v_scale)
    if writer.copied:
        tensors = (key.contiguous(), value.contiguous(), *tensors[2:])
    addresses = tuple(map(_address, tensors))
    k, v, k_cache, v_cache = addresses[:4]
    distance = writer.distance
    if (k | v | k_cache | v_cache) & _MISALIGNED or (distance is not None and v_cache - k_cache != distance):
        refuse_addresses(distance, key=k, value=v, key_cache=k_cache, value_cache=v_cache)
    writer.launch(addresses)


def write_launches(*arguments: Any) -> Launches | None:
    """What a call of `write_on_gpu` with these arguments launched just now; None where PyTorch copied rows first."""
    how, tensors = _asked(arguments[:5], *arguments[5:])
    writer = _writers[how, tensor_names(tensors)]
    if writer.copied:
        return None
    scales = [i for i in (6, 7) if len(tensors) > 5 and arguments[i] is not None]
    places = (0, 1, 2, 3, 4, *scales)
    kernels = [k for bound, offsets in writer.pieces for k in moved(bound.kernels, places, offsets)]
    apart = None if writer.distance is None else (2, 3, writer.distance)
    return Launches(tuple(kernels), tensors[0].get_device(), (0, 1, 2, 3), ALIGNMENT, apart)


def _asked(
    tensors: tuple[torch.Tensor, ...], kv_cache_dtype: str, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """What is asked for, besides shapes, and the tensors that it takes, with the scales that are given."""
    if kv_cache_dtype == "auto" or k_scale is v_scale is None:
        return kv_cache_dtype, tensors
    scales = tuple(x for x in (k_scale, v_scale) if x is not None)
    return (kv_cache_dtype, k_scale is None, v_scale is None), tensors + scales


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
    forget_writers()
    for forget in _also_forgotten:
        forget()


def _writer_of(
    how: Any,
    tensors: tuple[torch.Tensor, ...],
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> "_Writer":
    """What writes tensors like these, made at the first call."""
    key, value, key_cache, value_cache, slot_mapping = tensors[:5]
    refuse_grad(key, "key")
    refuse_grad(value, "value")
    name = how, tensor_names(tensors)
    writer = _writers.get(name)
    if writer is None:
        writer = _Writer(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
        _writers[name] = writer
    if not writer.alike(*tensors):
        writer.alike = alike(*tensors)
    return writer


class _Writer:
    """What calls with tensors of certain shapes launch.

    Attributes:
      alike: whether tensors are such.
      distance: see `CacheShapes`.
      copied: whether the new keys and values have gaps between tokens, which the kernel doesn't take.
      pieces: the launches for runs of tokens, and how many bytes behind each address they begin.
      launch: takes the addresses of key, value, key cache, value cache, slot mapping and scales that are given.
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
        check_one_device(key_cache, key=key, value=value, slot_mapping=slot_mapping)
        self.alike: Alike = never
        self.copied = not (key.is_contiguous() and value.is_contiguous())
        num_tokens = min(key.shape[0], slot_mapping.shape[0])
        exact = _sizes.get(_class_of(cache, key, slot_mapping), ())
        key_bytes, value_bytes, slot_bytes = (_row_bytes(x) for x in (key, value, slot_mapping))
        self.pieces: list[tuple[Bound, tuple[int, ...]]] = [
            (_bound(cache, key, slot_mapping, size), (first * key_bytes, first * value_bytes, 0, 0, first * slot_bytes))
            for first, size in pieces(num_tokens, exact)
        ]
        self.launch: Callable[[tuple[int, ...]], None] = self._launch_pieces
        if len(self.pieces) == 1:
            ((self.launch, _),) = self.pieces

    def _launch_pieces(self, addresses: tuple[int, ...]) -> None:
        rows, scales = addresses[:5], addresses[5:]
        for launch, offsets in self.pieces:
            launch((*(x + offset for x, offset in zip(rows, offsets, strict=True)), *scales))


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


def _bound(cache: KVCache, key: torch.Tensor, slot_mapping: torch.Tensor, size: int) -> Bound:
    rows = [jax.ShapeDtypeStruct((size, cache.num_kv_heads, n), array_shape(key).dtype) for n in head_sizes(cache)]
    slots = jax.ShapeDtypeStruct((size,) if slot_mapping.dtype == torch.int32 else (size, 2), "int32")
    made = program(write_rows, cache, *rows, slots, device=key.get_device())
    caches = places_of(cache, key=2, value=3, k_scale=5, v_scale=5 if cache.k_scale is None else 6)
    return made.bind(*caches, 0, 1, 4)


def head_sizes(cache: KVCache) -> tuple[int, int]:
    return cache.head_size, cache.v_head_size


def _class_of(cache: KVCache, key: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
    return cache, key.dtype, slot_mapping.dtype, key.get_device()


def _row_bytes(x: torch.Tensor) -> int:
    """Of a row of a compact tensor."""
    return x.element_size() * math.prod(x.shape[1:])
