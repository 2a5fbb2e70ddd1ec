"""The items of a plan of prefill, which all warpgroups of a CTA walk through, each at its own pace."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxpaged.pallas.prefill_plan import MOST_REQUESTS
from jaxpaged.pallas.prefill_shape import PrefillShape
from jaxpaged.pallas.prefill_state import Operands


class Item(NamedTuple):
    """One item of the plan; what a warp has no use for it does not read, and it takes no registers."""

    first_row: Any
    rows: Any
    first_pos: Any
    request: Any
    kv_len: Any
    head: Any
    first_step: Any
    steps: Any

    @property
    def damaged(self) -> Any:
        """Whether a block of the request is out of range."""
        return self.request < 0

    @property
    def table_row(self) -> Any:
        return self.request & MOST_REQUESTS


class Visit(NamedTuple):
    """An item on the way of a CTA through its list.

    Attributes:
      index: of the item in the list.
      queries, steps: items with steps before it, and steps.
    """

    item: Item
    index: Any
    queries: Any
    steps: Any


def _read_item(shape: PrefillShape, operands: Operands, index: Any) -> Item:
    cta = lax.axis_index("cta")
    known = jnp.maximum(jnp.minimum(index, operands.counts[cta] - 1), 0)
    item = Item(*(operands.work[cta, known, f] for f in range(len(Item._fields))))
    begins_anywhere = shape.windowed or operands.kept_steps is not None
    return item if begins_anywhere else item._replace(first_step=jnp.int32(0))


def for_each_item(shape: PrefillShape, operands: Operands, body: Callable[[Visit], None]) -> tuple[Any, Any]:
    """Call `body` for each item of this CTA.

    An item's fields are read while the one before is worked on. Items without steps need no queries and take no turn:
    if they did, one warpgroup could wait in them for queries that the other, waiting for its turn, has yet to let go.

    Returns:
      The numbers of items with steps, and of steps.
    """

    def visit(index: Any, carry: tuple[Any, Any, Item]) -> tuple[Any, Any, Item]:
        queries, steps, item = carry
        following = _read_item(shape, operands, index + 1)
        body(Visit(item, index, queries, steps))
        return queries + jnp.where(item.steps > 0, 1, 0), steps + item.steps, following

    first = (jnp.int32(0), jnp.int32(0), _read_item(shape, operands, jnp.int32(0)))
    return lax.fori_loop(0, operands.counts[lax.axis_index("cta")], visit, first)[:2]


def kv_head(shape: PrefillShape, item: Item) -> Any:
    """The kv head of an item."""
    return item.head if shape.tiling.packed else lax.div(item.head, jnp.int32(shape.group))
