"""The pieces of requests in a CTA's share."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxpaged.pallas import decode_plan as field
from jaxpaged.pallas.decode_parts import own_share
from jaxpaged.pallas.decode_shape import DecodeShape
from jaxpaged.pallas.decode_state import Operands, Piece, Turn


def for_each_piece(shape: DecodeShape, operands: Operands, body: Any) -> tuple[Any, Any, Any]:
    """Call `body(piece, number of pieces before, number of tiles before)` for each piece of this CTA's share.

    Returns:
      The numbers of pieces, of tiles, and of others' parts, which only the last piece has.
    """
    share = own_share(shape)
    first, last, lower, upper, *first_row = (operands.shares[share, i] for i in range(field.SHARE_FIELDS))

    def visit(request: Any, before: tuple[Any, ...]) -> tuple[Any, ...]:
        pieces, tiles, others, *row = before
        begin = row[field.BEGIN]
        skipped = jnp.maximum(lower - begin, 0)
        count = jnp.maximum(jnp.minimum(upper - begin, row[field.TILES]) - skipped, 0)
        if operands.turn is not None:
            count = jnp.where((skipped == 0) == (operands.turn is Turn.BEGINNING), count, 0)
        piece = Piece(
            request,
            row[field.FIRST_TILE] + skipped,
            count,
            skipped == 0,
            jnp.where(skipped == 0, row[field.LAST_SHARE] - share, 0),
            *(row[f] for f in (field.KV_LEN, field.Q_START, field.Q_LEN, field.DAMAGED)),
        )
        pl.when(count > 0)(lambda: body(piece, pieces, tiles))
        following = (operands.requests[request + 1, f] for f in range(field.NUM_FIELDS))
        some = count > 0
        return pieces + jnp.where(some, 1, 0), tiles + count, others + jnp.where(some, piece.others, 0), *following

    return lax.fori_loop(first, last + 1, visit, (*(jnp.int32(0),) * 3, *first_row))[:3]
