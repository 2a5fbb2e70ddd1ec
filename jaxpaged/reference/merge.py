"""Merge of attention states that were computed over parts of the keys and values."""

from typing import Any

import jax.numpy as jnp


def merge_attention_states(outputs: Any, lses: Any) -> tuple[Any, Any]:
    """`jaxpaged.merge_attention_states` on checked, stacked arguments."""
    lses = jnp.where(lses == jnp.inf, -jnp.inf, lses.astype(jnp.float32))
    peak = lses.max(0)
    shift = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(lses - shift)
    total = weights.sum(0)
    merged_lse = jnp.where(total > 0, shift + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
    shares = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0).swapaxes(1, 2)[..., None]
    # A state with nothing attended may hold anything: select, since 0 * NaN is NaN.
    parts = jnp.where(shares > 0, outputs.astype(jnp.float32) * shares, 0.0)
    return parts.sum(0).astype(outputs.dtype), merged_lse
