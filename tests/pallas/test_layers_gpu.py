"""Layers that write and attend in one program of XLA's, on a GPU: kernels are launched before those before them end."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch, paged_attention, write_kv

LAYERS, REQS, HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 12, 16, 16, 4, 128, 16, 128


def inputs(seed: int) -> tuple[Any, ...]:
    """Caches, queries and a batch; each request's new tokens have blocks of their own, which nothing else is in."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    shape = (BLOCKS, BLOCK, KV_HEADS, SIZE)
    caches = [KVCache.from_arrays(normal(*shape), normal(*shape)) for _ in range(LAYERS)]
    lens = rng.integers(1, 600, REQS)
    table = rng.integers(REQS, BLOCKS, (REQS, 40))
    table[np.arange(REQS), (lens - 1) // BLOCK] = np.arange(REQS)
    batch = PagedBatch.create(table.astype(np.int32), lens.astype(np.int32), block_size=BLOCK)
    return caches, normal(REQS, HEADS, SIZE), normal(REQS, KV_HEADS, SIZE), batch


def layer(query: jax.Array, key: jax.Array, cache: KVCache, batch: PagedBatch) -> tuple[jax.Array, KVCache]:
    cache = write_kv(cache, key, key, batch.slot_mapping)
    return paged_attention(query, cache, batch), cache


def model(caches: Any, query: jax.Array, key: jax.Array, batch: PagedBatch, *, chained: bool, each: Any = layer) -> Any:
    """Layers whose queries are what the layer before has left, and so are their keys if `chained`.

    Args:
      each: called for each layer.
    """
    outs, new = [], []
    for cache in caches:
        query, cache = each(query, key, cache, batch)
        key = query[:, ::4] if chained else key
        outs.append(query)
        new.append(cache)
    return outs, new


@pytest.mark.gpu
@pytest.mark.parametrize("chained", [False, True], ids=["kernels alone", "XLA in between"])
def test_one_program_has_the_bits_of_calls_one_by_one(hopper: Any, chained: bool) -> None:
    whole = jax.jit(functools.partial(model, chained=chained), donate_argnums=0)

    def each(*arguments: Any) -> Any:
        return jax.block_until_ready(layer(*arguments))

    for seed in range(6):  # XLA makes a CUDA graph of a program that has run before
        expected = jax.tree.leaves(model(*inputs(seed), chained=chained, each=each))
        found = jax.tree.leaves(whole(*inputs(seed)))
        assert len(found) == 3 * LAYERS
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(x).view(np.uint16), np.asarray(y).view(np.uint16))
