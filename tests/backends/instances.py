"""One object of each class of the backends that has attributes of its own."""

from types import SimpleNamespace

import torch

from jaxpaged.backends import flash, sdpa

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


INSTANCES = {"sdpa": _sdpa, "flash": _flash}
