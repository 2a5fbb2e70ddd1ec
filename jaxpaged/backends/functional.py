"""The functions that PyTorch engines call, under the field's names and with its signatures.

Today they run on tensors of the CPU. Tensors of a GPU raise NotImplementedError.
"""

from jaxpaged.backends.cache_functions import copy_blocks, reshape_and_cache, reshape_and_cache_flash, swap_blocks
from jaxpaged.backends.kvcache import flash_attn_with_kvcache
from jaxpaged.backends.merge import merge_attn_states
from jaxpaged.backends.varlen import flash_attn_varlen_func

__all__ = [
    "copy_blocks",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_attn_states",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
]
