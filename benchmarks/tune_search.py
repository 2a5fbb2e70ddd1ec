"""The search for a class's tiles: one attribute after the other, what is right and fastest is kept."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from attention_cases import Case
from attention_measure import last_line
from attention_results import TOLERANCE
from layer_times import ATTENTION
from tune_classes import Kernel, Tiles, TunedClass, kernel_shape, tiles_of, with_tiles

from jaxpaged.pallas.mosaic import interpreted
from jaxpaged.pallas.tuning import Gpu, tuned_for

GAIN = 0.98
"""Of the time of what there was: more than that is no gain but noise."""
PASSES = 2


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found for a class.

    Attributes:
      before, best: tiles that the class had, and the best ones, which may be the same.
      microseconds: of each case, with either.
      tried: how many candidates ran.
      notes: candidates that failed, and why.
      finished: whether all were tried.
    """

    tuned: TunedClass
    before: Tiles
    best: Tiles
    microseconds: tuple[tuple[float, float], ...]
    tried: int
    notes: tuple[str, ...]
    finished: bool

    @property
    def gain(self) -> float:
        """The time before over the best one, in the geometric mean over the cases."""
        return _ratio(*zip(*self.microseconds, strict=True))


class WrongError(Exception):
    """A result is wrong."""


class Bench:
    """A class's cases on a device, and their programs, of which those that are right are timed."""

    def __init__(self, tuned: TunedClass, gpu: Gpu, device: str):
        self._tuned, self._gpu, self._device = tuned, gpu, device
        self._places = [_Place(case, device) for case in tuned.cases]

    def times(self, tiles: Sequence[Tiles]) -> tuple[dict[Tiles, tuple[float, ...]], list[str]]:
        """Microseconds of each case with tiles that give right results, the first ones among them; and what failed.

        Raises:
          WrongError: the first ones give a wrong result. RuntimeError, ValueError: they don't run.
        """
        times: dict[Tiles, list[float]] = {candidate: [] for candidate in tiles}
        notes: list[str] = []
        for place in self._places:
            shapes = {c: kernel_shape(self._compiled_for(c), self._tuned.kernel, place.case) for c in times}
            for candidate, shape in shapes.items():
                try:
                    self._add_program(place, candidate, shape)
                except (WrongError, RuntimeError, ValueError) as error:
                    if place.expected is None or candidate == tiles[0]:
                        raise
                    notes.append(f"{candidate}, {place.case.name}: {last_line(error)}")
            calls = {shape: place.calls[shape] for shape in shapes.values() if shape in place.calls}
            measured = _gpu_times(calls, self._tuned.kernel) if self._device == "cuda" else _wall_times(calls)
            times = {c: [*times[c], measured[shape]] for c, shape in shapes.items() if shape in measured}
        return {candidate: tuple(each) for candidate, each in times.items()}, notes

    def _compiled_for(self, tiles: Tiles) -> Gpu:
        return with_tiles(self._gpu, self._tuned.kernel, tiles)

    def _add_program(self, place: "_Place", tiles: Tiles, shape: Any) -> None:
        """Compile a case's program unless it is there, and keep it if its result is right."""
        from ours import Ours
        from peers import as_torch

        if shape in place.calls:
            return
        with tuned_for(self._compiled_for(tiles)), interpreted() if self._device == "cpu" else contextlib.nullcontext():
            call = Ours(place.inputs).compiled()
        place.check(as_torch(jax.block_until_ready(call())))
        place.calls[shape] = call


class _Place:
    """A case's inputs, the first result, which is checked by the definition, and programs by what they are."""

    def __init__(self, case: Case, device: str):
        from attention_inputs import make_inputs, sample_rows

        self.case = case
        self.inputs = make_inputs(case, device)
        self.inputs.fill_unused(poison=True)
        self._sample = sample_rows(self.inputs)
        self.expected: Any = None
        self.calls: dict[Any, Callable[[], Any]] = {}

    def check(self, out: Any) -> None:
        """WrongError where a result is not the first one, or the first is not what attention is by definition."""
        if self.expected is None:
            error, _ = self._sample.errors(out)
            if not error <= TOLERANCE:
                raise WrongError(f"WRONG: error {error:.1e}")
            self.expected = out.float()
        off = float((out.float() - self.expected).norm() / self.expected.norm())
        if not off <= TOLERANCE:
            raise WrongError(f"WRONG: {off:.1e} from the result of the tiles that there were")


def search(
    tuned: TunedClass,
    gpu: Gpu,
    times: Callable[[Sequence[Tiles]], tuple[Mapping[Tiles, Sequence[float]], list[str]]],
    deadline: float,
    tell: Callable[[str], None],
) -> Found:
    """Try the values of one attribute after the other, starting from what the class has on a GPU.

    Args:
      times: see `Bench.times`.
      deadline: of `time.monotonic()`: nothing is begun after it.
      tell: called with a line about each attribute.
    """
    before = best = tiles_of(gpu, tuned.kernel, tuned.cases[0])
    seen = {_shapes(tuned, gpu, best)}
    notes: list[str] = []
    tried, finished = 0, True
    for attribute in tuned.attributes * PASSES:
        candidates = [c for c in tuned.candidates(best, attribute) if _is_new(seen, _shapes(tuned, gpu, c))]
        if not candidates:
            continue
        if time.monotonic() >= deadline:
            finished = False
            break
        measured, failed = times([best, *candidates])
        tried += len(candidates)
        notes += failed
        ratios = {tiles: _ratio(each, measured[best]) for tiles, each in measured.items()}
        shown = ", ".join(f"{getattr(tiles, attribute)}: {ratio:.3f}" for tiles, ratio in ratios.items())
        tell(f"{tuned.name}: {attribute} {shown}" + "".join(f"\n  {line}" for line in failed))
        fastest = min(ratios, key=ratios.__getitem__)
        if ratios[fastest] < GAIN:
            best = fastest
    final, _ = times([before] if best == before else [before, best])
    if _ratio(final[best], final[before]) >= GAIN:  # steps that each were a gain may have been luck
        best = before
    pairs = tuple(zip(final[before], final[best], strict=True))
    return Found(tuned, before, best, pairs, tried, tuple(notes), finished)


def _is_new(seen: set[Any], shapes: Any) -> bool:
    new = shapes not in seen
    seen.add(shapes)
    return new


def _shapes(tuned: TunedClass, gpu: Gpu, tiles: Tiles) -> tuple[Any, ...]:
    """What tiles make of each case: where that is the same, so are the programs."""
    chosen = with_tiles(gpu, tuned.kernel, tiles)
    return tuple(kernel_shape(chosen, tuned.kernel, case) for case in tuned.cases)


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The geometric mean of ratios of times."""
    return math.exp(sum(math.log(a / b) for a, b in zip(times, others, strict=True)) / len(times))


def _gpu_times(calls: Mapping[Any, Callable[[], Any]], kernel: Kernel) -> dict[Any, float]:
    """Microseconds of a call's kernels: of decode its own ones, of prefill all of them, since XLA merges its parts."""
    from gpu_timing import kernel_times

    timings = kernel_times({str(i): call for i, call in enumerate(calls.values())})
    sums = (
        sum(us for name, us in timing.kernels.items() if kernel == "prefill" or ATTENTION in name)
        for timing in timings.values()
    )
    return dict(zip(calls, sums, strict=True))


def _wall_times(calls: Mapping[Any, Callable[[], Any]]) -> dict[Any, float]:
    """Of the interpreter: they mean nothing, but that the programs run."""
    times = {}
    for shape, call in calls.items():
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times[shape] = 1e6 * (time.perf_counter() - begin)
    return times
