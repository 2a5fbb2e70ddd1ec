"""The tiles that were found best for each GPU and class of shapes: what they are, and which of them a call gets."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

Range = tuple[int | None, int | None]
"""The least and the most, both included; None for no bound."""
MOST_TILE, MOST_STAGES, MOST_CTAS, MOST_PARTS, MOST_WARPGROUPS = 128, 16, 2, 64, 3
REGISTERS_OF_THREE = 504
"""Registers that a thread of each of three warpgroups may have in all: of the 512 there are, 168 for each at launch."""


@dataclasses.dataclass(frozen=True)
class DecodeTiles:
    """How decode is cut up. Where something doesn't fit in shared memory, the kernel gets less of it.

    Attributes:
      tile: rows of keys a tile: positions, for each head of those that share it.
      ctas_per_sm: CTAs that a multiprocessor has at one time: the work of all kv heads is cut into as many shares.
      most_stages: tiles in the ring.
      fewest_tiles: of one head in a share; splitting further costs more than it gains.
      warpgroups: of a CTA that compute, each every so many-th tile; more than one where one CTA has a multiprocessor.
      heads: kv heads that share a tile; fewer where there is no multiple of so many, or many rows, and one where scales
        differ from head to head.
    """

    tile: int
    ctas_per_sm: int
    most_stages: int
    fewest_tiles: int
    warpgroups: int = 1
    heads: int = 1

    def refusal(self) -> str | None:
        """Why the kernel can't be cut up like this, or None."""
        if self.tile not in (64, MOST_TILE):
            return f"tile: expected 64 or {MOST_TILE}, got {self.tile}"
        if not 1 <= self.ctas_per_sm <= MOST_CTAS:  # more don't have the registers
            return f"ctas_per_sm: expected 1 to {MOST_CTAS}, got {self.ctas_per_sm}"
        if not 2 <= self.most_stages <= MOST_STAGES:
            return f"most_stages: expected 2 to {MOST_STAGES}, got {self.most_stages}"
        if not 1 <= self.warpgroups <= (MOST_WARPGROUPS if self.ctas_per_sm == 1 else 1):
            return f"warpgroups: expected 1, or with one CTA up to {MOST_WARPGROUPS}, got {self.warpgroups}"
        if self.heads not in (1, 2, 4, 8):  # TMA takes 8 rows at least
            return f"heads: expected 1, 2, 4 or 8, got {self.heads}"
        return None if self.fewest_tiles >= 1 else f"fewest_tiles: expected 1 or more, got {self.fewest_tiles}"


@dataclasses.dataclass(frozen=True)
class PrefillTiles:
    """How prefill is cut up. Where something doesn't fit in shared memory, the kernel gets less of it.

    Attributes:
      step: positions that are computed at a time.
      most_stages: steps in the ring.
      registers: of a thread that computes, and of one that loads.
      packed_below: with fewer new tokens a request, tiles hold all query heads of a kv head.
      l2_bytes: keys and values that are to be worked on at one time.
      most_parts: tiles are split among so many CTAs at most, where there are more CTAs than tiles.
    """

    step: int
    most_stages: int
    registers: tuple[int, int]
    packed_below: int
    l2_bytes: int
    most_parts: int

    def refusal(self) -> str | None:
        """Why the kernel can't be cut up like this, or None."""
        if self.step not in (64, MOST_TILE):
            return f"step: expected 64 or {MOST_TILE}, got {self.step}"
        if not 2 <= self.most_stages <= MOST_STAGES:
            return f"most_stages: expected 2 to {MOST_STAGES}, got {self.most_stages}"
        computing, loading = self.registers
        if not all(24 <= n <= 240 and n % 8 == 0 for n in self.registers):
            return f"registers: expected multiples of 8 from 24 to 240, got {self.registers}"
        if 2 * computing + loading > REGISTERS_OF_THREE:
            return (
                f"registers: two computing warpgroups and a loading one have {REGISTERS_OF_THREE}, got {self.registers}"
            )
        if self.packed_below < 0 or self.l2_bytes < 1:
            return f"packed_below, l2_bytes: expected 0, 1 or more, got {self.packed_below}, {self.l2_bytes}"
        if not 1 <= self.most_parts <= MOST_PARTS:
            return f"most_parts: expected 1 to {MOST_PARTS}, got {self.most_parts}"
        return None


@dataclasses.dataclass(frozen=True)
class CallShape:
    """What rules tell calls apart by.

    Attributes:
      cache_bits: of a number in the cache.
      head_size: the larger one of keys and values, to a multiple of 64.
      rows: of a request, new tokens times the query heads of a kv head: the most in decode, the mean in prefill.
      num_reqs: requests of the batch.
    """

    cache_bits: int
    head_size: int
    rows: int
    num_reqs: int


@dataclasses.dataclass(frozen=True)
class ShapeClass:
    """A condition on each attribute of a `CallShape`."""

    cache_bits: Range = (None, None)
    head_size: Range = (None, None)
    rows: Range = (None, None)
    num_reqs: Range = (None, None)

    def holds(self, shape: CallShape) -> bool:
        for field in dataclasses.fields(self):
            (low, high), value = getattr(self, field.name), getattr(shape, field.name)
            if (low is not None and value < low) or (high is not None and value > high):
                return False
        return True


@dataclasses.dataclass(frozen=True)
class Rule[Tiles: (DecodeTiles, PrefillTiles)]:
    """Tiles for a class of shapes."""

    when: ShapeClass
    use: Tiles


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as the kernels see it. Hashable: a static argument of jitted functions.

    Attributes:
      kind: JAX's `device_kind`.
      num_sms: streaming multiprocessors.
      decode, prefill: rules, of which the first that holds counts; the last one holds always.
    """

    kind: str
    num_sms: int
    decode: tuple[Rule[DecodeTiles], ...]
    prefill: tuple[Rule[PrefillTiles], ...]

    def decode_tiles(self, shape: CallShape) -> DecodeTiles:
        return next(rule.use for rule in self.decode if rule.when.holds(shape))

    def prefill_tiles(self, shape: CallShape) -> PrefillTiles:
        return next(rule.use for rule in self.prefill if rule.when.holds(shape))


_given: contextvars.ContextVar[Gpu | None] = contextvars.ContextVar("jaxpaged_gpu", default=None)


@contextlib.contextmanager
def tuned_for(gpu: Gpu) -> Iterator[None]:
    """Within it, kernels are compiled for a GPU with these tiles and multiprocessors, whatever the device is."""
    token = _given.set(gpu)
    try:
        yield
    finally:
        _given.reset(token)


def gpu_of(device: Any = None) -> Gpu:
    """What kernels for a JAX device are compiled for; without one, or on another platform, the default GPU."""
    from jaxpaged.pallas.tuned_file import packaged

    given = _given.get()
    if given is not None:
        return given
    if getattr(device, "platform", None) not in ("gpu", "cuda"):
        return packaged().gpu(None)
    return packaged().gpu(device.device_kind, getattr(device, "core_count", None))
