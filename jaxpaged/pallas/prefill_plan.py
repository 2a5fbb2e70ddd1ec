"""Which CTA of prefill works on what, and in which order: computed on the device from a batch's lengths.

Tiles of queries are dealt out to persistent CTAs so that those at work at one time share keys and values in the L2
cache, and that all CTAs end together: tiles are grouped by (request, kv head) pairs whose keys and values fit in the
cache, the longest first within a group, and dealt in turns that go back and forth, each group starting where the one
before ended. Greedy assignment, which only a host could do, is less than 1% better.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.mask_tiles import TileRuns, skip_masked_tiles
from jaxpaged.pallas.ranges import ceil_div, damaged_requests, div
from jaxpaged.reference.attention import AttentionOptions, attended_range

# Fields of an item of `PrefillPlan.work`.
FIRST_ROW, ROWS, FIRST_POS, REQUEST, KV_LEN, HEAD, FIRST_STEP, STEPS, TILE = range(9)
NUM_FIELDS = 9
MOST_REQUESTS = 2**31 - 1
"""Bits of REQUEST that give the request; the sign says that one of its blocks is out of range."""
MAX_GROUPS = 32
MOST_STEPS = 2**20
"""Longer items come in any order."""
UNIT = 64
"""Positions by which the keys and values of a request are measured, so that all of a batch's can be added up."""


@dataclasses.dataclass(frozen=True)
class PrefillTiling:
    """How queries are cut into tiles.

    Attributes:
      tokens: new tokens a tile.
      packed: whether a tile holds all query heads of a kv head, or one.
      step: positions that are computed at a time.
      num_ctas: persistent CTAs.
      most_parts: a tile's keys are split among so many CTAs at most, where there are more CTAs than tiles.
      l2_bytes: keys and values that are to be worked on at one time.
    """

    tokens: int
    packed: bool
    step: int
    num_ctas: int
    most_parts: int
    l2_bytes: int


class PrefillPlan(NamedTuple):
    """Items of work for each CTA, in order."""

    work: Any
    """[num_ctas, most items, NUM_FIELDS] int32: first row in the query, number of rows, position of the first, request,
    positions of the request, query head (kv head when packed), first step (or where its steps begin in
    `kept_steps`), number of steps, and the number of the part of a tile, `tile * most_parts + part`. Items without
    steps come last."""
    counts: Any
    """[num_ctas] int32: number of items."""
    tile_starts: Any
    """[num_reqs + 1] int32: number of each request's first tile; the last for the rows of no request."""
    parts: Any
    """[] int32: parts of each tile."""
    kept_steps: Any = None
    """[most tiles * most steps] int32, the steps in which a mask function keeps something, if some may be skipped."""


def most_tiles(num_tokens: int, num_reqs: int, tiling: PrefillTiling) -> int:
    """A bound on the number of tiles of any batch of so many tokens and requests."""
    return num_tokens // tiling.tokens + num_reqs + 1


def most_items(num_tokens: int, num_reqs: int, tiling: PrefillTiling, num_heads: int) -> int:
    """A bound on the number of a CTA's items; each group gives one at most more than an even share."""
    items = most_tiles(num_tokens, num_reqs, tiling) * tiling.most_parts * num_heads
    return items // tiling.num_ctas + MAX_GROUPS + 1


