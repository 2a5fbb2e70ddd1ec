"""Cascade attention: what all requests of a batch begin with is read once for all of them.

Where the first blocks of every request are the same ones, a batch of decodes attends to their keys as a single request
would whose new tokens are all rows of the batch: by the prefill kernel, in which 128 rows share each key that is read.
The decode kernel does the rest of every request, and both states are merged by their lses (Hydragen, Juravsky et al.,
2024; FlashInfer's cascade inference, Ye et al., 2024).

How long the shared prefix is, perhaps 0, is computed on the device from the block table, so a batch's hint decides
which program runs and not what it computes. The prefix is so short, though, that no new token is in it: then each of
its positions is seen by each row, causal or not.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas import prefill_plan as field
from jaxpaged.pallas.config import TILE_ROWS, can_be_packed, packed_tokens, prefill_config
from jaxpaged.pallas.mosaic import Interpreter
from jaxpaged.pallas.prefill import prefill
from jaxpaged.pallas.prefill_plan import PrefillPlan
from jaxpaged.pallas.prefill_shape import PrefillShape
from jaxpaged.pallas.scores import LN2
from jaxpaged.pallas.tuning import Gpu
from jaxpaged.reference.attention import AttentionOptions

MOST_PARTS = 16
"""The merge reads them one after the other."""


def sees_all_of_a_prefix(options: AttentionOptions) -> bool:
    """Whether each row attends to each position of the past, and by its keys and values alone."""
    by_place = (options.alibi_slopes, options.mask_mod, options.score_mod)
    return options.window == (None, None) and all(x is None for x in by_place)


class Prefix(NamedTuple):
    """What all requests with new tokens begin with."""

    tokens: Any
    """[] int32, their number, a multiple of a tile."""
    table: Any
    """[num_reqs, max_blocks_per_req] int32, whose first row begins with their blocks."""


def shared_prefix(cache: KVCache, batch: PagedBatch, tile: int) -> Prefix:
    """The longest prefix in whole tiles and in whole blocks that exist, and in which no request has a new token.

    Requests without new tokens may be anywhere but in the first row, with which the others are compared.
    """
    width, block_size = batch.max_blocks_per_req, cache.block_size
    table = batch.block_table
    kv_len = batch.kv_lens(block_size)
    q_len = batch.query_lens
    active = (q_len > 0) & (kv_len > 0)
    column = jnp.arange(width, dtype=jnp.int32)
    differs = (table != table[:1]) | (table < 0) | (table >= cache.num_blocks)
    # By request first: XLA does it together with the search for blocks out of range, which plans need.
    blocks = jnp.min(jnp.where(differs, column, width), axis=1)
    blocks = jnp.where(active, jnp.minimum(blocks, (kv_len - q_len) // block_size), width)
    shared = jnp.where(active[0], jnp.maximum(jnp.min(blocks), 0), 0)
    return Prefix(shared * block_size // tile * tile, table)


def prefix_shape(query: Any, cache: KVCache, options: AttentionOptions, gpu: Gpu) -> PrefillShape:
    """The prefill kernel for the rows of a batch as one request's, in parts that keep all CTAs busy."""
    num_tokens, num_heads, _ = query.shape
    one = PagedBatch(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(2, jnp.int32), None, None)
    base = prefill_config(query, cache, one, options, query.dtype, return_lse=True, batch_invariant=False, gpu=gpu)
    # Tiles of all heads of a group leave less of the last tile empty.
    packed = can_be_packed(base.group)
    tokens = packed_tokens(base.group) if packed else TILE_ROWS
    items = -(-num_tokens // tokens) * (cache.num_kv_heads if packed else num_heads)

    def turns(parts: int) -> float:
        """How long it takes, in units of a tile; each part has a small cost of its own."""
        return -(-items * parts // gpu.num_sms) / parts + 0.002 * parts

    tiling = dataclasses.replace(
        base.tiling, tokens=tokens, packed=packed, most_parts=min(range(1, MOST_PARTS + 1), key=turns)
    )
    return dataclasses.replace(base, tiling=tiling, half_steps=False, windowed=True, return_lse=True, in_parts=True)


def plan_prefix(shape: PrefillShape, prefix: Prefix) -> PrefillPlan:
    """The plan of prefill, all but the prefix's length known beforehand: items in turn to the CTAs."""
    tiling, num_tokens = shape.tiling, shape.num_tokens
    tiles, parts = _num_tiles(shape), tiling.most_parts
    heads = shape.dims.num_kv_heads * (1 if tiling.packed else shape.group)
    # The tiles of a part of a head's keys are neighbours, so that they read them at one time. A short prefix leaves
    # parts without steps: they come last.
    item = np.arange(tiles * parts * heads, dtype=np.int32)
    tile, head, part = item % tiles, item // tiles % heads, item // (tiles * heads)
    steps = prefix.tokens // tiling.step
    size = -(-steps // parts)
    fields = {
        field.FIRST_ROW: tile * tiling.tokens,
        field.ROWS: np.minimum(num_tokens - tile * tiling.tokens, tiling.tokens),
        field.FIRST_POS: prefix.tokens,
        field.REQUEST: 0,
        field.KV_LEN: prefix.tokens,
        field.HEAD: head,
        field.FIRST_STEP: part * size,
        field.STEPS: jnp.clip(steps - part * size, 0, size),
        field.TILE: tile * parts + part,
    }
    rows = [jnp.broadcast_to(jnp.asarray(fields[f], jnp.int32), item.shape) for f in range(field.NUM_FIELDS)]
    room = -(-item.size // tiling.num_ctas)
    padding = room * tiling.num_ctas - item.size
    work = jnp.pad(jnp.stack(rows, axis=1), ((0, padding), (0, 0))).reshape(room, tiling.num_ctas, field.NUM_FIELDS)
    counts = np.bincount(item % tiling.num_ctas, minlength=tiling.num_ctas).astype(np.int32)
    starts = jnp.array([0, tiles], jnp.int32)
    return PrefillPlan(work.swapaxes(0, 1), jnp.asarray(counts), starts, jnp.int32(parts))


def attend_to_prefix(
    query: Any,
    cache: KVCache,
    prefix: Prefix,
    options: AttentionOptions,
    shape: PrefillShape,
    interpret: Interpreter | None,
) -> tuple[Any, Any]:
    """The lses and outputs of every row's attention to the prefix, in parts, as `prefill` returns them."""
    starts = jnp.array([0, query.shape[0]], jnp.int32)
    batch = PagedBatch(prefix.table, prefix.tokens[None], starts, None, None)
    options = dataclasses.replace(options, causal=False, sinks=None)
    unused = jax.new_ref(jax.lax.empty((1, 1, cache.v_head_size), shape.out_dtype))
    return prefill(query, cache, batch, plan_prefix(shape, prefix), options, shape, unused, interpret)[:2]


def merged_with_prefix(
    part_lse: Any, part_out: Any, shape: PrefillShape, lse: Any, out: Any, attends: Any, sinks: Any
) -> tuple[Any, Any]:
    """The output [num_tokens, num_heads, v_head_size] float32, and the lse [num_heads, num_tokens], of whole requests.

    With the parts unrolled, and lses broadcast before they are brought in order, all is element by element: one kernel
    of XLA's.

    Args:
      part_lse, part_out: the state of the prefix in parts; see `attend_to_prefix`.
      lse, out: that of the rest [num_tokens, num_heads] in units of log 2 and [num_tokens, num_heads, v_head_size].
      attends: [num_tokens] bool, false for rows that have 0 as result, whatever the states say.
    """
    width = shape.dims.v_head_size
    outs = [*_by_row(part_out, shape, width), out]
    part_lse, lse = (jnp.broadcast_to(x[..., None], (*x.shape, width)) for x in (part_lse, lse))
    lses = [*_by_row(part_lse, shape, width), lse]
    lses = [jnp.where(attends[:, None, None], x, -jnp.inf) for x in lses]
    peak = functools.reduce(jnp.maximum, lses)
    empty = peak == -jnp.inf
    shift = jnp.where(empty, 0.0, peak)
    weights = [jnp.exp2(x - shift) for x in lses]
    total = functools.reduce(jnp.add, weights)
    share = jnp.where(empty, 0.0, 1.0 / total)
    merged_lse = jnp.where(empty, -jnp.inf, shift + jnp.log2(total)) * LN2
    if sinks is not None:
        share = jnp.where(empty, 0.0, share * jax.nn.sigmoid(merged_lse - sinks.astype(jnp.float32)[:, None]))
    terms = [jnp.where(w == 0, 0.0, o * (w * share)) for w, o in zip(weights, outs, strict=True)]
    return functools.reduce(jnp.add, terms), merged_lse[..., 0].T


def _num_tiles(shape: PrefillShape) -> int:
    return -(-shape.num_tokens // shape.tiling.tokens)


def _by_row(of_tiles: Any, shape: PrefillShape, width: int) -> list[Any]:
    """[tiles * parts, heads of the plan, 2 * WG_ROWS, ..] as [num_tokens, num_heads, width] for each part."""
    tiling = shape.tiling
    tiles, parts = _num_tiles(shape), tiling.most_parts
    slots = TILE_ROWS // tiling.tokens
    heads = of_tiles.shape[1]
    x = of_tiles[: tiles * parts].reshape(tiles, parts, heads, slots, tiling.tokens, -1)
    x = x[:, :, :, : shape.group if tiling.packed else 1, :, :width].transpose(1, 0, 4, 2, 3, 5)
    x = x.reshape(parts, tiles * tiling.tokens, -1, width)
    return [x[part, : shape.num_tokens] for part in range(parts)]
