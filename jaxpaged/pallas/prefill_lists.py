"""What every CTA of the kernel that plans prefill works out for itself, in shared memory: the batch's requests, its
tiles, and the groups in which they are worked on."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.pallas.batch_dims import BatchDims, BatchRefs
from jaxpaged.pallas.lanes import MOST_SCANNED, WARPGROUP, gather, indices, last_at_most, prefix_sum, scatter, whole
from jaxpaged.pallas.mosaic import Interpreter, store
from jaxpaged.pallas.prefill_plan import (
    MAX_GROUPS,
    MOST_STEPS,
    UNIT,
    PrefillTiling,
    cut_tile,
    group_units,
    most_tiles,
    number_of_parts,
    steps_of_part,
)
from jaxpaged.pallas.ranges import ceil_div, div
from jaxpaged.reference.attention import AttentionOptions


class Requests(NamedTuple):
    """Of each request, of the rows of no request as one more, and of the end, int32: the first tile, the units of keys
    and values before its own, its own, and its first row, new tokens and positions."""

    first_tile: Any
    first_unit: Any
    units: Any
    first_row: Any
    q_len: Any
    kv_len: Any


class Pieces(NamedTuple):
    """Of each piece, a tile or a part of one, int32: its steps, as far as they count for the order, how many pieces
    with steps come before, and its request."""

    cost: Any
    worked_before: Any
    request: Any


class Groups(NamedTuple):
    """Of each group, int32. The pairs of a request and a head that belong to it begin in a request: that one's first
    piece, the next request's, the pair's head, and how many items with steps (of a piece and a kv head) come before.
    Of its items, dealt out in turns: the whole turns of the groups before, what is left for a last turn of its own,
    whether that one runs backwards, and the list at which turns begin."""

    first_piece: Any
    next_piece: Any
    head: Any
    items_before: Any
    turns_before: Any
    rest: Any
    backward: Any
    first_list: Any

    def in_rest(self, group: Any, target: Any, num_lists: int) -> Any:
        """1 for lists that get an item in a group's last turn, else 0."""
        return _in_rest(self.rest[group], self.backward[group], self.first_list[group], target, num_lists)


class Sizes(NamedTuple):
    """Numbers that are found on the way: of pieces, parts of a tile, pieces with steps, and units that make a group."""

    pieces: Any
    parts: Any
    worked: Any
    group_units: Any


