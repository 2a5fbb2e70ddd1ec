"""What every operation has in common under JAX's transformations: a name in profiles, no gradient, a word on vmap."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def operation(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: in profiles and HLO the function is `jaxpaged.<name>`, and it refuses to be differentiated."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(f"jaxpaged.{name}"):
                return function(*_through(functools.partial(_without_gradient, name), args, _has_gradient), **kwargs)

        return called

    return decorate


def refuse_vmap(name: str, tree: Any) -> Any:
    """A pytree as it is; with an error where `jax.vmap` has added an axis to one of its arrays."""
    return _through(functools.partial(_without_vmap, name), tree, lambda x: True)


def _through(identity: Callable[[list[Any]], list[Any]], tree: Any, wanted: Callable[[Any], bool]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and wanted(leaf)]
    for i, leaf in zip(places, identity([leaves[i] for i in places]), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def _has_gradient(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_gradient(name: str, arrays: list[Any]) -> list[Any]:
    return arrays


@_without_gradient.defjvp
def _refuse_gradient(name: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"{name} has no gradient: it is for inference. Give it jax.lax.stop_gradient of its arrays where a gradient "
        f"passes by it, and train with attention that isn't paged, such as jax.nn.dot_product_attention"
    )


def _without_vmap(name: str, arrays: list[Any]) -> list[Any]:
    @jax.custom_batching.custom_vmap
    def identity(*arrays: Any) -> list[Any]:
        return list(arrays)

    @identity.def_vmap
    def refuse(axis_size: int, in_batched: Any, *arrays: Any) -> Any:
        raise NotImplementedError(
            f"{name}: its kernel doesn't take an axis of jax.vmap; pack requests into one PagedBatch, which may be of "
            f"different lengths, go over caches with jax.lax.map, or give implementation='reference'"
        )

    return identity(*arrays) if arrays else []
