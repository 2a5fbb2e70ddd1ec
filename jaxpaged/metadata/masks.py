"""Mask and score functions for `paged_attention`, and how to combine them.

A mask function is `mask_mod(b, h, q_pos, kv_pos) -> bool`, true where a score takes part; a score function is
`score_mod(score, b, h, q_pos, kv_pos) -> score`. `b` is the request's index, `h` the query head, `q_pos` and `kv_pos`
logical positions in the request: int32 arrays that broadcast against each other, to be treated element by element.

Those of this module are frozen dataclasses and pytrees. Numbers are static, arrays are leaves: they pass through `jit`
as arguments, and new values in an array compile nothing anew. Those without arrays compare and hash by what they hold,
so that an equal one hits the same compiled program; those with arrays compare by identity. A plain function goes
wherever one of these does: `and_masks` and the other combinators make it a static part of the pytree.

The interface of mask and score functions is FlexAttention's (Dong et al., 2024, arXiv:2412.05496).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.metadata.checks import INT32_MAX, check_positive, shape_text

MaskMod = Callable[[Any, Any, Any, Any], Any]
ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]

_STATIC: Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticFunction:
    """A plain function as a pytree without leaves: equal where the function is the same object."""

    function: Callable[..., Any] = dataclasses.field(metadata=_STATIC)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def as_pytree(name: str, function: Any) -> Any:
    """`function` as a pytree: itself if it is one, else a `StaticFunction`.

    Raises:
      TypeError: it is not callable, or neither a pytree nor hashable; the message begins with `name`.
    """
    if not callable(function):
        raise TypeError(f"{name}: expected a function, got {type(function).__name__}")
    if not jax.tree_util.all_leaves([function]):
        return function
    try:
        hash(function)
    except TypeError:
        raise TypeError(
            f"{name}: expected a function that is hashable or a pytree, got {type(function).__name__}"
        ) from None
    return StaticFunction(function)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FullMask:
    """Keeps every score."""

    def __call__(self, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        return jnp.ones(jnp.broadcast_shapes(*(jnp.shape(x) for x in (b, h, q_pos, kv_pos))), bool)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CausalMask:
    """Keeps a query's own position and those before it."""

    def __call__(self, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        return kv_pos <= q_pos


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlidingWindowMask:
    """Keeps `left` positions before a query's own, itself, and `right` after it; None on a side for no bound.

    An engine's `sliding_window=w` is `SlidingWindowMask(w - 1, 0)` in a decoder.

    Raises:
      TypeError, ValueError: a side is not None nor an int from 0 to 2**31 - 1.
    """

    left: int | None = dataclasses.field(metadata=_STATIC)
    right: int | None = dataclasses.field(metadata=_STATIC)

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            side = getattr(self, name)
            if side is None:
                continue
            if isinstance(side, bool) or not isinstance(side, int | np.integer):
                raise TypeError(f"{name}: expected an int or None, got {side!r}")
            if not 0 <= side <= INT32_MAX:
                raise ValueError(f"{name}: expected 0 to {INT32_MAX}, or None for no bound, got {side}")
            object.__setattr__(self, name, int(side))

    def __call__(self, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        keep = FullMask()(b, h, q_pos, kv_pos)
        if self.left is not None:
            keep = keep & (q_pos - kv_pos <= self.left)
        if self.right is not None:
            keep = keep & (kv_pos - q_pos <= self.right)
        return keep


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PrefixLMMask:
    """Attention to both sides within a request's first `prefix_lens[b]` tokens, causal after them.

    It says all about causality: call `paged_attention` with `causal=False`.

    Attributes:
      prefix_lens: [num_reqs] int array.
    """

    prefix_lens: Any

    def __call__(self, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        prefix_len = _held("prefix_lens", self.prefix_lens, jnp.integer, [("num_reqs",)])[b]
        return (kv_pos <= q_pos) | (kv_pos < prefix_len)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DocumentMask:
    """Keeps scores within a document, of several that are packed into one request.

    Attributes:
      document_ids: [num_reqs, max_len] int array, the document of each position of a request. Positions from `max_len`
        on belong to no document.
    """

    document_ids: Any

    def __call__(self, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        ids = _held("document_ids", self.document_ids, jnp.integer, [("num_reqs", "max_len")])
        last = ids.shape[1] - 1
        if last < 0:
            return ~FullMask()(b, h, q_pos, kv_pos)
        q_known, kv_known = (q_pos >= 0) & (q_pos <= last), (kv_pos >= 0) & (kv_pos <= last)
        same = ids[b, jnp.clip(q_pos, 0, last)] == ids[b, jnp.clip(kv_pos, 0, last)]
        return same & q_known & kv_known


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AndMask:
    """Keeps what every mask keeps; see `and_masks`."""

    masks: tuple[MaskMod, ...]

    def __call__(self, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        return functools.reduce(jnp.logical_and, [mask(b, h, q_pos, kv_pos) for mask in self.masks])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OrMask:
    """Keeps what any mask keeps; see `or_masks`."""

    masks: tuple[MaskMod, ...]

    def __call__(self, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        return functools.reduce(jnp.logical_or, [mask(b, h, q_pos, kv_pos) for mask in self.masks])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NotMask:
    """Keeps what a mask does not; see `not_mask`."""

    mask: MaskMod

    def __call__(self, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        return jnp.logical_not(self.mask(b, h, q_pos, kv_pos))


def and_masks(*masks: MaskMod) -> AndMask:
    """A mask that keeps what every one of `masks` keeps; they may be plain functions.

    Raises:
      TypeError, ValueError: one is not a function, or there is none.
    """
    return AndMask(_children("masks", masks))


def or_masks(*masks: MaskMod) -> OrMask:
    """A mask that keeps what any of `masks` keeps; they may be plain functions.

    Raises:
      TypeError, ValueError: one is not a function, or there is none.
    """
    return OrMask(_children("masks", masks))


def not_mask(mask: MaskMod) -> NotMask:
    """A mask that keeps what `mask`, perhaps a plain function, does not."""
    return NotMask(as_pytree("mask", mask))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AlibiScore:
    """Adds `slope * (kv_pos - q_pos)` (Press et al., 2022).

    Attributes:
      slopes: [num_heads] or [num_reqs, num_heads] float array; see `alibi_slopes`.
    """

    slopes: Any

    def __call__(self, score: Any, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        slopes = _held("slopes", self.slopes, jnp.floating, [("num_heads",), ("num_reqs", "num_heads")])
        slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
        return score + slope * (kv_pos - q_pos)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftCapScore:
    """Bounds scores smoothly: `cap * tanh(score / cap)` (Gemma Team, 2024).

    Raises:
      TypeError, ValueError: `cap` is not a finite number above 0.
    """

    cap: float = dataclasses.field(metadata=_STATIC)

    def __post_init__(self) -> None:
        if isinstance(self.cap, bool) or not isinstance(self.cap, int | float | np.integer | np.floating):
            raise TypeError(f"cap: expected a number, got {type(self.cap).__name__}")
        if not (math.isfinite(self.cap) and self.cap > 0):
            raise ValueError(f"cap: expected a finite number above 0, got {self.cap}")
        object.__setattr__(self, "cap", float(self.cap))

    def __call__(self, score: Any, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        return self.cap * jnp.tanh(score / self.cap)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ComposedScore:
    """Several score functions, the first applied first; see `compose_scores`."""

    scores: tuple[ScoreMod, ...]

    def __call__(self, score: Any, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        for score_mod in self.scores:
            score = score_mod(score, b, h, q_pos, kv_pos)
        return score


def compose_scores(*scores: ScoreMod) -> ComposedScore:
    """A score function that applies `scores` from left to right; they may be plain functions.

    Raises:
      TypeError, ValueError: one is not a function, or there is none.
    """
    return ComposedScore(_children("scores", scores))


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The slopes of ALiBi (Press et al., 2022, arXiv:2108.12409): for n heads, the powers of `2 ** (-8 / n)`.

    For a number of heads that is not a power of two: the sequence of the next smaller one, then every second slope,
    from the first on, of the sequence of twice that.

    Returns:
      [num_heads] float32.
    """
    check_positive("num_heads", num_heads)

    def geometric(n: int) -> np.ndarray:
        return 2.0 ** (-8.0 / n * np.arange(1, n + 1))

    power = 1 << (int(num_heads).bit_length() - 1)
    slopes = np.concatenate([geometric(power), geometric(2 * power)[::2][: num_heads - power]])
    return slopes.astype(np.float32)


def _children(name: str, functions: tuple[Any, ...]) -> tuple[Any, ...]:
    if not functions:
        raise ValueError(f"{name}: expected at least one function, got none")
    return tuple(as_pytree(f"{name}[{i}]", function) for i, function in enumerate(functions))


def _held(name: str, x: Any, kind: Any, shapes: list[tuple[str, ...]]) -> Any:
    """The array that a mask or score function holds, checked and ready to be indexed by traced indices.

    Checked when it is used, not when the dataclass is made: JAX makes one around whatever a transformation puts in the
    place of its leaves. The check is by attributes, which arrays and references to them share.
    """
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
    if not jnp.issubdtype(x.dtype, kind):
        raise TypeError(f"{name}: expected {'integers' if kind is jnp.integer else 'floats'}, got {x.dtype}")
    if len(x.shape) not in [len(shape) for shape in shapes]:
        raise ValueError(f"{name}: expected shape {' or '.join(map(shape_text, shapes))}, got {shape_text(x.shape)}")
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x
