"""What happens to a tile of scores between the two products: the options of `paged_attention`, in a kernel."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxpaged.pallas.functions import call, inputs_read
from jaxpaged.reference.attention import AttentionOptions

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


@dataclasses.dataclass(frozen=True)
class TilePlace:
    """Where a tile of scores lies: scalars or arrays of the tile's shape, or functions that make them.

    What is not needed must not be made: Mosaic finds no layout for an array that nothing reads.

    Attributes:
      request: index of the request.
      head: index of the query head.
      q_pos, kv_pos: logical positions.
      slope: of ALiBi, or None.
    """

    request: Any
    head: Callable[[], Any]
    q_pos: Callable[[], Any]
    kv_pos: Callable[[], Any]
    slope: Any = None

    def call(self, function: Callable[..., Any], *score: Any) -> Any:
        """A user's mask or score function of this place."""
        read = inputs_read(function, scored=bool(score))
        makers = (lambda: self.request, self.head, self.q_pos, self.kv_pos)
        return call(function, *score, *(make() if i in read else jnp.int32(0) for i, make in enumerate(makers)))


def changes_scores(options: AttentionOptions) -> bool:
    """Whether scores go through more than the scale and the masks."""
    return options.soft_cap is not None or options.score_mod is not None or options.alibi_slopes is not None


def log2_scores(s: Any, options: AttentionOptions, place: TilePlace, k_scale: Any = None) -> tuple[Any, Any]:
    """Products of q and k after soft cap, `score_mod` and ALiBi, and the factor that makes them scores in log 2.

    The factor is left to the exponential's argument, where a multiplication costs nothing.

    Args:
      k_scale: a scalar, above 0, that products are multiplied by besides; None for 1.
    """
    scale: Any = options.scale if k_scale is None else k_scale * options.scale
    if options.scale > 0 and not changes_scores(options):
        return s, scale * LOG2E
    s = s * scale
    if options.soft_cap is not None:
        s = _soft_cap(s, options.soft_cap)
    if options.score_mod is not None:
        s = place.call(options.score_mod, s).astype(jnp.float32)
    if place.slope is not None:
        s = s + place.slope * (place.kv_pos() - place.q_pos()).astype(jnp.float32)
    return s, LOG2E


def _soft_cap(s: Any, cap: float) -> Any:
    # The GPU's approximate tanh is right to 11 bits only; this one is to 22, and saturates without overflow to NaN.
    grown = jnp.exp2(s * (2 * LOG2E / cap))
    return cap - (2 * cap) / (grown + 1.0)


def normalized(peak: Any, total: Any) -> tuple[Any, Any]:
    """From a row's maximum and sum of the softmax, in log 2: the weight of its output, and its lse."""
    attended = total > 0
    return jnp.where(attended, 1.0 / total, 0.0), jnp.where(attended, peak + jnp.log2(total), -jnp.inf)


def with_sink(weight: Any, lse: Any, sink: Any) -> Any:
    """The weight of a row's output when a sink takes part in the denominator."""
    return jnp.where(lse > -jnp.inf, weight / (1.0 + jnp.exp2(sink * LOG2E - lse)), 0.0)


def kept(options: AttentionOptions, place: TilePlace, kv_len: Any) -> Any:
    """Which scores of a tile take part."""
    left, right = options.window
    last: Any = kv_len - 1  # one comparison for each score, with what is the same along a row
    if options.causal:
        last = jnp.minimum(place.q_pos(), last)
    if right is not None:
        last = jnp.minimum(place.q_pos() + right, last)
    keep = place.kv_pos() <= last
    if left is not None:
        keep &= place.kv_pos() >= place.q_pos() - left
    if options.mask_mod is not None:
        mine = place.call(options.mask_mod)
        keep &= mine if jnp.ndim(mine) else jnp.full(keep.shape, jnp.where(mine, 1, 0)) == 1
    return keep
