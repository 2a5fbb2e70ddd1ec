"""The cache of vLLM's CPU backend, whose blocks are flat: [2, num_blocks, block_size * num_kv_heads * head_size]."""

from typing import Any

import torch

from jaxpaged.metadata.checks import check_positive

_HEAD_SIZES = [*range(8, 257, 8), 512]


class FlatCache:
    """How such a cache is made, and how it is seen: a block is [block_size, num_kv_heads, head_size]."""

    @staticmethod
    def validate_head_size(head_size: int) -> tuple[bool, list[int]]:
        """Whether there are such caches for heads of this size, and all sizes for which there are."""
        return head_size in _HEAD_SIZES, list(_HEAD_SIZES)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *args: Any
    ) -> tuple[int, ...]:
        for name, value in (("block_size", block_size), ("num_kv_heads", num_kv_heads), ("head_size", head_size)):
            check_positive(name, value)
        return 2, num_blocks, block_size * num_kv_heads * head_size

    @staticmethod
    def split_kv_cache(
        kv_cache: torch.Tensor, num_kv_heads: int, head_size: int, *args: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values, views [num_blocks, block_size, num_kv_heads, head_size].

        Raises:
          ValueError: the cache has another shape.
        """
        row = num_kv_heads * head_size
        if kv_cache.ndim != 3 or kv_cache.shape[0] != 2 or kv_cache.shape[2] % row:
            raise ValueError(
                f"kv_cache: expected shape [2, num_blocks, block_size * {num_kv_heads} * {head_size}], "
                f"got {list(kv_cache.shape)}"
            )
        key_cache, value_cache = kv_cache.unflatten(2, (-1, num_kv_heads, head_size)).unbind(0)
        return key_cache, value_cache
