"""Which kv tiles a mask function keeps anything of, for plans: kernels neither load nor compute the others.

FlexAttention's block masks (Dong et al., 2024) do the same, but are made ahead, for one pair of lengths. Plans change
with each step, and are computed on the device: so the function is evaluated there, for each pair of a query and a key
that the lengths, causality and the window leave. That is a few integer operations a pair, once for all layers.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpaged.pallas.functions import reads_head
from jaxpaged.pallas.scores import TilePlace, kept
from jaxpaged.reference.attention import AttentionOptions

AT_ONCE = 1 << 26
"""Pairs that are evaluated together: a byte each, where XLA doesn't fuse the function with the search in its flags."""
MOST_STATIC_TRIPS = 8
"""Of more turns than these, only as many as the lengths need are taken: XLA waits for the device at each to know it."""
MOST_LISTED = 16 << 20
"""Entries of a list, which is an int32 each. Where it would be longer, nothing is skipped."""


class TileRuns(NamedTuple):
    """Runs of kv tiles, each all that some new tokens of a request may attend to. Arrays [num_runs] int32."""

    request: Any
    first_pos: Any
    """Position of the first token."""
    num_tokens: Any
    kv_len: Any
    first_tile: Any
    count: Any


def skip_masked_tiles(
    options: AttentionOptions, runs: TileRuns, *, tokens: int, tile: int, max_len: int, num_heads: int
) -> tuple[Any, Any, Any]:
    """Runs without the tiles of which `options.mask_mod` keeps nothing.

    Args:
      tokens: of a run at most.
      tile: positions a tile.
      max_len: positions that the block table has room for.

    Returns:
      For each run where its tiles begin in a list, and their number [num_runs] int32; and the list, int32, in which
      each run's tiles ascend. Whatever the function returns, they are tiles of the run. The list is None where it would
      be too long: then the runs' first tiles, and numbers, are as they were.
    """
    num_runs, most = runs.request.shape[0], -(-max_len // tile)
    if num_runs * most > MOST_LISTED:
        return runs.first_tile, runs.count, None
    runs = TileRuns(*(x.astype(jnp.int32) for x in runs))
    column = jnp.arange(most, dtype=jnp.int32)
    keep = _kept_tiles(options, runs, (tokens, tile), most, num_heads) & (column < runs.count[:, None])
    place = jnp.where(keep, jnp.cumsum(keep, axis=1, dtype=jnp.int32) - 1, most)
    run = jnp.arange(num_runs, dtype=jnp.int32)
    # Entries past a run's tiles are looked up, too, ahead of use: they are its first one.
    listed = jnp.broadcast_to(runs.first_tile[:, None], keep.shape)
    listed = listed.at[run[:, None], place].set(runs.first_tile[:, None] + column, mode="drop")
    return run * most, keep.sum(axis=1, dtype=jnp.int32), listed.reshape(-1)


def _kept_tiles(options: AttentionOptions, runs: TileRuns, shape: tuple[int, int], most: int, num_heads: int) -> Any:
    """[num_runs, most] bool: of which tiles of a run any head keeps a pair; anything past the run's last one.

    Args:
      shape: tokens of a run and positions of a tile.
    """
    num_runs = runs.request.shape[0]
    heads = num_heads if options.mask_mod is not None and reads_head(options.mask_mod) else 1
    pairs = num_runs * shape[0] * shape[1]
    heads_at_once = min(heads, max(1, AT_ONCE // pairs))
    trips: Any = -(-most // max(1, AT_ONCE // (pairs * heads_at_once)))
    columns = -(-most // trips)
    room = trips * columns
    if trips > MOST_STATIC_TRIPS:
        trips = -(-jnp.max(runs.count) // columns)

    def add_heads(column: Any, i: Any, keep: Any) -> Any:
        head = i * heads_at_once + jnp.arange(heads_at_once)
        head = jnp.minimum(head, heads - 1).astype(jnp.int32)
        return keep | jnp.any(_keeps_any(options, runs, shape, column, head), axis=2)

    def add_columns(i: Any, keep: Any) -> Any:
        first = (i * columns).astype(jnp.int32)
        column = first + jnp.arange(columns, dtype=jnp.int32)
        nothing = jnp.zeros((num_runs, columns), bool)
        some = lax.fori_loop(0, -(-heads // heads_at_once), functools.partial(add_heads, column), nothing)
        return lax.dynamic_update_slice(keep, some, (jnp.int32(0), first))

    return lax.fori_loop(0, trips, add_columns, jnp.zeros((num_runs, room), bool))[:, :most]


def _keeps_any(options: AttentionOptions, runs: TileRuns, shape: tuple[int, int], column: Any, head: Any) -> Any:
    """[num_runs, columns, heads] bool: whether a pair is kept of a run's tile, counted from its first one."""
    token = jnp.arange(shape[0], dtype=jnp.int32)[:, None]
    offset = jnp.arange(shape[1], dtype=jnp.int32)[None]

    def any_pair(run: TileRuns, column: Any, head: Any) -> Any:
        kv_pos = (run.first_tile + column) * shape[1] + offset
        place = TilePlace(run.request, lambda: head, lambda: run.first_pos + token, lambda: kv_pos)
        return jnp.any((token < run.num_tokens) & kept(options, place, run.kv_len))

    # The function sees a request and a head at a time, as in the kernels.
    any_pairs = jax.vmap(jax.vmap(jax.vmap(any_pair, (None, None, 0)), (None, 0, None)), (0, None, None))
    return any_pairs(runs, column, head)
