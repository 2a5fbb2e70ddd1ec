"""KVCaches over an engine's tensors that are made once and used by every call, without keeping the tensors alive."""

import dataclasses
from typing import Any

import torch

from jaxpaged.bridge.dlpack import share_kv_cache, share_scale
from jaxpaged.bridge.imports import unowned
from jaxpaged.metadata.kv_cache import KVCache

_MAX_VIEWS = 4096
_views: dict[tuple[Any, ...], KVCache] = {}


def cache_view(key_cache: torch.Tensor, value_cache: torch.Tensor, k_scale: Any, v_scale: Any) -> KVCache:
    """`share_kv_cache` of caches [num_blocks, block_size, num_kv_heads, head_size] on the CPU, remembered.

    Importing memory takes longer than a small attention. A view that is found again is of the memory that the tensors
    passed now have. Use the result only while they live, and hand it to nobody.
    """
    name = tuple((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in (key_cache, value_cache))
    view = _views.get(name)
    if view is None:
        view = share_kv_cache(unowned(key_cache), unowned(value_cache), k_scale=k_scale, v_scale=v_scale)
        if len(_views) >= _MAX_VIEWS:
            _views.clear()
        _views[name] = dataclasses.replace(view, k_scale=None, v_scale=None)
    scales = (k_scale, v_scale)
    k_scale, v_scale = (share_scale(n, s) for n, s in zip(("k_scale", "v_scale"), scales, strict=True))
    return dataclasses.replace(view, k_scale=k_scale, v_scale=v_scale)
