"""Block masks: which tiles of queries by keys a mask function leaves empty, keeps in part, or keeps whole.

The idea and the form of the lists are FlexAttention's (Dong et al., 2024, arXiv:2412.05496): an empty tile need not be
loaded, and in a full one the mask need not be evaluated.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.checks import check_positive, is_concrete, on_host
from jaxpaged.metadata.masks import MaskMod, as_pytree

EMPTY, PARTIAL, FULL = 0, 1, 2
"""What a mask leaves of a tile: nothing, a part, or all."""

_SCORES_AT_ONCE = 1 << 18
"""Elements of the mask that are evaluated together: enough to fill a device, little memory whatever the lengths."""


class KeptBlocks(NamedTuple):
    """For each row of tiles, which kv blocks to visit, as FlexAttention lists them.

    `...` stands for num_reqs, num_q_blocks, or for num_reqs, num_heads, num_q_blocks. Indices ascend; those past a
    row's number are -1.
    """

    kv_num_blocks: Any
    """[...] int32, number of blocks that are kept in part."""
    kv_indices: Any
    """[..., num_kv_blocks] int32, those blocks."""
    full_kv_num_blocks: Any
    """[...] int32, number of blocks that are kept whole."""
    full_kv_indices: Any
    """[..., num_kv_blocks] int32, those blocks."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """What a mask function leaves of each tile of `q_block_size` new tokens by `kv_block_size` positions, as a pytree.

    Build it with `create_block_mask`. Query block t of a request holds its new tokens from `t * q_block_size` on, kv
    block k its positions from `k * kv_block_size` on.

    Attributes:
      tiles: [num_reqs, num_q_blocks, num_kv_blocks] int8, or [num_reqs, num_heads, num_q_blocks, num_kv_blocks] when
        made for each head: `EMPTY`, `PARTIAL` or `FULL`. A tile without a token or without a position is empty.
      query_lens, seq_lens: [num_reqs] int32, the lengths that it was made for.
      q_block_size, kv_block_size: size of a tile.
    """

    tiles: Any
    query_lens: Any
    seq_lens: Any
    q_block_size: int = dataclasses.field(metadata={"static": True})
    kv_block_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_q_blocks(self) -> int:
        return self.tiles.shape[-2]

    @property
    def num_kv_blocks(self) -> int:
        return self.tiles.shape[-1]

    @jax.jit
    def sparsity(self) -> Any:
        """The share of empty tiles among those that hold a token and a position; float32 [], 0 when there is none."""
        q_used = jnp.arange(self.num_q_blocks) * self.q_block_size < self.query_lens[:, None]
        kv_used = jnp.arange(self.num_kv_blocks) * self.kv_block_size < self.seq_lens[:, None]
        used = q_used[:, :, None] & kv_used[:, None, :]
        if self.tiles.ndim == 4:
            used = jnp.broadcast_to(used[:, None], self.tiles.shape)
        empty = used & (self.tiles == EMPTY)
        return empty.sum(dtype=jnp.float32) / jnp.maximum(used.sum(dtype=jnp.float32), 1)

    @jax.jit
    def kept_blocks(self) -> KeptBlocks:
        """For each row of tiles, how many kv blocks and which are kept in part, and likewise whole."""
        return KeptBlocks(*_listed(self.tiles == PARTIAL), *_listed(self.tiles == FULL))


def create_block_mask(
    mask_mod: MaskMod,
    batch: PagedBatch,
    *,
    num_heads: int | None = None,
    q_block_size: int = 128,
    kv_block_size: int = 128,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
) -> BlockMask:
    """Evaluate a mask function on every tile of a batch, a few tiles at a time.

    Only new tokens and positions that exist count: new token i of a request at position `seq_len - query_len + i`, and
    the positions below `seq_len`.

    Args:
      mask_mod: see `jaxpaged.metadata.masks`. A plain function is compiled anew for each new function object.
      batch: its `seq_lens` and `query_start_loc` are used.
      num_heads: evaluate the mask for each of so many query heads; when None for head 0, which stands for all.
      q_block_size, kv_block_size: size of a tile; positions and tokens past the last whole tile get a tile, too.
      max_query_len, max_seq_len: the greatest lengths to make room for; the batch's own when None, and so needed under
        `jit`. Where lengths aren't checked (under `jit`, or away from the host), a longer request counts with its
        first `max_query_len` new tokens, and as if it had `max_seq_len` tokens.

    Raises:
      TypeError, ValueError: an argument doesn't fit; the message names it.
    """
    mask = as_pytree("mask_mod", mask_mod)
    if not isinstance(batch, PagedBatch):
        raise TypeError(f"batch: expected a PagedBatch, got {type(batch).__name__}")
    heads = None if num_heads is None else check_positive("num_heads", num_heads)
    tile_shape = (check_positive("q_block_size", q_block_size), check_positive("kv_block_size", kv_block_size))
    num_q_blocks = -(-_greatest("max_query_len", max_query_len, batch.query_lens) // tile_shape[0])
    max_len = _greatest("max_seq_len", max_seq_len, batch.seq_lens)
    num_kv_blocks = -(-max_len // tile_shape[1])
    seq_lens = jnp.minimum(batch.seq_lens, max_len)
    grid = (batch.num_reqs, heads or 1, num_q_blocks, num_kv_blocks)
    tiles = _evaluate(mask, batch.query_lens, seq_lens, grid, tile_shape)
    return BlockMask(tiles if heads else tiles[:, 0], batch.query_lens, seq_lens, *tile_shape)


def _greatest(name: str, limit: int | None, lens: Any) -> int:
    """The limit given, checked against the lengths where they can be read, or the greatest length."""
    if limit is None:
        if not is_concrete(lens):
            raise ValueError(f"{name}: under jit the batch's lengths can't be read, expected an int, got None")
        return int(np.asarray(lens).max(initial=0))
    limit = check_positive(name, limit)
    if on_host(lens) and np.asarray(lens).max(initial=0) > limit:
        raise ValueError(f"{name}: expected {np.asarray(lens).max()} or more, the batch's longest, got {limit}")
    return limit


@functools.partial(jax.jit, static_argnums=(3, 4))
def _evaluate(
    mask: MaskMod, query_lens: Any, seq_lens: Any, grid: tuple[int, int, int, int], tile_shape: tuple[int, int]
) -> Any:
    """The state of each tile of `grid` = (requests, heads, query blocks, kv blocks), int8."""
    q_offset = jnp.arange(tile_shape[0], dtype=jnp.int32)[:, None]
    kv_offset = jnp.arange(tile_shape[1], dtype=jnp.int32)[None, :]

    def evaluate(tile: Any) -> Any:
        b, h, q_block, kv_block = jnp.unravel_index(tile, grid)
        token = q_block * tile_shape[0] + q_offset
        kv_pos = kv_block * tile_shape[1] + kv_offset
        q_pos = seq_lens[b] - query_lens[b] + token
        exists = (token < query_lens[b]) & (kv_pos < seq_lens[b])
        keep = jnp.logical_and(exists, mask(b, h, q_pos, kv_pos))
        state = jnp.where(jnp.all(keep == exists), FULL, PARTIAL)
        return jnp.where(jnp.any(keep), state, EMPTY).astype(jnp.int8)

    num_tiles = math.prod(grid)
    if num_tiles == 0:
        return jnp.zeros(grid, jnp.int8)
    at_once = max(1, _SCORES_AT_ONCE // math.prod(tile_shape))
    tiles = lax.map(evaluate, jnp.arange(num_tiles, dtype=jnp.int32), batch_size=min(at_once, num_tiles))
    return tiles.reshape(grid)


def _listed(kept: Any) -> tuple[Any, Any]:
    """Of flags [..., n]: how many are set [...], and where, ascending and then -1 [..., n]."""
    count = kept.sum(-1, dtype=jnp.int32)
    order = jnp.argsort(~kept, axis=-1, stable=True).astype(jnp.int32)
    return count, jnp.where(jnp.arange(kept.shape[-1]) < count[..., None], order, -1)
