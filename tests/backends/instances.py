"""One object of each class of the backends that has attributes of its own."""

from types import SimpleNamespace

import numpy as np
import torch

from jaxpaged.backends import flash, flex, sdpa

LAYER = {
    "num_heads": 4, "head_size": 32, "scale": 0.2, "num_kv_heads": 2, "alibi_slopes": None, "sliding_window": None,
    "kv_cache_dtype": "auto",
}  # fmt: skip


def layer_scales(k=1.0, v=1.0):
    return SimpleNamespace(_k_scale=torch.tensor(k), _v_scale=torch.tensor(v))


def _sdpa():
    return {
        "TorchSDPABackendImpl": sdpa.TorchSDPABackendImpl(**LAYER),
        "TorchSDPAMetadata": sdpa.TorchSDPAMetadata(0, 0, 0, torch.zeros(0), None, 0, None, False),
    }


def input_builder(groups=(), *, chunked=True, sliding_window=None, v2=True, graph_block_tables=None):
    """What Aphrodite's builder is made with."""
    runner = SimpleNamespace(device="cpu", pin_memory=False, graph_block_tables=graph_block_tables)
    return SimpleNamespace(
        runner=runner, sliding_window=sliding_window, block_size=16, inter_data_list=list(groups),
        chunked_prefill_enabled=chunked, scheduler_config=SimpleNamespace(use_v2_block_manager=v2),
    )  # fmt: skip


def _flash():
    return {
        "FlashAttentionImpl": flash.FlashAttentionImpl(**LAYER),
        "FlashAttentionMetadataBuilder": flash.FlashAttentionMetadataBuilder(input_builder()),
    }


def flex_builder(engine):
    """vLLM's FlexAttention builder for a `SmallEngine`, or for none."""
    num_blocks = 0 if engine is None else engine.kv_cache.shape[1]
    lens = [] if engine is None else engine.lens
    model_config = SimpleNamespace(
        get_num_attention_heads=lambda parallel: 4, get_num_kv_heads=lambda parallel: 2, get_head_size=lambda: 32,
        max_model_len=512,
    )  # fmt: skip
    computed = None if engine is None else (engine.lens - engine.starts.diff()).numpy()
    runner = SimpleNamespace(
        model_config=model_config, parallel_config=None, cache_config=SimpleNamespace(num_gpu_blocks=num_blocks),
        seq_lens_np=np.asarray(lens), device="cpu", input_batch=SimpleNamespace(num_computed_tokens_cpu=computed),
    )  # fmt: skip
    slots = None if engine is None else engine.slots
    table = SimpleNamespace(
        get_device_tensor=lambda: engine.table, slot_mapping_cpu=slots,
        slot_mapping=None if slots is None else torch.full_like(slots, -1),
    )  # fmt: skip
    return flex.FlexAttentionMetadataBuilder(runner, SimpleNamespace(block_size=16), table)


def _flex():
    return {
        "FlexAttentionImpl": flex.FlexAttentionImpl(**LAYER),
        "FlexAttentionMetadataBuilder": flex_builder(None),
    }


INSTANCES = {"sdpa": _sdpa, "flash": _flash, "flex": _flex}
