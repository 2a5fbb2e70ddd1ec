"""What a layer costs and what the plan does that layers share, from programs of one layer and of two."""

import dataclasses

from gpu_timing import Timing

ATTENTION = "paged_"
"""What the names of our attention kernels contain."""


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """The second layer's time, the time of what the first has besides, and what makes them doubtful."""

    layer: float
    plan: float
    notes: tuple[str, ...] = ()


def layer_time(one: Timing, two: Timing, *, has_lse: bool = False) -> LayerTime:
    """Take apart the time of a program of one layer by that of a program of two.

    Args:
      has_lse: layers have kernels besides attention, which compute the lse of each row.
    """
    layer = two.microseconds - one.microseconds
    notes = []
    attention = sum(count for name, count in one.counts.items() if ATTENTION in name)
    more = two.launches - one.launches
    if more > attention:
        others = ", the lse's among them" if has_lse else ""
        notes.append(f"plan not wholly shared: a second layer adds {more} kernels, {attention} of attention{others}")
    overlap = _overlap(two) - 2 * _overlap(one)
    if overlap > 0.02 * two.microseconds:
        notes.append(f"the two layers ran at once for {overlap:.1f} us, so the layer's time is too short")
    return LayerTime(layer, one.microseconds - layer, tuple(notes))


def _overlap(timing: Timing) -> float:
    return max(0.0, sum(timing.kernels.values()) - timing.microseconds)
