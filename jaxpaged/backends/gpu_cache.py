"""reshape_and_cache_flash on a GPU: scales as the operator takes them."""

import functools
from typing import Any

import torch

from jaxpaged.backends.checks import on_gpu
from jaxpaged.bridge import direct

Scale = float | torch.Tensor


def write_on_gpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """See `cache_functions.reshape_and_cache_flash`."""
    scales: list[Any] = [None, None]
    if kv_cache_dtype != "auto":
        named = (("k_scale", k_scale), ("v_scale", v_scale))
        scales = [_on_device(name, x, key_cache) for name, x in named]
    direct.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, *scales)


def _on_device(name: str, scale: Scale, cache: torch.Tensor) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        on_gpu(key_cache=cache, **{name: scale})
        return scale
    if cache.is_cuda and torch.cuda.is_current_stream_capturing():
        return _number(scale, cache.device)
    return _remembered(float(scale), cache.device)


@functools.lru_cache(maxsize=1024)
def _remembered(scale: float, device: torch.device) -> torch.Tensor:
    return _number(scale, device)


def _number(scale: float, device: torch.device) -> torch.Tensor:
    return torch.full((1,), scale, dtype=torch.float32, device=device)
