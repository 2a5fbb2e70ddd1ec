"""Scales of 8-bit caches on a GPU: from what engines pass to tensors that the operators take, without reading any."""

import functools
from typing import Any

import torch

from jaxpaged.backends.checks import on_gpu
from jaxpaged.bridge.torch_cache import QUANTIZED_DTYPES
from jaxpaged.metadata.checks import shape_text

Scales = tuple[torch.Tensor | None, torch.Tensor | None]
"""Of keys and of values; None for a cache that has none."""


def scale_on_gpu(name: str, scale: float | torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """A scale as a float32 tensor where the cache is; those of numbers are made once and remembered."""
    if isinstance(scale, torch.Tensor):
        on_gpu(key_cache=cache, **{name: scale})
        return scale
    if cache.is_cuda and torch.cuda.is_current_stream_capturing():
        return _number(scale, cache.device)
    return _remembered(float(scale), cache.device)


def descale_on_gpu(name: str, descale: Any, cache: torch.Tensor, num_reqs: int) -> torch.Tensor | None:
    """The scale of a cache [num_blocks, block_size, num_kv_heads, ..] from an engine's descale, like `cache_scale`.

    What a tensor holds isn't read. Engines give one that is 1 for caches of no 8-bit dtype, which is passed over, and
    per-tensor scales expanded to [num_reqs, num_kv_heads], which their strides tell from a scale for each request.

    Raises:
      TypeError, ValueError: it doesn't fit the cache.
      NotImplementedError: a scale for each request.
    """
    is_number = isinstance(descale, int | float)
    if cache.dtype not in QUANTIZED_DTYPES:
        if is_number and descale != 1:
            raise ValueError(f"{name}: it belongs to 8-bit caches, expected None or 1 for a cache of {cache.dtype}")
        return None
    if descale is None:
        return None
    if not isinstance(descale, torch.Tensor | int | float):
        raise TypeError(f"{name}: expected a number or a tensor, got {type(descale).__name__}")
    scale = scale_on_gpu(name, descale, cache)
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: expected torch.float32, got {scale.dtype}")
    shape, by_head = tuple(scale.shape), (cache.shape[2],)
    if shape == tuple(cache.shape[:3]):
        return scale
    if scale.numel() != 1 and shape not in (by_head, (num_reqs, *by_head)):
        expected = " or ".join(map(shape_text, ((), by_head, (num_reqs, *by_head), tuple(cache.shape[:3]))))
        raise ValueError(f"{name}: expected shape {expected}, got {shape_text(shape)}")
    if all(size == 1 or stride == 0 for size, stride in zip(shape, scale.stride(), strict=True)):
        return scale[(0,) * scale.ndim]
    if shape == by_head:
        return scale
    if scale.stride(0) != 0 and num_reqs > 1:
        raise NotImplementedError(
            f"{name}: on a GPU, a scale per request is not supported, expected one per kv head, expanded"
        )
    return scale[0]


@functools.lru_cache(maxsize=1024)
def _remembered(scale: float, device: torch.device) -> torch.Tensor:
    return _number(scale, device)


def _number(scale: float, device: torch.device) -> torch.Tensor:
    return torch.full((1,), scale, dtype=torch.float32, device=device)
