"""reshape_and_cache_flash on a GPU: scales as the operator takes them."""

from typing import Any

import torch

from jaxpaged.backends.gpu_scales import scale_on_gpu
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
        scales = [scale_on_gpu(name, x, key_cache) for name, x in named]
    direct.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, *scales)
