"""Users' mask and score functions under `paged_attention`, which counts positions within a request.

FlexAttention counts queries by rows and keys by physical indices. These wrap a function of the one kind for a call with
the other; a score function has the score before the arguments that both kinds have.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.metadata.block_mask import FULL, PARTIAL

_STATIC: Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class OneBatch:
    """A function that is told of no requests: b is 0."""

    function: Any

    def __call__(self, *args: Any) -> Any:
        *score, b, h, q_pos, kv_pos = args
        return self.function(*score, jnp.zeros_like(b), h, q_pos, kv_pos)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ByRow:
    """A function of a query's row, counted from 0, where the first row sits at position `first`.

    Attributes:
      first: [] int32.
    """

    function: Any
    first: Any

    def __call__(self, *args: Any) -> Any:
        *score, b, h, q_pos, kv_pos = args
        return self.function(*score, b, h, q_pos - self.first, kv_pos)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ByPhysicalIndex:
    """A function of a token's row in the flattened batch and of a key's physical index in the cache.

    Attributes:
      block_table, seq_lens, query_start_loc: the batch's.
    """

    function: Any
    block_table: Any
    seq_lens: Any
    query_start_loc: Any
    block_size: int = dataclasses.field(metadata=_STATIC)

    def __call__(self, *args: Any) -> Any:
        *score, b, h, q_pos, kv_pos = args
        end = self.query_start_loc[b + 1]
        block = self.block_table[b, kv_pos // self.block_size]
        index = block * self.block_size + kv_pos % self.block_size
        return self.function(*score, b, h, q_pos - self.seq_lens[b] + end, index)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ByTile:
    """A mask function that is evaluated only in the tiles of a block mask that it leaves in part.

    Attributes:
      tiles: [batch or 1, num_heads or 1, num_q_blocks, num_kv_blocks] int8, of `jaxpaged.metadata.block_mask`.
    """

    function: Any
    tiles: Any
    q_block_size: int = dataclasses.field(metadata=_STATIC)
    kv_block_size: int = dataclasses.field(metadata=_STATIC)

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        b_of_tile = b if self.tiles.shape[0] > 1 else 0
        h_of_tile = h if self.tiles.shape[1] > 1 else 0
        tile = self.tiles[b_of_tile, h_of_tile, q_idx // self.q_block_size, kv_idx // self.kv_block_size]
        return (tile == FULL) | ((tile == PARTIAL) & self.function(b, h, q_idx, kv_idx))
