"""Where requests lie in a cache [num_blocks, block_size, ...], paged or with a row for each request."""

import dataclasses
from typing import Any, Self

import numpy as np
import torch

from jaxpaged.backends.checks import check_int_tensor, lengths
from jaxpaged.bridge.dlpack import to_numpy
from jaxpaged.metadata.slots import slot_mapping_from_block_table

Caches = tuple[torch.Tensor, torch.Tensor, Any, Any]


@dataclasses.dataclass(frozen=True)
class CachePlace:
    """The blocks of a batch of requests. A cache that is not paged has one block, its row, for each request.

    Attributes:
      blocks: [batch, columns] int, a tensor of the engine's, or a NumPy array.
      block_size: tokens a block.
      leftpad: [batch] int32, tokens of a row before a request's first one; None for none.
    """

    blocks: Any
    block_size: int
    leftpad: np.ndarray | None

    @classmethod
    def of(
        cls,
        k_cache: torch.Tensor,
        batch: int,
        block_table: torch.Tensor | None,
        cache_batch_idx: torch.Tensor | None,
        cache_leftpad: torch.Tensor | None,
    ) -> Self:
        num_rows, block_size = k_cache.shape[:2]
        if block_table is not None:
            for name, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
                if x is not None:
                    raise ValueError(f"{name}: it belongs to a cache that is not paged, expected None with block_table")
            check_int_tensor("block_table", block_table, (batch, "max_blocks_per_seq"))
            return cls(block_table, block_size, None)
        leftpad = None if cache_leftpad is None else lengths("cache_leftpad", cache_leftpad, batch)
        if cache_batch_idx is not None:
            check_int_tensor("cache_batch_idx", cache_batch_idx, (batch,))
            return cls(cache_batch_idx.unsqueeze(1), block_size, leftpad)
        if num_rows < batch:
            raise ValueError(f"k_cache: it has {num_rows} rows, expected one for each of {batch} requests")
        return cls(np.arange(batch, dtype=np.int32)[:, None], block_size, leftpad)

    def cached_lens(self, cache_seqlens: int | torch.Tensor | None, *, required: bool) -> np.ndarray:
        """[batch] int32, tokens of each request in the cache, those to the left of its first one included."""
        batch, columns = self.blocks.shape
        if cache_seqlens is None:
            if required:
                raise ValueError("cache_seqlens: expected the lengths before the new tokens, got None with k")
            return np.full(batch, columns * self.block_size, np.int32)
        if isinstance(cache_seqlens, int):
            cache_seqlens = torch.full((batch,), cache_seqlens, device="cpu")
        return lengths("cache_seqlens", cache_seqlens, batch)

    def new_slots(self, cached: np.ndarray, num_new: int) -> torch.Tensor:
        """[batch * num_new] int32, the slots of the tokens after `cached`; -1 where there is no room."""
        batch = len(cached)
        slots = slot_mapping_from_block_table(
            self.blocks if isinstance(self.blocks, np.ndarray) else to_numpy(self.blocks),
            cached + np.int32(num_new),
            np.arange(batch + 1, dtype=np.int32) * np.int32(num_new),
            block_size=self.block_size,
            num_tokens=batch * num_new,
        )
        return torch.from_numpy(np.asarray(slots))

    def without_leftpad(self, caches: Caches, lens: np.ndarray) -> tuple[Caches, Any, np.ndarray]:
        """The caches, the block table and the lengths to attend with.

        With tokens to the left of the first one, the cache is seen as blocks of one token, and the table skips them.
        """
        if self.leftpad is None:
            return caches, self.blocks, lens
        rows = np.asarray(self.blocks if isinstance(self.blocks, np.ndarray) else to_numpy(self.blocks), np.int64)
        position = self.leftpad[:, None] + np.arange(self.block_size)
        valid = (rows >= 0) & (rows < caches[0].shape[0]) & (position < self.block_size)
        table = np.where(valid, rows * self.block_size + position, -1).astype(np.int32)
        k, v, k_scale, v_scale = caches
        tokens = (
            _as_tokens("k_cache", k),
            _as_tokens("v_cache", v),
            _scale_as_tokens("k_descale", k_scale),
            _scale_as_tokens("v_descale", v_scale),
        )
        return tokens, table, np.maximum(np.minimum(lens, self.block_size) - self.leftpad, 0)


def _as_tokens(name: str, x: torch.Tensor) -> torch.Tensor:
    """A tensor [rows, tokens, ...] seen as [rows * tokens, 1, ...]."""
    try:
        return x.view(x.shape[0] * x.shape[1], 1, *x.shape[2:])
    except RuntimeError as error:
        raise ValueError(
            f"{name}: with cache_leftpad, expected the tokens of all rows at one distance from each other, got shape "
            f"{list(x.shape)} with strides {list(x.stride())}"
        ) from error


def _scale_as_tokens(name: str, scale: Any) -> Any:
    return _as_tokens(name, scale) if isinstance(scale, torch.Tensor) and scale.ndim == 3 else scale
