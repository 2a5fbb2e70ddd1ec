"""From the lses that prefill leaves by tiles to rows of the query, by PyTorch, when asked for."""

import math

import torch

from jaxpaged.pallas import decode_plan as field
from jaxpaged.pallas.prefill_shape import WG_ROWS, PrefillShape

_LN2 = math.log(2)


def row_requests(query_start_loc: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_tokens] int64 each: every row's request, `num_reqs` for rows of none, and its index in it."""
    token = torch.arange(num_tokens, device=query_start_loc.device)
    request = torch.bucketize(token, query_start_loc[1:], right=True)
    return request, token - query_start_loc[request]


def prefilled_lse(
    of_tiles: torch.Tensor, tile_starts: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], shape: PrefillShape
) -> torch.Tensor:
    """Natural lses [num_tokens, num_heads] from those of tiles; rows of no tile get anything.

    Args:
      of_tiles: [most tiles, heads of the plan, 2 * WG_ROWS] float32 in units of log 2.
      tile_starts: see `PrefillPlan`.
      rows: what `row_requests` gave.
    """
    (request, index), tiling = rows, shape.tiling
    tile = torch.clamp(tile_starts[request] + index // tiling.tokens, max=of_tiles.shape[0] - 1)
    token = index % tiling.tokens
    if not tiling.packed or shape.splits_tokens:
        return of_tiles[tile, :, token] * _LN2
    head = torch.arange(shape.group, device=of_tiles.device)
    slot = head // shape.heads_per_wg * WG_ROWS + head % shape.heads_per_wg * shape.wg_tokens
    lse = of_tiles[tile[:, None], :, slot + token[:, None]]  # [num_tokens, group, num_kv_heads]
    return lse.transpose(1, 2).reshape(len(token), -1) * _LN2


def decoded_rows(requests: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[num_tokens] bool: which rows a plan leaves to decode, in a batch that has others, too."""
    return requests[rows[0], field.Q_LEN] >= 0
