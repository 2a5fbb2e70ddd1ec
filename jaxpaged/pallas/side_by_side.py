"""How multiprocessors are divided between decode and prefill in a mixed batch, on the device, from its lengths.

Prefill is bound by products and decode by reads, so both at a time take less than one after the other. A multiprocessor
has room for a CTA of prefill or for those of decode, and a third of them read as fast as all: some are left to decode,
so many that both end together. Prefill's CTAs without work end at once, and decode's start in their places (POD
attention, Kamath et al., 2024, does the same within a multiprocessor).
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.decode import DecodeShape
from jaxpaged.pallas.decode_plan import tiles_of_requests
from jaxpaged.pallas.prefill import WG_ROWS, PrefillShape
from jaxpaged.pallas.prefill_plan import total_steps
from jaxpaged.pallas.tuning import Gpu
from jaxpaged.reference.attention import AttentionOptions

SM_BYTES, ALL_BYTES, SM_FLOPS = 90e3, 4.3e6, 4.85e6
"""What one multiprocessor of an H200 reads in a microsecond, what all read together, and what one multiplies and adds.
On other Hopper GPUs their ratios are near enough: time is lost slowly around the best division."""
LEAST_GAIN = 1.02
"""Over one after the other, to divide at all."""


class Division(NamedTuple):
    """Scalars int32: shares of decode, and lists of prefill, that may have work."""

    shares: Any
    lists: Any


def fewest_lists(num_sms: int) -> int:
    """Lists that prefill keeps however much there is to decode: fewer multiprocessors than that read at the full
    rate."""
    return num_sms - num_sms // 2


def divide(
    cache: KVCache,
    batch: PagedBatch,
    options: AttentionOptions,
    decode: DecodeShape,
    prefill: PrefillShape,
    gpu: Gpu,
    *,
    num_tokens: int,
    num_heads: int,
    shortest: int,
) -> Division | None:
    """The division that ends first, or all for each where one after the other is as good; None where that is known.

    Args:
      shortest: new tokens of requests that prefill takes.
    """
    heads = cache.num_kv_heads
    per_sm = max(1, math.ceil(decode.num_shares * heads / gpu.num_sms))
    sms = [math.ceil(shares * heads / per_sm) for shares in range(1, decode.num_shares)]
    sms = [n for n in sms if n <= gpu.num_sms - fewest_lists(gpu.num_sms)]
    if not sms:
        return None
    starts = jnp.clip(batch.query_start_loc, 0, num_tokens)
    q_len, kv_len = starts[1:] - starts[:-1], batch.kv_lens(cache.block_size)
    tiles = tiles_of_requests(options, q_len, kv_len, decode.max_query_len, decode.tile)[2]
    row_bytes = (cache.head_size + cache.v_head_size) * cache.dtype.itemsize
    reads = jnp.sum(tiles, dtype=jnp.int32).astype(jnp.float32) * (decode.tile * row_bytes * heads)
    sizes = {"num_tokens": num_tokens, "num_heads": num_heads, "shortest": shortest}
    steps = total_steps(cache, batch, options, prefill.tiling, **sizes).astype(jnp.float32)
    flops = steps * (2 * 2 * WG_ROWS * prefill.tiling.step * (cache.head_size + cache.v_head_size))
    of_decode = jnp.array(sms, jnp.float32)
    times = jnp.maximum(
        reads / jnp.minimum(of_decode * SM_BYTES, ALL_BYTES), flops / (SM_FLOPS * (gpu.num_sms - of_decode))
    )
    best = jnp.argmin(times)
    gains = reads / ALL_BYTES + flops / (SM_FLOPS * gpu.num_sms) > LEAST_GAIN * times[best]
    return Division(
        jnp.where(gains, best + 1, decode.num_shares).astype(jnp.int32),
        jnp.where(gains, gpu.num_sms - jnp.array(sms, jnp.int32)[best], gpu.num_sms).astype(jnp.int32),
    )
