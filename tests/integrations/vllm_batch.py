"""A batch as vLLM hands it to its attention backends, without vLLM: objects with its field names."""

from types import SimpleNamespace

import torch
from small_engine import SmallEngine

from jaxpaged.integrations.vllm.layer import AttentionLayer
from jaxpaged.integrations.vllm.metadata import JaxpagedMetadata

LAYOUTS = {"LBNHC": (0, 2, 1, 3), "LBHNC": (0, 1, 2, 3)}
"""vLLM's names: how the axes [num_blocks, num_kv_heads, block_size, 2 * head_size] lie in memory."""
LAYER = {"num_heads": 4, "head_size": 32, "scale": 32**-0.5, "num_kv_heads": 2}
PADDING = 3
"""Rows of a query after those of the batch."""


def module(k=1.0, v=1.0):
    """vLLM's module for a layer."""
    scales = {"_k_scale": torch.as_tensor(k), "_v_scale": torch.as_tensor(v)}
    numbers = {f"{name}_float": float(scale.flatten()[0]) for name, scale in scales.items()}
    return SimpleNamespace(**scales, **numbers)


class Batch:
    """The requests of a `SmallEngine` in vLLM's cache.

    Attributes:
      kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].
      query, key, value: [num_tokens + PADDING, heads, head_size], slices of one fused projection; padding is NaN.
      output: rows of 7.
    """

    def __init__(self, engine: SmallEngine, layout="LBNHC"):
        self.engine = engine
        both = torch.cat([engine.kv_cache[0], engine.kv_cache[1]], -1).transpose(1, 2)
        order = LAYOUTS[layout]
        inverse = [order.index(axis) for axis in range(4)]
        self.kv_cache = both.permute(order).contiguous().permute(inverse)
        fused = torch.cat([engine.query, engine.key, engine.value], 1)
        fused = torch.nn.functional.pad(fused, (0, 0, 0, PADDING), value=torch.nan)
        heads = [(engine.num_heads, 32), (engine.num_kv_heads, 32), (engine.num_kv_heads, 32)]
        parts = fused.split([a * b for a, b in heads], 1)
        self.query, self.key, self.value = (x.view(-1, *shape) for x, shape in zip(parts, heads, strict=True))
        self.output = torch.full(self.query.shape, 7.0, dtype=self.query.dtype)
        self.slots = torch.nn.functional.pad(engine.slots, (0, PADDING), value=-1)

    def common(self, causal=True, **changes):
        """vLLM's CommonAttentionMetadata, with a row for padding past the batch's requests."""
        engine = self.engine
        fields = {
            "num_reqs": len(engine.lens),
            "num_actual_tokens": int(engine.starts[-1]),
            "query_start_loc": torch.cat([engine.starts, engine.starts[-1:]]),
            "seq_lens": torch.nn.functional.pad(engine.lens, (0, 1)),
            "block_table_tensor": engine.table,
            "slot_mapping": self.slots,
            "causal": causal,
            "max_query_len": max(engine.query_lens),
        }
        return SimpleNamespace(**fields | changes)

    def run(self, layer: AttentionLayer, *, metadata=None, scales=None, **changes):
        """What vLLM does in a layer: the update of the cache, unless it is shared, and the forward pass."""
        metadata = JaxpagedMetadata.of(self.common()) if metadata is None else metadata
        scales = module() if scales is None else scales
        if layer.kv_sharing_target_layer_name is None:
            layer.do_kv_cache_update(scales, self.key, self.value, self.kv_cache, metadata.slot_mapping)
        given = {"query": self.query, "key": self.key, "value": self.value, "output": self.output, **changes}
        return layer.forward(scales, kv_cache=self.kv_cache, attn_metadata=metadata, **given)

    def actual(self, out):
        """The rows that belong to tokens; those of padding must be untouched."""
        n = int(self.engine.starts[-1])
        assert (out[n:].float() == 7).all()
        return out[:n]

    def check(self, out, **options):
        """The output is the oracle's, and the cache holds the new tokens and is otherwise untouched."""
        halves = self.kv_cache.transpose(1, 2).split(32, -1)
        self.engine.kv_cache.copy_(torch.stack(halves))
        self.engine.check(self.actual(out), **options)
