"""The plan of prefill by one kernel, which unlike XLA's program can be launched on any stream and captured in a graph.

The arrays are those of `plan_prefill`, bit for bit. Nothing is sorted: an item's place in the order is the number of
those before it. These are of pieces that lie side by side in a list, since a group is a run of pairs of a request and a
head. Each CTA makes that list by itself, and then writes the items of a few pieces.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas import prefill_plan as field
from jaxpaged.pallas.batch_dims import BatchDims, BatchRefs
from jaxpaged.pallas.lanes import WARPGROUP, constant, gather, indices, scatter, whole
from jaxpaged.pallas.mosaic import Interpreter, kernel
from jaxpaged.pallas.prefill_lists import Groups, Pieces, PrefillLists, Requests, Sizes
from jaxpaged.pallas.prefill_plan import (
    MAX_GROUPS,
    MOST_REQUESTS,
    NUM_FIELDS,
    PrefillPlan,
    PrefillTiling,
    least_group_units,
    most_items,
)
from jaxpaged.pallas.ranges import ceil_div, div
from jaxpaged.reference.attention import AttentionOptions

CTAS_PER_LIST = 4
"""CTAs of this kernel for each one of prefill's, at most: a multiprocessor has room for about so many."""
MOST_COMPARED = 4 * WARPGROUP
"""Pieces that a piece is compared with at a time."""


def plan_prefill_by_kernel(
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    tiling: PrefillTiling,
    *,
    num_tokens: int,
    num_heads: int,
    shortest: int,
    interpret: Interpreter | None,
    there: tuple[Any, Any] = (None, None),
) -> PrefillPlan:
    """`plan_prefill`, without a mask function, if `lists_of` fits in shared memory.

    Args:
      there: [1] int32 each, how many requests and tokens there are, which may be fewer than a program has room for.
    """
    lists = lists_of(cache, batch, options, tiling, num_tokens=num_tokens, num_heads=num_heads, shortest=shortest)
    num_lists = tiling.num_ctas
    room = most_items(num_tokens, batch.num_reqs, tiling, lists.heads * lists.per_pair)
    shapes = ((num_lists, room, NUM_FIELDS), (num_lists,), (batch.num_reqs + 1, 1), (1,))
    ctas = max(num_lists, min(lists.most_pieces, CTAS_PER_LIST * num_lists))
    operands = [x for x in (batch.block_table, batch.seq_lens, batch.query_start_loc, *there) if x is not None]
    work, counts, tile_starts, parts = kernel(
        functools.partial(_plan, lists, ctas, interpret, len(operands)),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types=lists.scratch(),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="paged_prefill_plan",
    )(*operands)
    return PrefillPlan(work, counts, tile_starts.reshape(-1), parts.reshape(()))


def lists_of(
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    tiling: PrefillTiling,
    *,
    num_tokens: int,
    num_heads: int,
    shortest: int,
) -> PrefillLists:
    """What the kernel keeps in shared memory for a plan."""
    return PrefillLists(
        dims=BatchDims.of(cache, batch),
        options=options,
        tiling=tiling,
        num_tokens=num_tokens,
        heads=cache.num_kv_heads,
        per_pair=1 if tiling.packed else num_heads // cache.num_kv_heads,
        shortest=shortest,
        least_units=least_group_units(cache, tiling),
    )


class _Known(NamedTuple):
    """What a CTA knows when it starts to write items."""

    batch: BatchRefs
    requests: Requests
    pieces: Pieces
    groups: Groups
    sizes: Sizes
    work: Any


class _Piece(NamedTuple):
    """A piece that is being written: its number, its steps as far as they count for the order, its fields but for
    `HEAD`, and the units of all heads and requests before its request's, and of a head of it."""

    number: Any
    cost: Any
    fields: dict[int, Any]
    first_unit: Any
    units: Any

    def group(self, head: Any, sizes: Sizes) -> Any:
        """The group of a kv head."""
        return div(self.first_unit + head * self.units, sizes.group_units)


def _plan(
    lists: PrefillLists,
    ctas: int,
    interpret: Interpreter | None,
    num_operands: int,
    *refs: Any,
    requests: Requests,
    pieces: Pieces,
    groups: Groups,
    sums: Any,
) -> None:
    """The kernel."""
    batch, (work, counts, tile_starts, parts) = BatchRefs(*refs[:num_operands]), refs[num_operands:]
    me = lax.axis_index("cta")
    totals = lists.fill_requests(batch, requests, sums, tile_starts, me == 0, interpret)
    sizes = lists.fill_pieces(requests, *totals, pieces, sums, interpret)
    count = lists.fill_groups(requests, pieces, sizes, groups, sums, me, interpret)

    @pl.when(me == 0)
    def _() -> None:
        parts[0] = sizes.parts

    @pl.when(me < lists.tiling.num_ctas)
    def _() -> None:
        counts[me] = count
        _clear(work, me, count, interpret)

    known = _Known(batch, requests, pieces, groups, sizes, work)

    def write(i: Any, _: None) -> None:
        _write_piece(lists, known, me + i * ctas, interpret)

    lax.fori_loop(0, ceil_div(jnp.maximum(sizes.pieces - me, 0), ctas), write, None)


