"""Score biases as tensors, one for each request, as attention by whole score matrices takes them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from jaxpaged.bridge.dlpack import to_numpy
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.metadata.checks import check_positive


def make_alibi_bias(alibi_slopes: torch.Tensor, dtype: torch.dtype, seq_lens: Sequence[int]) -> list[torch.Tensor]:
    """For each length n a causal bias [1, num_heads, n, n]: `slope * (kv_pos - q_pos)`, and -inf ahead of a query."""
    biases = []
    for n in seq_lens:
        position = torch.arange(n, dtype=torch.float32, device=alibi_slopes.device)
        distance = (position[None, :] - position[:, None]).masked_fill(_ahead(n, alibi_slopes.device), -math.inf)
        # 0 * -inf is NaN, and a slope may be 0.
        bias = torch.where(distance.isinf(), distance, alibi_slopes[:, None, None] * distance)
        biases.append(bias[None].to(dtype))
    return biases


def make_sliding_window_bias(
    seq_lens: Sequence[int], window_size: int | None, dtype: torch.dtype
) -> list[torch.Tensor]:
    """For each length n a causal bias [1, n, n]: 0 for the last `window_size` positions, the query's included, else
    -inf; all positions up to the query's without a window."""
    biases = []
    for n in seq_lens:
        hidden = _ahead(n, None)
        if window_size is not None:
            hidden |= ~_ahead(n, None, -check_positive("window_size", window_size))
        biases.append(torch.zeros(1, n, n, dtype=dtype).masked_fill(hidden, -math.inf))
    return biases


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BiasScore:
    """A score function that adds the bias of each pair of positions.

    Attributes:
      bias: [num_reqs, num_heads, query_len, kv_len] float32, padded with zeros.
      first: [num_reqs] int32, the position of each request's first query.
    """

    bias: Any
    first: Any

    def __call__(self, score: Any, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        return score + self.bias[b, h, q_pos - self.first[b], kv_pos]


def bias_score(
    biases: Sequence[torch.Tensor | None],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_heads: int,
    causal: bool,
) -> BiasScore:
    """A score function from each request's bias [.., num_heads or 1, query_len, kv_len] or [query_len, kv_len].

    A bias of bool is a mask: true where a score takes part. A request without a bias, None, is causal or sees all, as
    `causal` says.

    Raises:
      ValueError: there is not one for each request, or one has another shape.
    """
    if not len(biases) == len(query_lens) == len(kv_lens):
        raise ValueError(f"attn_bias: expected {len(query_lens)} biases, one a request, got {len(biases)}")
    size = [next_bucket(max(lens, default=1)) for lens in (query_lens, kv_lens)]
    bias = np.zeros((next_bucket(len(biases)), num_heads, *size), np.float32)
    first = np.zeros(len(bias), np.int32)
    for i, (x, m, n) in enumerate(zip(biases, query_lens, kv_lens, strict=True)):
        first[i] = n - m
        if x is None:
            if causal:
                bias[i, :, :m, :n] = np.where(np.tri(m, n, n - m, dtype=bool), 0, -np.inf)
            continue
        leading = (1, 1, *x.shape[:-2])
        if x.shape[-2:] != (m, n) or leading[-1] not in (1, num_heads) or any(size != 1 for size in leading[:-1]):
            raise ValueError(f"attn_bias[{i}]: expected shape [1, {num_heads} or 1, {m}, {n}], got {list(x.shape)}")
        added = torch.zeros(x.shape).masked_fill(~x, -math.inf) if x.dtype == torch.bool else x.detach().float()
        bias[i, :, :m, :n] = to_numpy(added).reshape(-1, m, n)
    return BiasScore(bias, first)


def _ahead(n: int, device: Any, offset: int = 0) -> torch.Tensor:
    """Whether a key's position [n, n] is past its query's, moved by `offset`."""
    return torch.ones(n, n, dtype=torch.bool, device=device).triu(1 + offset)
