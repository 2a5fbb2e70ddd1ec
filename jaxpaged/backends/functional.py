"""The functions that PyTorch engines call, under the field's names and with its signatures.

They run on tensors of the CPU, by JAX's reference, and of a Hopper GPU, by the kernels: on the current stream, without
waiting for the device, and so that CUDA graphs capture them. What these don't take goes by JAX, with a warning, and
raises in a capture.
"""

from jaxpaged.backends.cache_functions import copy_blocks, reshape_and_cache, reshape_and_cache_flash, swap_blocks
from jaxpaged.backends.gpu_plan import AttentionPlan, plan_attention
from jaxpaged.backends.kvcache import flash_attn_with_kvcache
from jaxpaged.backends.merge import merge_attn_states
from jaxpaged.backends.varlen import flash_attn_varlen_func

__all__ = [
    "AttentionPlan",
    "copy_blocks",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_attn_states",
    "plan_attention",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
]
