"""FlexAttention over keys that lie in one run for all queries: PyTorch's function, and what it is made of."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from jaxpaged.backends.arguments import refuse
from jaxpaged.backends.checks import check_tensors, checked_scale
from jaxpaged.backends.layer_cache import layer_cache
from jaxpaged.backends.padded_calls import Options
from jaxpaged.backends.parts import PagedPart, attend
from jaxpaged.backends.positions import ByRow, ByTile
from jaxpaged.bridge.dlpack import to_numpy
from jaxpaged.bridge.torch_functions import POSITIONS, SCORE_AND_POSITIONS, jax_function
from jaxpaged.metadata.block_mask import EMPTY, FULL, PARTIAL
from jaxpaged.metadata.checks import check_shape


def flex_attention_compiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
) -> torch.Tensor:
    """PyTorch's `flex_attention` on memory that is shared, not copied, and without its compiler.

    Args:
      query: [batch, num_heads, q_len, head_size] float32, bfloat16 or float16.
      key, value: [batch, num_kv_heads, kv_len, head_size], transpositions of compact tensors or halves of one.
      score_mod: `(score, b, h, q_idx, kv_idx) -> score`.
      block_mask: its tiles and its `mask_mod` say which scores take part; all of them when None.
      scale: `head_size ** -0.5` when None.
      enable_gqa: there may be more query heads than kv heads.
      kernel_options: accepted and not looked at.

    Returns:
      [batch, num_heads, q_len, v_head_size].

    Raises:
      NotImplementedError: `return_lse`, or tensors that are not on the CPU.
      TypeError, ValueError: an argument doesn't fit; the message names it.
    """
    refuse(return_lse=return_lse)
    check_tensors(query=query, key=key, value=value)
    check_shape("query", query.shape, ("batch", "num_heads", "q_len", "head_size"))
    batch, num_heads, q_len, head_size = query.shape
    check_shape("key", key.shape, (batch, "num_kv_heads", "kv_len", head_size))
    if key.shape[1] != num_heads and not enable_gqa:
        raise ValueError(f"enable_gqa: expected True with {num_heads} query heads and {key.shape[1]} kv heads")
    cache = layer_cache(key.transpose(1, 2), value.transpose(1, 2), "auto", 1.0, 1.0)
    options = Options(scale=checked_scale(scale, head_size), causal=False, window=(None, None), soft_cap=None)
    part = run_part(
        np.arange(batch, dtype=np.int32)[:, None], q_len, key.shape[2], options,
        mask_mod=None if block_mask is None else tile_mask(block_mask, (batch, num_heads, q_len, key.shape[2])),
        score_mod=None if score_mod is None else jax_function("score_mod", score_mod, SCORE_AND_POSITIONS),
    )  # fmt: skip
    rows = query.transpose(1, 2).reshape(batch * q_len, num_heads, head_size)
    return attend(rows, [part], cache, None).unflatten(0, (batch, q_len)).transpose(1, 2)


def run_part(
    block_table: np.ndarray, q_len: int, kv_len: int, options: Options, *, mask_mod: Any, score_mod: Any
) -> PagedPart:
    """Requests that all have `q_len` queries and `kv_len` keys, masked and scored by rows of the one and the other."""
    first = np.asarray(kv_len - q_len, np.int32)
    num_reqs = len(block_table)
    options = dataclasses.replace(
        options,
        causal=False,
        mask_mod=None if mask_mod is None else ByRow(mask_mod, first),
        score_mod=None if score_mod is None else ByRow(score_mod, first),
    )
    starts = np.arange(num_reqs + 1, dtype=np.int32) * np.int32(q_len)
    lens = np.full(num_reqs, kv_len, np.int32)
    return PagedPart(slice(0, num_reqs * q_len), starts, lens, block_table, options)


def tile_mask(block_mask: BlockMask, shape: tuple[int, int, int, int], device: torch.device | str = "cpu") -> ByTile:
    """What a block mask of PyTorch's says, by its lists of tiles, for which the host waits, and its mask function.

    Args:
      shape: (batch, num_heads, q_len, kv_len) of the scores that it is for.
      device: of the tensors that the function works on.

    Raises:
      TypeError, ValueError: it doesn't fit the shape, or its function can't be translated.
    """
    made_for = tuple(block_mask.shape)
    fits = [got in (1, want) for got, want in zip(made_for[:2], shape[:2], strict=True)]
    fits += [got >= want for got, want in zip(made_for[2:], shape[2:], strict=True)]
    if not all(fits):
        raise ValueError(f"block_mask: expected one for scores of shape {list(shape)}, got one for {list(made_for)}")
    tiles = np.full(block_mask.kv_indices.shape, EMPTY, np.int8)
    lists = [
        (PARTIAL, block_mask.kv_num_blocks, block_mask.kv_indices),
        (FULL, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ]
    for kind, counts, indices in lists:
        if counts is None or indices is None:
            continue
        counts, indices = counts.cpu(), indices.cpu()
        check_tensors(block_mask=counts)
        listed = np.nonzero(np.arange(indices.shape[-1]) < to_numpy(counts)[..., None])
        tiles[(*listed[:-1], to_numpy(indices)[listed])] = kind
    function = jax_function("block_mask.mask_mod", block_mask.mask_mod, POSITIONS, device)
    return ByTile(function, tiles, *block_mask.BLOCK_SIZE)
