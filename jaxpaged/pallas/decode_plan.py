"""Which CTA of decode works on what: computed on the device from a batch's lengths, with no word from the host.

A plan depends on the batch and the options alone, so within one jitted step XLA computes it once for all layers.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.mask_tiles import TileRuns, skip_masked_tiles
from jaxpaged.pallas.ranges import ceil_div, damaged_requests, div
from jaxpaged.reference.attention import AttentionOptions, attended_range

# Fields of a row of `DecodePlan.requests`.
BEGIN, TILES, FIRST_TILE, KV_LEN, Q_START, Q_LEN, DAMAGED, FIRST_SHARE, LAST_SHARE = range(9)
NUM_FIELDS = 9
SHARE_FIELDS = 4 + NUM_FIELDS


class DecodePlan(NamedTuple):
    """An even split of the tiles of all requests over the CTAs of one kv head, in the requests' order.

    A CTA's share is a run of tiles, which may begin and end inside requests: those have their partial results combined
    (stream-K, Osama et al., 2023; for attention in FlashMLA's and FlashInfer's schedulers).
    """

    requests: Any
    """[num_reqs + 1, NUM_FIELDS] int32: how many tiles come before the request's, how many it has, the first one's
    index in the request (or where they begin in `kept_tiles`), its positions, first row in the query, number of rows
    (-1: another kernel's), whether a block of its is out of range, and the first and last share with tiles of it. The
    last entry has the rows of no request."""
    shares: Any
    """[num_shares, SHARE_FIELDS] int32: first and last request, first tile, the one after the last, and the first
    request's row of `requests`, so that a CTA need not look that up before it can begin."""
    kept_tiles: Any = None
    """[num_reqs * most tiles] int32, the tiles of which a mask function keeps something, if some may be skipped."""

    def in_parts(self) -> Any:
        """[num_reqs + 1] bool: requests that lie in several shares."""
        requests = self.requests
        return (requests[:, TILES] > 0) & (requests[:, FIRST_SHARE] < requests[:, LAST_SHARE])


def plan_shapes(num_reqs: int, num_shares: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of `DecodePlan.requests` and `.shares`."""
    return (num_reqs + 1, NUM_FIELDS), (num_shares, SHARE_FIELDS)


def plan_decode(
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    *,
    num_tokens: int,
    num_heads: int,
    max_query_len: int,
    tile: int,
    num_shares: int,
    min_tiles: int,
    others_elsewhere: bool,
    batch_invariant: bool,
    skip: Any = None,
) -> DecodePlan:
    """The plan for requests with up to `max_query_len` new tokens.

    Args:
      tile: positions a tile.
      num_shares: CTAs for each kv head.
      min_tiles: so many tiles at least in a share: splitting further costs more than it gains.
      others_elsewhere: requests with more new tokens, and rows of no request, are another kernel's.
      batch_invariant: each request is a share, whatever else is in the batch.
      skip: [] int32, first positions of each request that are not attended to, a multiple of `tile`.
    """
    starts = jnp.clip(batch.query_start_loc, 0, num_tokens)  # no row may be written that there isn't
    q_len = starts[1:] - starts[:-1]
    kv_len = batch.kv_lens(cache.block_size)
    short, first_tile, tiles = tiles_of_requests(options, q_len, kv_len, max_query_len, tile, skip)
    request = jnp.arange(batch.num_reqs, dtype=jnp.int32)
    kept_tiles = None
    if options.mask_mod is not None:
        runs = TileRuns(request, kv_len - q_len, q_len, kv_len, first_tile, tiles)
        max_len = batch.max_blocks_per_req * cache.block_size
        how = {"tokens": max_query_len, "tile": tile, "max_len": max_len, "num_heads": num_heads}
        first_tile, tiles, kept_tiles = skip_masked_tiles(options, runs, **how)
    end = jnp.cumsum(tiles, dtype=jnp.int32)
    begin = end - tiles
    if batch_invariant:
        shares = jnp.stack([request, request, begin, end], axis=1)
        first_share = last_share = request
    else:
        size = jnp.maximum(-(-end[-1] // num_shares), min_tiles)
        lower = jnp.minimum(jnp.arange(num_shares, dtype=jnp.int32) * size, end[-1])
        upper = jnp.minimum(lower + size, end[-1])
        first = jnp.sum(end <= lower[:, None], axis=1)
        last = jnp.sum(end < upper[:, None], axis=1)
        shares = jnp.stack([first, jnp.where(upper > lower, last, first - 1), lower, upper], axis=1)
        first_share, last_share = begin // size, (end - 1) // size
    damaged = damaged_requests(cache, batch, kv_len).astype(jnp.int32)
    rows = jnp.where(short, q_len, -1) if others_elsewhere else q_len
    columns = (begin, tiles, first_tile, kv_len, starts[:-1], rows, damaged, first_share, last_share)
    requests = jnp.stack([x.astype(jnp.int32) for x in columns], axis=1)
    outside = jnp.zeros((1, NUM_FIELDS), jnp.int32).at[0, Q_START].set(starts[-1])
    outside = outside.at[0, Q_LEN].set(-1 if others_elsewhere else num_tokens - starts[-1])
    requests = jnp.concatenate([requests, outside])
    shares = jnp.concatenate([shares.astype(jnp.int32), requests[shares[:, 0]]], axis=1)
    return DecodePlan(requests, shares, kept_tiles)


def tiles_of_requests(
    options: AttentionOptions, q_len: Any, kv_len: Any, max_query_len: int, tile: int, skip: Any = None
) -> tuple[Any, Any, Any]:
    """Of each request, given its new tokens and positions: whether it is decoded, its first tile and how many."""
    short = (q_len > 0) & (q_len <= max_query_len)
    low, high = attended_range(options, kv_len - q_len, kv_len - 1, kv_len)
    if skip is not None:
        low = jnp.maximum(low, skip)
    first_tile = div(low, tile)
    return short, first_tile, jnp.where(short & (high > low), ceil_div(high, tile) - first_tile, 0)
