"""Where rows of a paged KV cache lie in its buffers, as indices for kernels."""

from typing import Any

from jax.experimental import pallas as pl

from jaxpaged.metadata.layout import CacheDims, KVLayout, Which


def rows_index(
    layout: KVLayout, dims: CacheDims, which: Which, block: Any, slots: Any, head: Any, columns: Any = None
) -> tuple[Any, ...]:
    """An index into a buffer's ref of key or value rows of one block and one kv head, [slots, head_size].

    Args:
      block, head: scalars.
      slots: a scalar or a `pl.ds` of slots in the block.
      columns: a `pl.ds` of elements of the head; all of them when None.
    """
    if columns is None:
        columns = pl.ds(0, dims.head_size if which == "key" else dims.v_head_size)
    skipped = dims.head_size if which == "value" else 0
    picks = {
        "n": block,
        "s": slots,
        "h": head,
        "2": 0 if which == "key" else 1,
        "(2d)": pl.ds(columns.start + skipped, columns.size),
        "d": columns,
    }
    return tuple(picks[axis] for axis in layout.axes(which))
