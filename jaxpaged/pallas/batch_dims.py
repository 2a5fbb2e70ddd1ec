"""What the kernels that make plans read of a batch."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax import lax

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.lanes import WARPGROUP, gather, indices, whole
from jaxpaged.pallas.mosaic import Interpreter
from jaxpaged.pallas.ranges import ceil_div

MOST_AT_ONCE = 16 * WARPGROUP
"""Columns of a block table that are looked up together: as many as keep memory busy without taking all registers."""


class BatchRefs(NamedTuple):
    """References to a batch's arrays in global memory, in the order in which the kernels take them.

    Attributes:
      num_reqs, num_tokens: [1] int32, how many there are of those that a program has room for; None for all. The other
        arrays need not have more.
    """

    block_table: Any
    seq_lens: Any
    query_start_loc: Any
    num_reqs: Any = None
    num_tokens: Any = None


@dataclasses.dataclass(frozen=True)
class BatchDims:
    """Sizes of a batch and of its cache.

    Attributes:
      rows: of the query; None for as many as the batch says.
    """

    num_reqs: int
    width: int
    block_size: int
    num_blocks: int
    rows: int | None = None

    @classmethod
    def of(cls, cache: KVCache, batch: PagedBatch) -> Self:
        return cls(batch.num_reqs, batch.max_blocks_per_req, cache.block_size, cache.num_blocks)

    def reqs_there(self, refs: BatchRefs) -> Any:
        """How many requests there are."""
        return self.num_reqs if refs.num_reqs is None else refs.num_reqs[0]

    def lens(self, refs: BatchRefs, request: Any, interpret: Interpreter | None) -> tuple[Any, Any, Any]:
        """Vectors of requests' first rows, new tokens, and positions that the block table has room for.

        Args:
          request: [n] int32, below `num_reqs`.
        """
        start, end = (gather(refs.query_start_loc, request + i, interpret) for i in range(2))
        start, end = (self.known_row(refs, x) for x in (start, end))
        return start, end - start, self._kv_len(gather(refs.seq_lens, request, interpret))

    def len_of(self, refs: BatchRefs, request: Any) -> tuple[Any, Any, Any]:
        """`lens` of one request."""
        start, end = (self.known_row(refs, refs.query_start_loc[request + i]) for i in range(2))
        return start, end - start, self._kv_len(refs.seq_lens[request])

    def known_row(self, refs: BatchRefs, start: Any) -> Any:
        """Where rows start, within the query: none may be written that there isn't, whatever the starts say."""
        rows: Any = self.rows if refs.num_tokens is None else refs.num_tokens[0]
        return start if rows is None else jnp.minimum(jnp.maximum(start, 0), rows)

    def _kv_len(self, seq_len: Any) -> Any:
        return jnp.minimum(seq_len, self.width * self.block_size)

    def bad_blocks(self, refs: BatchRefs, request: Any, interpret: Interpreter | None) -> tuple[Any, Any]:
        """Which of the first blocks of a request's row are out of the cache's range, and their columns.

        They are looked up before the request's length is known, so that nothing waits for them.
        """
        column = indices(min(whole(self.width), MOST_AT_ONCE))
        return self._bad(refs, request, column, interpret), column

    def damaged(
        self, refs: BatchRefs, request: Any, kv_len: Any, first: tuple[Any, Any], interpret: Interpreter | None
    ) -> Any:
        """1 where a block that holds the request's tokens is out of range, else 0; see `damaged_requests`.

        Args:
          first: what `bad_blocks` gave.
        """
        bad, column = first

        def used(bad: Any, column: Any) -> Any:
            return jnp.where(column * self.block_size < kv_len, bad, 0)

        def look_up(i: Any, found: Any) -> Any:
            further = column + i * column.shape[0]
            return found | used(self._bad(refs, request, further, interpret), further)

        found, blocks = used(bad, column), ceil_div(jnp.maximum(kv_len, 0), self.block_size)
        if self.width > column.shape[0]:
            found = lax.fori_loop(1, ceil_div(blocks, column.shape[0]), look_up, found)
        return jnp.minimum(jnp.sum(found), 1)

    def _bad(self, refs: BatchRefs, request: Any, column: Any, interpret: Interpreter | None) -> Any:
        block = gather(refs.block_table.at[request], jnp.minimum(column, self.width - 1), interpret)
        return jnp.where((block < 0) | (block >= self.num_blocks), 1, 0)
