"""Which tiles need which treatment, and which requests: for plans and kernels alike."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.reference.attention import AttentionOptions

Loop = tuple[Any, Any, dict[str, Any]]
"""First tile, counted from where the work begins, the one after the last, and how a kernel's step is to treat them."""


def leading_loops(
    options: AttentionOptions, first_pos: Any, last_pos: Any, kv_len: Any, size: int, first_tile: Any, count: Any
) -> tuple[list[Loop], Any]:
    """Loops over tiles that need masks for a window's left side, then over tiles in which each query sees all.

    Args:
      first_pos, last_pos: positions of the first and last query.
      size: of a tile; `count` of them from `first_tile` on.

    Returns:
      The loops, and the tile after theirs; from there on tiles need masks.
    """
    if options.mask_mod is not None:
        return [], jnp.int32(0)
    left, right = options.window
    upper = jnp.minimum(kv_len, first_pos + 1) if options.causal else kv_len
    if right is not None:
        upper = jnp.minimum(upper, first_pos + right + 1)
    first: Any = jnp.int32(0)
    end = jnp.clip(lax.div(jnp.maximum(upper, 0), jnp.int32(size)) - first_tile, 0, count)
    if left is None:
        return [(first, end, {})], end
    first = jnp.clip(lax.div(jnp.maximum(last_pos - left, 0) + (size - 1), jnp.int32(size)) - first_tile, 0, count)
    end = jnp.maximum(end, first)
    return [(0, first, {"masked": True}), (first, end, {})], end


def damaged_requests(cache: KVCache, batch: PagedBatch, kv_len: Any) -> Any:
    """[num_reqs] bool: whether a block that holds a request's tokens is out of the cache's range."""
    column = jnp.arange(batch.max_blocks_per_req, dtype=jnp.int32)
    used = column * cache.block_size < kv_len[:, None]
    bad = (batch.block_table < 0) | (batch.block_table >= cache.num_blocks)
    return jnp.any(used & bad, axis=1)


def div(x: Any, y: Any) -> Any:
    """`x // y` for numbers of 0 or more, vectors or not."""
    y = jnp.asarray(y, jnp.int32)
    return lax.div(*jnp.broadcast_arrays(x, y))


def ceil_div(x: Any, y: Any) -> Any:
    """`x / y` rounded up, for numbers of 0 or more."""
    return div(x + (y - 1), y)
