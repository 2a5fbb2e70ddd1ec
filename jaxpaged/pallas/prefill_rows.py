"""From what prefill leaves for each tile to rows of the query, in XLA."""

from typing import Any

import jax.numpy as jnp

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.pallas.prefill_plan import PrefillPlan
from jaxpaged.pallas.prefill_shape import WG_ROWS, PrefillShape


def row_requests(batch: PagedBatch, num_tokens: int) -> tuple[Any, Any]:
    """[num_tokens] int32 each: every row's request, `num_reqs` for rows of none, and its index in it."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    request = jnp.sum(batch.query_start_loc[1:] <= token[:, None], axis=1, dtype=jnp.int32)
    request = jnp.minimum(request, batch.num_reqs)
    return request, token - batch.query_start_loc[request]


def rows_of_tiles(plan: PrefillPlan, of_tiles: Any, shape: PrefillShape, batch: PagedBatch) -> Any:
    """[tiles, heads of the plan, 2 * WG_ROWS] as [num_tokens, num_heads]; rows of no tile get anything."""
    request, index = row_requests(batch, shape.num_tokens)
    tiling = shape.tiling
    tile, token = plan.tile_starts[request] + index // tiling.tokens, index % tiling.tokens
    if not tiling.packed or shape.splits_tokens:
        return of_tiles[tile, :, token]
    head = jnp.arange(shape.group)
    slot = head // shape.heads_per_wg * WG_ROWS + head % shape.heads_per_wg * shape.wg_tokens
    rows = of_tiles[tile[:, None], :, slot + token[:, None]]  # [num_tokens, group, num_kv_heads]
    return rows.swapaxes(1, 2).reshape(rows.shape[0], -1)
