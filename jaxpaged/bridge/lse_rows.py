"""From the lses that the kernels leave by tiles and by requests to rows of the query, by PyTorch, when asked for."""

import math

import torch

from jaxpaged.pallas import decode_plan as field
from jaxpaged.pallas.decode import DecodeShape
from jaxpaged.pallas.prefill import WG_ROWS, PrefillShape

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


def decoded_lse(
    whole: torch.Tensor,
    merged: torch.Tensor,
    requests: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    shape: DecodeShape,
) -> torch.Tensor:
    """Natural lses [num_tokens, num_heads] from those of requests, -inf for rows that decode finds nothing for.

    Args:
      whole, merged: what `kernel_functions.decode_with_lse` returns.
      requests: of `DecodePlan`.
      rows: what `row_requests` gave.
    """
    request, index = rows
    in_parts = requests[:-1, field.FIRST_SHARE] < requests[:-1, field.LAST_SHARE]
    by_column = torch.where(in_parts[:, None, None], merged, whole)[request.clamp(max=len(whole) - 1)]
    token = index.clamp(0, shape.max_query_len - 1)
    column = token[:, None] * shape.group + torch.arange(shape.group, device=whole.device)
    lse = torch.gather(by_column, 2, column[:, None].expand(-1, by_column.shape[1], -1)).flatten(1)
    attends = requests[request, field.TILES] > 0
    return torch.where(attends[:, None], lse * _LN2, -torch.inf)


def decoded_rows(requests: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[num_tokens] bool: which rows a plan leaves to decode, in a batch that has others, too."""
    return requests[rows[0], field.Q_LEN] >= 0
