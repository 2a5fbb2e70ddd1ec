"""Mesh axes over which values differ within `jax.shard_map`, where JAX keeps account of them (`check_vma=True`)."""

from typing import Any

import jax
from jax import lax

Axes = frozenset[str]


def manual_axes(tree: Any) -> Axes:
    """The axes over which any array of a pytree differs; none outside of `shard_map` and where it isn't checked."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return Axes().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))


def varying(tree: Any, axes: Axes) -> Any:
    """The same arrays, taken to differ over `axes`: a loop's first state must be of the type of its next ones."""
    if not axes:
        return tree

    def cast(x: Any) -> Any:
        missing = tuple(sorted(axes - manual_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)
