"""Which positions the queries of a batch attend to, for plans and kernels alike."""

from typing import Any

import jax.numpy as jnp

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.reference.attention import AttentionOptions


def attended_range(options: AttentionOptions, first_pos: Any, last_pos: Any, kv_len: Any) -> tuple[Any, Any]:
    """Positions [low, high) outside of which no query at `first_pos` to `last_pos` attends."""
    left, right = options.window
    low = jnp.zeros_like(kv_len) if left is None else jnp.maximum(first_pos - left, 0)
    high = kv_len
    if right is not None:
        high = jnp.minimum(high, last_pos + right + 1)
    if options.causal:
        high = jnp.minimum(high, last_pos + 1)
    return low, jnp.maximum(high, low)


def damaged_requests(cache: KVCache, batch: PagedBatch, kv_len: Any) -> Any:
    """[num_reqs] bool: whether a block that holds a request's tokens is out of the cache's range."""
    column = jnp.arange(batch.max_blocks_per_req, dtype=jnp.int32)
    used = column * cache.block_size < kv_len[:, None]
    bad = (batch.block_table < 0) | (batch.block_table >= cache.num_blocks)
    return jnp.any(used & bad, axis=1)
