"""Masks that a step of vLLM's brings along."""

import dataclasses
from typing import Any, Self

import jax
import torch

from jaxpaged.bridge.dlpack import to_numpy
from jaxpaged.metadata.buckets import next_bucket


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CausalRequests:
    """A causal mask for some requests of a batch; the others see both sides. Call attention with `causal=False`.

    Attributes:
      causal: [num_reqs or more] bool.
    """

    causal: Any

    @classmethod
    def of(cls, causal: torch.Tensor) -> Self:
        """From [num_reqs] bool, padded to a size that few programs serve."""
        if causal.dtype != torch.bool or causal.ndim != 1:
            raise TypeError(f"causal: expected shape [num_reqs] of torch.bool, got {list(causal.shape)} {causal.dtype}")
        padded = causal.new_ones(next_bucket(max(len(causal), 1)))
        padded[: len(causal)] = causal
        return cls(padded if causal.is_cuda else to_numpy(padded))

    def __call__(self, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        return (kv_pos <= q_pos) | ~self.causal[b]
