"""Paged attention for JAX on any device, and the same functions for PyTorch engines."""

from jaxpaged.attention import paged_attention
from jaxpaged.cache import KVCache, KVLayout, copy_blocks, gather_kv, swap_blocks, write_kv
from jaxpaged.merge import merge_attention_states
from jaxpaged.metadata.batch import PagedBatch, pad_tokens
from jaxpaged.metadata.block_pool import BlockPool
from jaxpaged.metadata.export import register as _register_for_export

__all__ = [
    "BlockPool",
    "KVCache",
    "KVLayout",
    "PagedBatch",
    "copy_blocks",
    "gather_kv",
    "merge_attention_states",
    "pad_tokens",
    "paged_attention",
    "swap_blocks",
    "write_kv",
]
__version__ = "0.1.0"
_register_for_export()
