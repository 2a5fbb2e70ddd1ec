"""From what prefill leaves for each tile to rows of the query, in XLA: lses, and outputs of tiles split into parts."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.pallas.prefill import WG_ROWS, PrefillShape
from jaxpaged.pallas.prefill_plan import PrefillPlan
from jaxpaged.pallas.scores import LN2


def row_requests(batch: PagedBatch, num_tokens: int) -> tuple[Any, Any]:
    """[num_tokens] int32 each: every row's request, `num_reqs` for rows of none, and its index in it."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    request = jnp.sum(batch.query_start_loc[1:] <= token[:, None], axis=1, dtype=jnp.int32)
    request = jnp.minimum(request, batch.num_reqs)
    return request, token - batch.query_start_loc[request]


def rows_of_tiles(plan: PrefillPlan, of_tiles: Any, shape: PrefillShape, batch: PagedBatch) -> Any:
    """[tiles * most parts, heads of the plan, 2 * WG_ROWS, ..] as [num_tokens, most parts, num_heads, ..].

    Rows of no tile get anything.
    """
    request, index = row_requests(batch, shape.num_tokens)
    tiling = shape.tiling
    tile = plan.tile_starts[request] + index // tiling.tokens
    part = (tile * tiling.most_parts)[:, None] + jnp.arange(tiling.most_parts)
    token = (index % tiling.tokens)[:, None]
    if not tiling.packed or shape.splits_tokens:
        return of_tiles[part, :, token]
    head = jnp.arange(shape.group)
    slot = head // shape.heads_per_wg * WG_ROWS + head % shape.heads_per_wg * shape.wg_tokens
    rows = of_tiles[part[..., None], :, slot + token[..., None]]  # [num_tokens, parts, group, num_kv_heads, ..]
    rows = rows.swapaxes(2, 3)
    return rows.reshape(*rows.shape[:2], -1, *rows.shape[4:])


def merged_parts(
    plan: PrefillPlan, part_out: Any, part_lse: Any, sinks: Any, shape: PrefillShape, batch: PagedBatch
) -> tuple[Any, Any]:
    """Outputs [num_tokens, num_heads, v_head_size] float32 and lses [num_heads, num_tokens] of tiles in parts."""
    there = jnp.arange(shape.tiling.most_parts)[:, None] < plan.parts
    lse = jnp.where(there, rows_of_tiles(plan, part_lse, shape, batch), -jnp.inf)
    peak = lse.max(1, keepdims=True)
    weight = jnp.exp2(lse - jnp.where(peak == -jnp.inf, 0.0, peak))
    total = weight.sum(1)
    attended = total > 0
    total = jnp.where(attended, total, 1.0)
    out = rows_of_tiles(plan, part_out, shape, batch)[..., : shape.dims.v_head_size]
    out = jnp.where(weight[..., None] > 0, out * weight[..., None], 0.0).sum(1)
    lse = jnp.where(attended, peak[:, 0] + jnp.log2(total), -jnp.inf) * LN2
    share = 1.0 / total
    if sinks is not None:
        share = jnp.where(attended, share * jax.nn.sigmoid(lse - sinks.astype(jnp.float32)), 0.0)
    return out * share[..., None], lse.T
