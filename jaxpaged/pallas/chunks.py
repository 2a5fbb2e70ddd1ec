"""Long queries as requests of few new tokens each, for caches that decode alone reads."""

from typing import Any

import jax.numpy as jnp

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.reference.attention import AttentionOptions


def chunk_refusal(options: AttentionOptions) -> str | None:
    """Why attention with these options can't be taken in chunks, or None.

    A chunk has another index than its request; and positions count from its end, which not causal is not the end of
    its keys.
    """
    per_request = options.alibi_slopes is not None and options.alibi_slopes.ndim == 2
    if options.mask_mod is not None or options.score_mod is not None or per_request:
        return "8-bit caches with functions of a request's index, in batches not known to have few new tokens a request"
    if not options.causal and (options.window != (None, None) or options.alibi_slopes is not None):
        return "8-bit caches not causal with positions, in batches not known to have few new tokens a request"
    return None


def in_chunks(cache: KVCache, batch: PagedBatch, chunk: int, *, num_tokens: int, causal: bool) -> PagedBatch:
    """A batch whose requests are the runs of up to `chunk` new tokens of a batch's, in order.

    It has `num_tokens // chunk + num_reqs` requests, the last of them perhaps empty.
    """
    starts, q_len = batch.query_start_loc, batch.query_lens
    kv_len = batch.kv_lens(cache.block_size)
    ends = jnp.cumsum(-(-q_len // chunk), dtype=jnp.int32)
    index = jnp.arange(num_tokens // chunk + batch.num_reqs, dtype=jnp.int32)
    request = jnp.sum(ends <= index[:, None], axis=1, dtype=jnp.int32)
    known = jnp.minimum(request, batch.num_reqs - 1)
    first = (index - (ends + q_len // -chunk)[known]) * chunk
    exists = request < batch.num_reqs
    last: Any = jnp.minimum(first + chunk, q_len[known])
    seen = jnp.maximum(kv_len[known] - q_len[known] + last, 0) if causal else kv_len[known]
    chunk_starts = jnp.where(exists, starts[known] + first, starts[-1])
    return PagedBatch(
        block_table=batch.block_table[known],
        seq_lens=jnp.where(exists, seen, 0),
        query_start_loc=jnp.append(chunk_starts, starts[-1]).astype(jnp.int32),
        slot_mapping=None,
        max_query_len=chunk,
    )