@dataclasses.dataclass(frozen=True)
class PrefillLists:
    """How to make the lists: the arguments of `plan_prefill` of the same names.

    Attributes:
      heads: kv heads.
      per_pair: query heads that are tiles of their own, of each kv head.
      least_units: see `group_units`.
    """

    dims: BatchDims
    options: AttentionOptions
    tiling: PrefillTiling
    num_tokens: int
    heads: int
    per_pair: int
    shortest: int
    least_units: int

    @property
    def most_tiles(self) -> int:
        return most_tiles(self.num_tokens, self.dims.num_reqs, self.tiling)

    @property
    def most_pieces(self) -> int:
        return self.most_tiles * self.tiling.most_parts

    @property
    def requests_at_once(self) -> int:
        return min(whole(self.dims.num_reqs + 2), MOST_SCANNED)

    @property
    def pieces_at_once(self) -> int:
        return min(whole(self.most_pieces + 1), MOST_SCANNED)

    def scratch(self) -> dict[str, Any]:
        """Shared memory for the lists."""

        def lists(kind: Any, least: int, at_once: int) -> Any:
            size = pl.cdiv(least, at_once) * at_once
            return kind(*(plgpu.SMEM((size,), jnp.int32) for _ in kind._fields))

        return {
            "requests": lists(Requests, self.dims.num_reqs + 2, self.requests_at_once),
            "pieces": lists(Pieces, self.most_pieces + 1, self.pieces_at_once),
            "groups": lists(Groups, MAX_GROUPS + 1, WARPGROUP),
            "sums": plgpu.SMEM((max(self.requests_at_once, self.pieces_at_once) + WARPGROUP,), jnp.int32),
        }

    @property
    def smem_bytes(self) -> int:
        shapes = [x for kind in self.scratch().values() for x in (kind if isinstance(kind, tuple) else (kind,))]
        return sum(4 * x.shape[0] + 1024 for x in shapes)  # refs begin at multiples of 1024 bytes

    def fill_requests(
        self, batch: BatchRefs, lists: Requests, sums: Any, tile_starts: Any, writes: Any, interpret: Interpreter | None
    ) -> tuple[Any, Any]:
        """Fill the list of requests; return the numbers of tiles and of units.

        Args:
          tile_starts: [num_reqs + 1, 1] int32 in global memory, which the CTA for which `writes` holds writes.
        """
        num_reqs, at_once = self.dims.num_reqs, self.requests_at_once
        there = self.dims.reqs_there(batch)
        num_tokens = self.num_tokens if batch.num_tokens is None else batch.num_tokens[0]
        end = batch.query_start_loc[there]
        end = end if batch.num_tokens is None else jnp.minimum(end, num_tokens)

        def fill(i: Any, before: tuple[Any, Any]) -> tuple[Any, Any]:
            request = indices(at_once) + i * at_once
            real, none = request < there, request == num_reqs
            first_row, q_len, kv_len = self.dims.lens(batch, jnp.minimum(request, there - 1), interpret)
            first_row = jnp.where(real, first_row, end)
            q_len = jnp.where(real, q_len, jnp.maximum(num_tokens - end, 0))
            kv_len = jnp.where(real, kv_len, 0)
            tiles = jnp.where(none | (real & (q_len >= self.shortest)), ceil_div(q_len, self.tiling.tokens), 0)
            units = ceil_div(jnp.maximum(kv_len, 0), UNIT)
            tile_sums, all_tiles = prefix_sum(tiles, sums, interpret)
            unit_sums, all_units = prefix_sum(units, sums, interpret)
            first_tile = before[0] + tile_sums - tiles
            found = Requests(first_tile, before[1] + unit_sums - units, units, first_row, q_len, kv_len)
            _store(lists, found, i * at_once)
            scatter(tile_starts, [request], [first_tile], writes & (request <= num_reqs), interpret)
            return before[0] + all_tiles, before[1] + all_units

        zero = jnp.int32(0)
        totals = lax.fori_loop(0, pl.cdiv(num_reqs + 2, at_once), fill, (zero, zero))
        plgpu.commit_smem()
        return totals

    def cut_piece(self, requests: Requests, request: Any, piece: Any, parts: Any, read: Any) -> tuple[Any, ...]:
        """Of a piece: its tile and part; first row in the request, number of rows, position of the first; first step
        and number of steps.

        Args:
          read: looks an index up in a list.
        """
        tile = piece if self.tiling.most_parts == 1 else div(piece, parts)
        index = tile - read(requests.first_tile, request)
        q_len, kv_len = read(requests.q_len, request), read(requests.kv_len, request)
        *rows, first_step, steps = cut_tile(self.options, self.tiling, q_len, kv_len, index)
        part = piece - tile * parts
        skipped, steps = steps_of_part(steps, part, parts)
        return tile, part, *rows, first_step + skipped, steps

    def fill_pieces(
        self, requests: Requests, tiles: Any, units: Any, lists: Pieces, sums: Any, interpret: Interpreter | None
    ) -> Sizes:
        """Fill the list of pieces, given the number of tiles and of units."""
        at_once = self.pieces_at_once
        tiles = jnp.minimum(tiles, self.most_tiles)
        parts = number_of_parts(self.tiling, tiles * (self.heads * self.per_pair))
        pieces = tiles * parts

        def look_up(ref: Any, index: Any) -> Any:
            return gather(ref, index, interpret)

        def fill(i: Any, before: Any) -> Any:
            piece = indices(at_once) + i * at_once
            tile = piece if self.tiling.most_parts == 1 else div(piece, parts)
            request = last_at_most(requests.first_tile, tile, self.dims.num_reqs + 1, interpret)
            steps = self.cut_piece(requests, request, piece, parts, look_up)[-1]
            cost = jnp.where(piece < pieces, jnp.minimum(steps, MOST_STEPS), 0)
            worked = jnp.where(cost > 0, 1, 0)
            worked_sums, all_worked = prefix_sum(worked, sums, interpret)
            _store(lists, Pieces(cost, before + worked_sums - worked, request), i * at_once)
            return before + all_worked

        # The end is looked up, too.
        worked = lax.fori_loop(0, ceil_div(pieces + 1, at_once), fill, jnp.int32(0))
        plgpu.commit_smem()
        return Sizes(pieces, parts, worked, group_units(self.least_units, self.heads, units))

    def fill_groups(
        self,
        requests: Requests,
        pieces: Pieces,
        sizes: Sizes,
        lists: Groups,
        sums: Any,
        me: Any,
        interpret: Interpreter | None,
    ) -> Any:
        """Fill the list of groups; return the length of one of prefill's lists, `me`."""
        heads, num_lists = self.heads, self.tiling.num_ctas
        group = indices(WARPGROUP)
        first_unit = jnp.minimum(group, MAX_GROUPS) * sizes.group_units  # of all heads
        request = last_at_most(requests.first_unit, div(first_unit, heads), self.dims.num_reqs + 1, interpret)
        units = jnp.maximum(gather(requests.units, request, interpret), 1)
        skipped = first_unit - heads * gather(requests.first_unit, request, interpret)
        head = jnp.minimum(ceil_div(skipped, units), heads)
        bounds = [gather(requests.first_tile, request + i, interpret) * sizes.parts for i in range(2)]
        first_piece, next_piece = (jnp.minimum(x, sizes.pieces) for x in bounds)
        worked, next_worked = (gather(pieces.worked_before, x, interpret) for x in (first_piece, next_piece))
        items_before = heads * worked + head * (next_worked - worked)
        _store(lists[:4], (first_piece, next_piece, head, items_before), 0)
        plgpu.commit_smem()
        items = gather(lists.items_before, jnp.minimum(group + 1, MAX_GROUPS), interpret) - items_before
        items += jnp.where(group == MAX_GROUPS - 1, heads * (sizes.pieces - sizes.worked), 0)
        items = jnp.where(group < MAX_GROUPS, items, 0) * self.per_pair
        turns = div(items, num_lists)
        rest, backward = items - turns * num_lists, lax.rem(turns, jnp.int32(2))
        # A group's last, partial turn runs backwards if it is an odd one; the next group starts at the lists left out.
        moved = jnp.where(backward == 0, rest, -rest)
        moved_before = prefix_sum(moved, sums, interpret)[0] - moved
        first_list = lax.rem(moved_before + MAX_GROUPS * num_lists, jnp.int32(num_lists))
        turns_before = prefix_sum(turns, sums, interpret)[0] - turns
        _store(lists[4:], (turns_before, rest, backward, first_list), 0)
        plgpu.commit_smem()
        return jnp.sum(turns + _in_rest(rest, backward, first_list, me, num_lists))


def _in_rest(rest: Any, backward: Any, first_list: Any, target: Any, num_lists: int) -> Any:
    place = target - first_list
    place = jnp.where(place < 0, place + num_lists, place)
    place += backward * (num_lists - 1 - 2 * place)  # a scalar can't select among vectors
    return jnp.where(place < rest, 1, 0)


def _store(lists: Any, vectors: Any, first: Any) -> None:
    """Store vectors into lists from a place on."""
    for ref, x in zip(lists, vectors, strict=True):
        store(ref.at[pl.ds(first, x.shape[0])], x)
