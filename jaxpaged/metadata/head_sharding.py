"""How a KV cache is spread over a mesh, and calls that each device makes on its own kv heads."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpaged.metadata.checks import shape_text
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.metadata.layout import Which

MeshAxis = str | tuple[str, ...] | None
"""The mesh axis, or axes, that an array's axis is spread over; None for none."""


def cache_specs(cache: KVCache, *, blocks: MeshAxis, heads: MeshAxis) -> KVCache:
    """`cache` with a PartitionSpec in the place of each array, for any layout and its scales."""

    def spec(which: Which) -> PartitionSpec:
        return PartitionSpec(*({"n": blocks, "h": heads}.get(axis) for axis in cache.layout.axes(which)))

    of_scales = {0: PartitionSpec(), 1: PartitionSpec(heads), 3: PartitionSpec(blocks, None, heads)}
    scales = [None if s is None else of_scales[s.ndim] for s in (cache.k_scale, cache.v_scale)]
    value = None if cache.value is None else spec("value")
    return dataclasses.replace(cache, key=spec("key"), value=value, k_scale=scales[0], v_scale=scales[1])


@dataclasses.dataclass(frozen=True)
class HeadSharding:
    """Kv heads, and the query heads that belong to them, spread over axes of a mesh. Hashable: a static argument."""

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]

    @property
    def rows(self) -> PartitionSpec:
        """Of [num_tokens, heads, head_size]."""
        return PartitionSpec(None, self.axes)

    def cache(self, cache: KVCache) -> KVCache:
        """`cache_specs` of it."""
        return cache_specs(cache, blocks=None, heads=self.axes)

    def map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` called by each device on its part of the arguments, with no communication."""
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        if AxisType.Explicit not in self.mesh.axis_types:
            return mapped

        def resharded(*arguments: Any) -> Any:  # a mesh with explicit axes wants arguments as the specs say
            return mapped(*(_resharded(x, spec, self.mesh) for x, spec in zip(arguments, in_specs, strict=True)))

        return resharded


def head_sharding(cache: KVCache) -> HeadSharding | None:
    """The axes that a cache's kv heads are spread over, or None: for traced arrays, if their mesh axes are explicit.

    Raises:
      ValueError: blocks, or something else that a device can't do without, are spread.
    """
    found = {}
    for which in ("key", "value"):
        sharding = _sharding(cache.buffer(which))
        if sharding is None:
            continue
        axes = cache.layout.axes(which)
        spread = {axis: names for axis, names in zip(axes, sharding.spec, strict=False) if names}
        if set(spread) - {"h"}:
            raise ValueError(
                f"cache: expected no axis of {cache.layout.name} {shape_text(cache.buffer(which).shape)} but kv heads "
                f"to be sharded, got {sharding.spec}; where blocks are, a device sees its own alone: call this under "
                f"jax.shard_map with the specs of jaxpaged.sharding.Partition"
            )
        if "h" in spread:
            names = spread["h"]
            found[which] = HeadSharding(sharding.mesh, names if isinstance(names, tuple) else (names,))
    if not found:
        return None
    if len(set(found.values())) > 1 or len(found) < 2:
        raise ValueError(f"cache: expected keys and values to be sharded alike, got {found}")
    return found["key"]


def _sharding(x: Any) -> NamedSharding | None:
    """The sharding of an array as far as it is known: that of a tracer is when its mesh's axes are explicit."""
    if not isinstance(x, jax.Array):
        return None
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
    return sharding if isinstance(sharding, NamedSharding) else None


def local(tree: Any, specs: Any, mesh: Any) -> Any:
    """Shapes and dtypes of one device's part of a pytree of arrays."""

    def part(x: Any, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(tuple(x.shape)), x.dtype)

    return jax.tree.map(part, tree, _broadcast(specs, tree))


def _resharded(tree: Any, specs: Any, mesh: Any) -> Any:
    return jax.tree.map(lambda x, spec: jax.reshard(x, NamedSharding(mesh, spec)), tree, _broadcast(specs, tree))


def _broadcast(specs: Any, tree: Any) -> Any:
    """A spec for each array of a pytree, from specs that may stand for whole parts of it."""
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree, is_leaf=is_spec)
