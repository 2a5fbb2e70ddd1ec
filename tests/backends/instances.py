"""One object of each class of the backends that has attributes of its own."""

from types import SimpleNamespace

import torch

from jaxpaged.backends import sdpa

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


INSTANCES = {"sdpa": _sdpa}
