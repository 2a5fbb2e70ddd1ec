"""A layer's KV cache as an engine hands it to a backend: what is written to, and what attention reads."""

from typing import Any

import torch

from jaxpaged.backends.arguments import cache_scale
from jaxpaged.backends.cache_functions import engine_cache
from jaxpaged.bridge.cache_views import cache_view
from jaxpaged.bridge.torch_cache import FLOAT8_DTYPES, TorchCache
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.metadata.layout import KVLayout

NHD = KVLayout.of("NHD")


def layer_cache(
    key_cache: torch.Tensor, value_cache: torch.Tensor, kv_cache_dtype: str, k_scale: Any, v_scale: Any
) -> TorchCache:
    """The cache of tensors [num_blocks, block_size, num_kv_heads, head_size], checked.

    Args:
      kv_cache_dtype: see `jaxpaged.backends.functional.reshape_and_cache_flash`; float8 may lie in tensors of uint8.
      k_scale, v_scale: numbers or tensors; those of a cache of "auto", which has no scales, must be 1.
    """
    cache = engine_cache(key_cache, value_cache, kv_cache_dtype, k_scale, v_scale, NHD)
    if kv_cache_dtype == "auto":
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            cache_scale(name, scale, key_cache, 0)
    return cache


def numbers(cache: TorchCache) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and the values in the dtype of their numbers."""
    assert cache.value is not None  # NHD has a tensor for each
    if cache.dtype in FLOAT8_DTYPES:
        return cache.key.view(cache.dtype), cache.value.view(cache.dtype)
    return cache.key, cache.value


def shared(cache: TorchCache) -> KVCache:
    """The cache for attention, on the same memory; use it only while the tensors live."""
    return cache_view(*numbers(cache), cache.k_scale, cache.v_scale)
