"""The plan of decode by one kernel, which unlike XLA's program can be launched on any stream and captured in a graph.

The arrays are those of `plan_decode`, bit for bit. A CTA a request, and one for the rows of no request: each adds up
the tiles of all requests by itself, which is faster than waiting for another, and writes its own request's row and the
ends of those shares that lie in it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.batch_dims import BatchDims, BatchRefs
from jaxpaged.pallas.decode_plan import (
    BEGIN,
    NUM_FIELDS,
    Q_LEN,
    Q_START,
    SHARE_FIELDS,
    TILES,
    DecodePlan,
    plan_shapes,
    tiles_of_requests,
)
from jaxpaged.pallas.lanes import WARPGROUP, constant, indices, scatter, whole
from jaxpaged.pallas.mosaic import Interpreter, kernel
from jaxpaged.pallas.ranges import ceil_div, div
from jaxpaged.reference.attention import AttentionOptions


@dataclasses.dataclass(frozen=True)
class DecodeCut:
    """How requests are cut into tiles and shares: the arguments of `plan_decode` of the same names."""

    options: AttentionOptions
    num_tokens: int
    max_query_len: int
    tile: int
    num_shares: int
    min_tiles: int
    others_elsewhere: bool
    batch_invariant: bool


def plan_decode_by_kernel(
    cache: KVCache, batch: PagedBatch, cut: DecodeCut, *, interpret: Interpreter | None, num_tokens: Any = None
) -> DecodePlan:
    """`plan_decode`, without a mask function and with nothing to skip.

    Args:
      num_tokens: [1] int32, how many tokens there are, where the query has room for more and others are elsewhere; None
        for as many as the cut says.
    """
    num_reqs = batch.num_reqs
    num_shares = num_reqs if cut.batch_invariant else cut.num_shares
    dims = dataclasses.replace(BatchDims.of(cache, batch), rows=cut.num_tokens)
    requests, shares = kernel(
        functools.partial(_plan, cut, dims, interpret),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in plan_shapes(num_reqs, num_shares)],
        grid=(num_reqs + 1,),
        grid_names=("request",),
        interpret=interpret,
        kernel_name="paged_decode_plan",
    )(*(x for x in (batch.block_table, batch.seq_lens, batch.query_start_loc, num_tokens) if x is not None))
    return DecodePlan(requests, shares)


MOST_SUMMED = 8 * WARPGROUP
"""Requests whose tiles are summed at a time."""


def _plan(cut: DecodeCut, dims: BatchDims, interpret: Interpreter | None, *refs: Any) -> None:
    """The kernel."""
    *given, requests, shares = refs
    table, lens, starts, *num_tokens = given
    batch = BatchRefs(table, lens, starts, num_tokens=num_tokens[0] if num_tokens else None)
    me = lax.axis_index("request")
    # The CTA of the rows of no request looks at the last request's blocks for nothing.
    first_blocks = dims.bad_blocks(batch, jnp.minimum(me, dims.num_reqs - 1), interpret)
    begin, total = _sums(cut, dims, batch, me, interpret)
    size = jnp.maximum(ceil_div(total, cut.num_shares), cut.min_tiles)

    @pl.when(me < dims.num_reqs)
    def _() -> None:
        start, q_len, kv_len = dims.len_of(batch, me)
        short, first_tile, tiles = tiles_of_requests(cut.options, q_len, kv_len, cut.max_query_len, cut.tile)
        end = begin + tiles
        rows = jnp.where(short, q_len, -1) if cut.others_elsewhere else q_len
        damaged = dims.damaged(batch, me, kv_len, first_blocks, interpret)
        bounds = (me, me) if cut.batch_invariant else (div(begin, size), jnp.where(end > 0, div(end - 1, size), -1))
        row = (begin, tiles, first_tile, kv_len, start, rows, damaged, *bounds)
        for column, x in enumerate(row):
            requests[me, column] = x
        if cut.batch_invariant:
            for column, x in enumerate((me, me, begin, end, *row)):
                shares[me, column] = x
        else:
            _write_shares(shares, me, row, size, total, cut.num_shares, interpret)

    @pl.when(me == dims.num_reqs)
    def _() -> None:
        start = dims.known_row(batch, batch.query_start_loc[dims.num_reqs])
        row = [jnp.int32(0)] * NUM_FIELDS
        row[Q_START] = start
        row[Q_LEN] = jnp.int32(-1) if cut.others_elsewhere else cut.num_tokens - start
        for column, x in enumerate(row):
            requests[me, column] = x
        if not cut.batch_invariant:
            _write_empty_shares(shares, dims.num_reqs, row, size, total, cut.num_shares, interpret)


def _sums(cut: DecodeCut, dims: BatchDims, batch: BatchRefs, me: Any, interpret: Interpreter | None) -> tuple[Any, Any]:
    """Tiles of the requests before one, and of all."""
    at_once = min(whole(dims.num_reqs), MOST_SUMMED)
    place = indices(at_once)

    def add(i: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
        request = place + i * at_once
        known = jnp.minimum(request, dims.num_reqs - 1)
        _, q_len, kv_len = dims.lens(batch, known, interpret)
        _, _, tiles = tiles_of_requests(cut.options, q_len, kv_len, cut.max_query_len, cut.tile)
        tiles = jnp.where(request < dims.num_reqs, tiles, 0)
        return sums[0] + jnp.where(request < me, tiles, 0), sums[1] + tiles

    zeros = constant(at_once, 0)
    before, all_of_them = lax.fori_loop(0, pl.cdiv(dims.num_reqs, at_once), add, (zeros, zeros))
    return jnp.sum(before), jnp.sum(all_of_them)


def _bounds(size: Any, total: Any, num_shares: int) -> tuple[Any, Any, Any]:
    """Vectors of the shares' numbers, and of their first tile and the one after the last."""
    share = indices(whole(num_shares))
    lower = jnp.minimum(share * size, total)
    return share, lower, jnp.minimum(lower + size, total)


def _write_shares(
    shares: Any,
    request: Any,
    row: Sequence[Any],
    size: Any,
    total: Any,
    num_shares: int,
    interpret: Interpreter | None,
) -> None:
    """Write the rows of shares that begin in the tiles of a request, and the last request of those that end in them.

    Args:
      row: of the request.
    """
    share, lower, upper = _bounds(size, total, num_shares)
    begin, end = row[BEGIN], row[BEGIN] + row[TILES]
    known, number = share < num_shares, constant(share.shape[0], request)
    begins = known & (lower >= begin) & (lower < end)
    ends = known & (upper > begin) & (upper <= end) & (upper > lower)
    scatter(shares.at[:, pl.ds(0, 1)], [share], [number], begins, interpret)
    scatter(shares.at[:, pl.ds(1, 1)], [share], [number], ends, interpret)
    fields = [constant(share.shape[0], x) for x in row]
    scatter(shares.at[:, pl.ds(2, SHARE_FIELDS - 2)], [share], [lower, upper, *fields], begins, interpret)


def _write_empty_shares(
    shares: Any,
    num_reqs: int,
    row: Sequence[Any],
    size: Any,
    total: Any,
    num_shares: int,
    interpret: Interpreter | None,
) -> None:
    """Write the rows of shares for which no tile is left; `row` is that of no request."""
    share, lower, upper = _bounds(size, total, num_shares)
    empty = (share < num_shares) & (lower >= total)
    n = share.shape[0]
    requests = [constant(n, num_reqs), constant(n, num_reqs - 1)]
    scatter(shares, [share], [*requests, lower, upper, *(constant(n, x) for x in row)], empty, interpret)
