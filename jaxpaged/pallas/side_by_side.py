"""How multiprocessors are divided between decode and prefill in a mixed batch, on the device, from its lengths.

Prefill is bound by products and decode by reads, so both at a time take less than one after the other. A multiprocessor
has room for a CTA of prefill or for those of decode, and a third of them read as fast as all: some are left to decode,
so many that both end together. Prefill's CTAs without work end at once, and decode's start in their places (POD
attention, Kamath et al., 2024, does the same within a multiprocessor).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.decode_plan import tiles_of_requests
from jaxpaged.pallas.decode_shape import DecodeShape
from jaxpaged.pallas.prefill import WG_ROWS, PrefillShape
from jaxpaged.pallas.prefill_plan import PrefillTiling, total_steps
from jaxpaged.pallas.tuning import Gpu
from jaxpaged.reference.attention import AttentionOptions

SM_BYTES, ALL_BYTES, SM_FLOPS = 90.0, 4300.0, 4850.0
"""What one multiprocessor of an H200 reads in a nanosecond, what all read together, and what one multiplies and adds.
On other Hopper GPUs their ratios are near enough: time is lost slowly around the best division."""
GAIN = 64
"""One part of so many that dividing has to gain over one after the other."""


class Division(NamedTuple):
    """Scalars int32: shares of decode, and lists of prefill, that may have work."""

    shares: Any
    lists: Any


@dataclasses.dataclass(frozen=True)
class Sides:
    """What may be divided.

    Attributes:
      num_sms: multiprocessors, and lists of prefill.
      num_shares, max_query_len, tile: of decode, as in `DecodeShape`.
      ways: shares and multiprocessors of decode that may be tried.
      tile_bytes: of keys and values of a tile of decode, of all kv heads.
      step_flops: of a step of prefill.
    """

    num_sms: int
    num_shares: int
    max_query_len: int
    tile: int
    ways: tuple[tuple[int, int], ...]
    tile_bytes: int
    step_flops: int

    @property
    def fewest_lists(self) -> int:
        """Lists that prefill keeps however much there is to decode: the others read at the full rate."""
        return self.num_sms - max(sms for _, sms in self.ways)

    def best(self, tiles: Any, steps: Any) -> Division:
        """The division that ends first, or all for each where one after the other is as good.

        The same in XLA as in kernels: sums are of integers, which nothing rounds otherwise.

        Args:
          tiles, steps: scalars int32, tiles of decode of one kv head, and steps of all items of prefill.
        """
        reads, products = (x.astype(jnp.float32) for x in (tiles, steps))
        best = Division(jnp.int32(self.num_shares), jnp.int32(self.num_sms))
        whole = _nanoseconds(reads, self.tile_bytes / ALL_BYTES)
        whole += _nanoseconds(products, self.step_flops / (SM_FLOPS * self.num_sms))
        least = whole - lax.div(whole, jnp.int32(GAIN))
        for shares, sms in self.ways:
            time = jnp.maximum(
                _nanoseconds(reads, self.tile_bytes / min(sms * SM_BYTES, ALL_BYTES)),
                _nanoseconds(products, self.step_flops / (SM_FLOPS * (self.num_sms - sms))),
            )
            better = time < least
            best = Division(
                jnp.where(better, jnp.int32(shares), best.shares),
                jnp.where(better, jnp.int32(self.num_sms - sms), best.lists),
            )
            least = jnp.minimum(time, least)
        return best


def _nanoseconds(count: Any, each: float) -> Any:
    return jnp.minimum(count * jnp.float32(each), jnp.float32(2**29)).astype(jnp.int32)


def sides_of(cache: KVCache, decode: DecodeShape, prefill: PrefillShape, gpu: Gpu) -> Sides | None:
    """What may be divided, or None."""
    if prefill.in_parts:
        return None
    groups, size = decode.head_groups, cache.head_size + cache.v_head_size
    ctas_per_sm = max(1, math.ceil(decode.num_shares * groups / gpu.num_sms))
    step = decode.heads  # as many shares as make a CTA for every kv head: few ways are near enough
    ways = [(n, math.ceil(n * groups / ctas_per_sm)) for n in range(step, decode.num_shares, step)]
    ways = [(shares, sms) for shares, sms in ways if sms <= gpu.num_sms // 2]
    if not ways:
        return None
    return Sides(
        num_sms=gpu.num_sms,
        num_shares=decode.num_shares,
        max_query_len=decode.max_query_len,
        tile=decode.tile,
        ways=tuple(ways),
        tile_bytes=decode.tile * size * cache.dtype.itemsize * cache.num_kv_heads,
        step_flops=2 * 2 * WG_ROWS * prefill.tiling.step * size,
    )


def divide(
    cache: KVCache, batch: PagedBatch, options: AttentionOptions, sides: Sides, tiling: PrefillTiling, **sizes: Any
) -> Division:
    """The best division of a batch.

    Args:
      sizes: arguments of `plan_prefill`.
    """
    starts = jnp.clip(batch.query_start_loc, 0, sizes["num_tokens"])
    q_len, kv_len = starts[1:] - starts[:-1], batch.kv_lens(cache.block_size)
    cut = functools.partial(tiles_of_requests, options, max_query_len=sides.max_query_len, tile=sides.tile)
    tiles = jnp.sum(cut(q_len, kv_len)[2], dtype=jnp.int32)
    return sides.best(tiles, total_steps(cache, batch, options, tiling, **sizes))