def _clear(work: Any, me: Any, count: Any, interpret: Interpreter | None) -> None:
    """Write zeros to a list's room past its items."""
    room = work.shape[1]
    mine, zero, place = constant(WARPGROUP, me), constant(WARPGROUP, 0), indices(WARPGROUP)

    def clear(i: Any, _: None) -> None:
        slot = count + i * WARPGROUP + place
        scatter(work, [mine, slot], [zero] * NUM_FIELDS, slot < room, interpret)

    lax.fori_loop(0, ceil_div(room - count, WARPGROUP), clear, None)


def _write_piece(lists: PrefillLists, known: _Known, number: Any, interpret: Interpreter | None) -> None:
    """Write a piece's items, group by group."""
    requests, request = known.requests, known.pieces.request[number]
    table_row = jnp.minimum(request, lists.dims.reqs_there(known.batch) - 1)
    first_blocks = lists.dims.bad_blocks(known.batch, table_row, interpret)
    tile, part, first, rows, first_pos, first_step, steps = lists.cut_piece(
        requests, request, number, known.sizes.parts, lambda ref, index: ref[index]
    )
    kv_len = requests.kv_len[request]
    damaged = lists.dims.damaged(known.batch, table_row, kv_len, first_blocks, interpret)
    fields = {
        field.FIRST_ROW: requests.first_row[request] + first,
        field.ROWS: rows,
        field.FIRST_POS: first_pos,
        field.REQUEST: jnp.where(damaged == 1, table_row | ~jnp.int32(MOST_REQUESTS), table_row),
        field.KV_LEN: kv_len,
        field.FIRST_STEP: first_step,
        field.STEPS: steps,
        field.TILE: tile * lists.tiling.most_parts + part,
    }
    first_unit, units = lists.heads * requests.first_unit[request], requests.units[request]
    # What has no steps comes last: it only clears rows.
    first_unit = jnp.where(steps == 0, (MAX_GROUPS - 1) * known.sizes.group_units, first_unit)
    cost = known.pieces.cost[number]
    piece = _Piece(number, cost, fields, first_unit, jnp.where(steps == 0, 0, units))

    def write(group: Any, _: None) -> None:
        _write_group(lists, known, piece, group, interpret)

    first_group, last_group = (piece.group(head, known.sizes) for head in (0, lists.heads - 1))
    lax.fori_loop(first_group, last_group + 1, write, None)


def _write_group(lists: PrefillLists, known: _Known, piece: _Piece, group: Any, interpret: Interpreter | None) -> None:
    """Write those items of a piece that are in a group."""
    groups, num_lists, per_pair = known.groups, lists.tiling.num_ctas, lists.per_pair
    num_heads = lists.heads * per_pair
    head = indices(whole(num_heads))
    kv_head = div(head, per_pair)
    mine = (head < num_heads) & (piece.group(kv_head, known.sizes) == group)
    rank = _before(lists, known, piece, group, interpret) + kv_head
    item = rank * per_pair + (head - kv_head * per_pair)
    turn = div(item, num_lists)
    place = item - turn * num_lists
    place = jnp.where(lax.rem(turn, jnp.int32(2)) == 0, place, num_lists - 1 - place)
    target = place + groups.first_list[group]
    target = jnp.where(target < num_lists, target, target - num_lists)
    slot = lax.fori_loop(
        0, group, lambda g, slot: slot + groups.in_rest(g, target, num_lists), turn + groups.turns_before[group]
    )
    fields = [head if f == field.HEAD else constant(head.shape[0], piece.fields[f]) for f in range(NUM_FIELDS)]
    scatter(known.work, [target, slot], fields, mine, interpret)


def _before(lists: PrefillLists, known: _Known, piece: _Piece, group: Any, interpret: Interpreter | None) -> Any:
    """How many items (of a piece and a kv head) of a group come before the piece's of head 0, were that one in it."""
    groups, pieces, heads = known.groups, known.pieces, lists.heads
    # The first request of the group lacks some of the first heads, the last one some of the last.
    first, first_end, lacked_first = groups.first_piece[group], groups.next_piece[group], groups.head[group]
    last, end, heads_of_last = groups.first_piece[group + 1], groups.next_piece[group + 1], groups.head[group + 1]
    at_once = min(whole(lists.most_pieces), MOST_COMPARED)
    place = indices(at_once)

    def count(i: Any, found: Any) -> Any:
        other = first + i * at_once + place
        cost = gather(pieces.cost, jnp.minimum(other, lists.most_pieces), interpret)
        earlier = (cost > piece.cost) | ((cost == piece.cost) & (other < piece.number))
        with_heads = heads - jnp.where(other < first_end, lacked_first, 0)
        with_heads -= jnp.where(other >= last, heads - heads_of_last, 0)
        return found + jnp.where(earlier & (other < end), with_heads, 0)

    turns = jnp.where(piece.cost == 0, 0, ceil_div(jnp.maximum(end - first, 0), at_once))
    counted = jnp.sum(lax.fori_loop(0, turns, count, constant(at_once, 0)))
    counted -= jnp.where(piece.number < first_end, lacked_first, 0)
    # Pieces without steps come after all others, in their order.
    with_steps = groups.items_before[MAX_GROUPS] - groups.items_before[MAX_GROUPS - 1]
    without_steps = (piece.number - pieces.worked_before[piece.number]) * heads
    return jnp.where(piece.cost == 0, with_steps + without_steps, counted)
