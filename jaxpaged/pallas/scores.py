"""What happens to a tile of scores between the two products: the options of `paged_attention`, in a kernel."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from jaxpaged.pallas.functions import call
from jaxpaged.reference.attention import AttentionOptions

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


@dataclasses.dataclass(frozen=True)
class TilePlace:
    """Where a tile of scores lies. Each is a scalar or an array of the tile's shape.

    Attributes:
      request, head: indices of the request and of the query head.
      q_pos, kv_pos: logical positions.
      slope: of ALiBi, or None.
    """

    request: Any
    head: Any
    q_pos: Any
    kv_pos: Any
    slope: Any = None


def changes_scores(options: AttentionOptions) -> bool:
    """Whether scores go through more than the scale and the masks."""
    return options.soft_cap is not None or options.score_mod is not None or options.alibi_slopes is not None


def log2_scores(s: Any, options: AttentionOptions, place: TilePlace) -> tuple[Any, float]:
    """Products of q and k after soft cap, `score_mod` and ALiBi, and the factor that makes them scores in log 2.

    The factor is left to the exponential's argument, where a multiplication costs nothing.
    """
    if options.scale > 0 and not changes_scores(options):
        return s, options.scale * LOG2E
    s = s * options.scale
    if options.soft_cap is not None:
        s = _soft_cap(s, options.soft_cap)
    if options.score_mod is not None:
        s = call(options.score_mod, s, place.request, place.head, place.q_pos, place.kv_pos).astype(jnp.float32)
    if place.slope is not None:
        s = s + place.slope * (place.kv_pos - place.q_pos).astype(jnp.float32)
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
    keep = place.kv_pos < kv_len
    if options.causal:
        keep &= place.kv_pos <= place.q_pos
    if left is not None:
        keep &= place.kv_pos >= place.q_pos - left
    if right is not None:
        keep &= place.kv_pos <= place.q_pos + right
    if options.mask_mod is not None:
        keep &= call(options.mask_mod, place.request, place.head, place.q_pos, place.kv_pos)
    return keep