def plan_prefill(
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    tiling: PrefillTiling,
    *,
    num_tokens: int,
    num_heads: int,
    shortest: int,
) -> PrefillPlan:
    """The plan for requests with `shortest` new tokens or more, and for the rows of no request, which are cleared."""
    heads = cache.num_kv_heads
    tiles = _tiles(cache, batch, options, tiling, num_tokens, num_heads, shortest)
    tiles, parts = _in_parts(tiles, tiling, heads if tiling.packed else num_heads)
    order, group, count = _order(cache, batch, tiles, tiling)
    cta, slot, counts = _deal(group, count, num_heads // heads if not tiling.packed else 1, tiling.num_ctas)
    entry = order[:, None] + jnp.zeros_like(cta)
    per_entry = cta.shape[1]
    tile, kv_head = entry // heads, entry % heads
    head = kv_head * per_entry + jnp.arange(per_entry)
    fields = jnp.concatenate([tiles.fields[tile], tile[..., None]], axis=-1)
    fields = fields.at[..., HEAD].set(head).astype(jnp.int32)
    room = most_items(num_tokens, batch.num_reqs, tiling, heads * per_entry)
    work = jnp.zeros((tiling.num_ctas, room, NUM_FIELDS), jnp.int32)
    work = work.at[cta, slot].set(fields, mode="drop")
    return PrefillPlan(work, counts.astype(jnp.int32), tiles.starts, parts, tiles.kept_steps)


def cut_tile(
    options: AttentionOptions, tiling: PrefillTiling, q_len: Any, kv_len: Any, index: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """Of a request's tile of that index: first row in the request, number of rows, position of the first, first step
    and number of steps."""
    first = index * tiling.tokens
    rows = jnp.minimum(q_len - first, tiling.tokens)
    first_pos = kv_len - q_len + first
    low, high = attended_range(options, first_pos, first_pos + rows - 1, kv_len)
    first_step = div(low, tiling.step)
    steps = jnp.where(high > low, ceil_div(high, tiling.step) - first_step, 0)
    return first, rows, first_pos, first_step, steps


def number_of_parts(tiling: PrefillTiling, items: Any) -> Any:
    """Parts of each tile, so that every CTA has one, given the tiles of all heads."""
    return jnp.clip(div(tiling.num_ctas, jnp.maximum(items, 1)), 1, tiling.most_parts)


def steps_of_part(steps: Any, part: Any, parts: Any) -> tuple[Any, Any]:
    """How many of a tile's steps come before those of a part, and how many it has."""
    size = ceil_div(steps, parts)
    return part * size, jnp.clip(steps - part * size, 0, size)


def least_group_units(cache: KVCache, tiling: PrefillTiling) -> int:
    """Units of a head's keys and values that fill the L2 cache."""
    unit_bytes = UNIT * (cache.head_size + cache.v_head_size) * cache.dtype.itemsize
    return tiling.l2_bytes // unit_bytes


def group_units(least: int, heads: int, units: Any) -> Any:
    """Units of a head's keys and values that make a group: with so many or more, `MAX_GROUPS` groups have room for
    those of all heads.

    Args:
      units: of all requests, of one head.
    """
    return jnp.maximum(div(heads * units, MAX_GROUPS) + 1, least)


class _Tiles(NamedTuple):
    fields: Any  # [most tiles, NUM_FIELDS - 1], HEAD is unset
    valid: Any  # [most tiles]
    starts: Any  # [num_reqs + 1]
    kept_steps: Any


def _tiles(
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    tiling: PrefillTiling,
    num_tokens: int,
    num_heads: int,
    shortest: int,
) -> _Tiles:
    starts = batch.query_start_loc
    kv_len = batch.kv_lens(cache.block_size)
    damaged = damaged_requests(cache, batch, kv_len)
    # The rows of no request are those of one more, which has nothing to attend to.
    q_len = jnp.diff(starts, append=jnp.maximum(starts[-1], num_tokens))
    kv_len, damaged = jnp.append(kv_len, 0), jnp.append(damaged, False)
    mine = (q_len >= shortest).at[-1].set(True)
    per_request = jnp.where(mine, -(-q_len // tiling.tokens), 0)
    ends = jnp.cumsum(per_request, dtype=jnp.int32)
    tile = jnp.arange(most_tiles(num_tokens, batch.num_reqs, tiling), dtype=jnp.int32)
    request = jnp.minimum(jnp.sum(ends <= tile[:, None], axis=1), batch.num_reqs)
    index = tile - (ends - per_request)[request]
    first, rows, first_pos, first_step, steps = cut_tile(options, tiling, q_len[request], kv_len[request], index)
    table_row = jnp.minimum(request, batch.num_reqs - 1)
    kept_steps = None
    if options.mask_mod is not None:
        runs = TileRuns(table_row, first_pos, rows, kv_len[request], first_step, steps)
        max_len = batch.max_blocks_per_req * cache.block_size
        how = {"tokens": tiling.tokens, "tile": tiling.step, "max_len": max_len, "num_heads": num_heads}
        first_step, steps, kept_steps = skip_masked_tiles(options, runs, **how)
    table_row = jnp.where(damaged[request], table_row | ~jnp.int32(MOST_REQUESTS), table_row)
    columns = (
        starts[request] + first, rows, first_pos, table_row, kv_len[request], jnp.zeros_like(tile), first_step, steps,
    )  # fmt: skip
    fields = jnp.stack([x.astype(jnp.int32) for x in columns], axis=1)
    return _Tiles(fields, tile < ends[-1], ends - per_request, kept_steps)


def _in_parts(tiles: _Tiles, tiling: PrefillTiling, num_heads: int) -> tuple[_Tiles, Any]:
    """The tiles' steps split evenly into as many parts as give each CTA one, and their number."""
    most = tiling.most_parts
    if most == 1:
        return tiles, jnp.int32(1)
    items = jnp.sum(tiles.valid) * num_heads
    parts = number_of_parts(tiling, items).astype(jnp.int32)
    part = jnp.arange(most, dtype=jnp.int32)
    skipped, steps = steps_of_part(tiles.fields[:, None, STEPS], part, parts)
    fields = jnp.repeat(tiles.fields[:, None], most, axis=1)
    fields = fields.at[..., FIRST_STEP].add(skipped)
    fields = fields.at[..., STEPS].set(steps)
    valid = tiles.valid[:, None] & (part < parts)
    return tiles._replace(fields=fields.reshape(-1, fields.shape[-1]), valid=valid.reshape(-1)), parts


def _order(cache: KVCache, batch: PagedBatch, tiles: _Tiles, tiling: PrefillTiling) -> tuple[Any, Any, Any]:
    """The order of the pairs of a tile and a kv head, each pair's group, and the pairs in each group."""
    heads = cache.num_kv_heads
    units = ceil_div(jnp.maximum(batch.kv_lens(cache.block_size), 0), UNIT)
    before = jnp.cumsum(units, dtype=jnp.int32) - units
    size = group_units(least_group_units(cache, tiling), heads, jnp.sum(units, dtype=jnp.int32))
    of_pairs = div(heads * before[:, None] + jnp.arange(heads, dtype=jnp.int32) * units[:, None], size)
    group = of_pairs[tiles.fields[:, REQUEST] & MOST_REQUESTS]
    # What has no steps comes last: it only clears rows.
    group = jnp.where(tiles.fields[:, STEPS, None] == 0, MAX_GROUPS - 1, group)
    group = jnp.where(tiles.valid[:, None], group, MAX_GROUPS).reshape(-1)
    cost = jnp.repeat(jnp.minimum(tiles.fields[:, STEPS], MOST_STEPS), heads)
    order = jnp.argsort(group * (2 * MOST_STEPS) - cost, stable=True)
    sorted_group = group[order]
    count = jnp.sum(sorted_group[:, None] == jnp.arange(MAX_GROUPS), axis=0)
    return order, sorted_group, count


def _deal(group: Any, count: Any, per_pair: int, num_ctas: int) -> tuple[Any, Any, Any]:
    """For each sorted pair and each of its items, the CTA and the place in its list; and the lists' lengths.

    A place past the end stands for no item.
    """
    size = count * per_pair
    rounds, rest = size // num_ctas, size % num_ctas
    # A group's last, partial turn runs backwards when it is an odd one; the next group starts at the CTAs left out.
    moved = jnp.cumsum(jnp.where(rounds % 2 == 0, rest, -rest))
    offset = jnp.concatenate([jnp.zeros(1, moved.dtype), moved[:-1]])
    cta = jnp.arange(num_ctas)
    turn_place = (cta - offset[:, None]) % num_ctas
    in_rest = jnp.where((rounds % 2 == 0)[:, None], turn_place, num_ctas - 1 - turn_place) < rest[:, None]
    held = rounds[:, None] + in_rest
    ends = jnp.cumsum(held, axis=0)
    known = jnp.minimum(group, MAX_GROUPS - 1)
    first = (jnp.cumsum(size) - size)[known]
    item = jnp.arange(group.shape[0])[:, None] * per_pair + jnp.arange(per_pair) - first[:, None]
    turn, place = item // num_ctas, item % num_ctas
    place = jnp.where(turn % 2 == 0, place, num_ctas - 1 - place)
    target = (place + offset[known][:, None]) % num_ctas
    slot = (ends - held)[known[:, None], target] + turn
    slot = jnp.where((group < MAX_GROUPS)[:, None], slot, 2**30)
    return target, slot, ends[-1]
