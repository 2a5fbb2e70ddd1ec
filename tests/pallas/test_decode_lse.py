"""Lses by token and head from the kernels of decode themselves, for callers that have no XLA to arrange them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch, paged_attention
from jaxpaged.pallas.config import decode_config
from jaxpaged.pallas.decode import decode
from jaxpaged.pallas.decode_plan import TILES, plan_decode
from jaxpaged.pallas.mosaic import interpreter
from jaxpaged.pallas.tuning import gpu_of
from jaxpaged.reference.attention import AttentionOptions


@functools.partial(jax.jit, static_argnames=("options", "longest", "gpu", "interpret"))
def decoded(query: Any, cache: Any, batch: Any, sinks: Any, *, options: Any, longest: int, gpu: Any, interpret: Any):
    """The plan, and the output and lses that kernels alone write."""
    shape = decode_config(query, cache, batch, query.dtype, False, longest, gpu)
    how = {"tile": shape.tile, "num_shares": shape.num_shares, "min_tiles": shape.fewest_tiles}
    how |= {"num_tokens": query.shape[0], "num_heads": query.shape[1], "max_query_len": longest}
    plan = plan_decode(cache, batch, options, **how, others_elsewhere=False, batch_invariant=False)
    out, lse = jax.new_ref(query), jax.new_ref(jnp.full(query.shape[:2], 7.0, jnp.float32))
    options = dataclasses.replace(options, sinks=sinks)
    decode(query, cache, batch, plan, options, shape, out, interpret, lse=lse)
    return plan, jax.freeze(out), jax.freeze(lse)


@pytest.mark.parametrize(
    ("query_lens", "lens", "heads"),
    [((1, 1, 1, 0, 1), (700, 20, 0, 5, 64), 4), ((3, 1, 2), (300, 1, 17), 6), ((8, 1, 2), (600, 1, 17), 6)],
    ids=["one token each", "several tokens", "parts too large for the ring of keys"],
)
def test_lses_are_those_of_the_reference(kernels, set_multiprocessors, query_lens, lens, heads):
    set_multiprocessors(8)
    rng = np.random.default_rng(0)
    cache = KVCache.zeros(60, 16, 2, 64, "bfloat16")
    cache = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), cache)
    table = rng.integers(0, 60, (len(lens), 44)).astype(np.int32)
    batch = PagedBatch.create(table, lens, query_lens=query_lens)
    # The last two rows are no request's.
    query = jnp.asarray(rng.standard_normal((sum(query_lens) + 2, heads, 64)), jnp.bfloat16)
    sinks = jnp.asarray(rng.standard_normal(heads), jnp.float32)
    how = {"longest": max(query_lens), "gpu": gpu_of(), "interpret": interpreter()}
    plan, out, lse = decoded(query, cache, batch, sinks, options=AttentionOptions(0.125), **how)
    attending = np.asarray(plan.requests[:-1, TILES]) > 0
    assert set(np.asarray(plan.in_parts())[:-1][attending]) == {True, False}  # some in parts, some whole
    _, expected = paged_attention(query, cache, batch, scale=0.125, return_lse=True, implementation="reference")
    assert np.isneginf(expected).any()
    np.testing.assert_allclose(lse.T, expected, rtol=1e-3, atol=1e-3)
    assert out.shape == query.shape
