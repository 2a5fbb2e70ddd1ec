"""Users' functions of scores and positions in kernels: which can go there, and how they are called there."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxpaged.reference.attention import AttentionOptions

_NAMES = """
abs add and broadcast_in_dim clamp convert_element_type copy cos custom_jvp_call div eq exp exp2 ge gt integer_pow jit
le log logistic lt max min mul ne neg not or pjit rem round rsqrt select_n shift_left shift_right_arithmetic
shift_right_logical sign sin sqrt square stop_gradient sub tanh xor
"""
KNOWN = frozenset(_NAMES.split())
"""Primitives that Mosaic GPU computes element by element, seen with jax 0.11.2 and 0.12.0."""

_PLACE = (jax.ShapeDtypeStruct((), jnp.int32), *[jax.ShapeDtypeStruct((64, 8), jnp.int32)] * 3)
"""A request, and query heads and positions of a tile."""


def function_refusal(options: AttentionOptions) -> str | None:
    """Why the functions of a call can't be computed in a kernel, or None."""
    for name, function in (("mask_mod", options.mask_mod), ("score_mod", options.score_mod)):
        if function is None:
            continue
        if any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(function)):
            return f"{name} holds arrays, which the kernels don't take"
        reason = _refusal(name, function)
        if reason is not None:
            return reason
    return None


@functools.lru_cache(maxsize=256)
def _traced(function: Callable[..., Any], *, scored: bool) -> ClosedJaxpr:
    """A mask function, or one of scores, at `_PLACE`."""
    score = [jax.ShapeDtypeStruct(_PLACE[-1].shape, jnp.float32)] if scored else []
    return jax.make_jaxpr(function)(*score, *_PLACE)


@functools.lru_cache(maxsize=256)
def _refusal(name: str, function: Callable[..., Any]) -> str | None:
    traced = _traced(function, scored=name == "score_mod")
    if traced.consts:
        return f"{name} holds arrays, which the kernels don't take"
    unknown = sorted(_primitives(traced.jaxpr) - KNOWN)
    return f"{name} uses {', '.join(unknown)}, which the kernels don't compute" if unknown else None


def _inner(parameters: dict[str, Any]) -> Any:
    inner = parameters.get("jaxpr", parameters.get("call_jaxpr"))
    return inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner


def _primitives(jaxpr: Jaxpr) -> set[str]:
    names = {str(equation.primitive) for equation in jaxpr.eqns}
    inner = [_inner(equation.params) for equation in jaxpr.eqns]
    return names.union(*(_primitives(x) for x in inner if x is not None))


@functools.lru_cache(maxsize=256)
def inputs_read(function: Callable[..., Any], *, scored: bool) -> frozenset[int]:
    """On which of request, head and positions, by index, the result of a mask or a score function depends."""
    needed = _needed(_traced(function, scored=scored).jaxpr, {0})
    return frozenset(i - scored for i in needed if i >= scored)


def reads_head(mask_mod: Callable[..., Any]) -> bool:
    """Whether what a mask function returns depends on the query head."""
    return 1 in inputs_read(mask_mod, scored=False)


def _needed(jaxpr: Jaxpr, results: set[int]) -> set[int]:
    """Which of a jaxpr's inputs the results of these indices depend on."""
    needed = {id(jaxpr.outvars[i]) for i in results}
    for equation in reversed(jaxpr.eqns):
        results = {i for i, x in enumerate(equation.outvars) if id(x) in needed}
        inner = _inner(equation.params)
        inputs = range(len(equation.invars)) if inner is None else _needed(inner, results)
        needed |= {id(equation.invars[i]) for i in inputs if results}
    return {i for i, x in enumerate(jaxpr.invars) if id(x) in needed}


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a kernel, in terms that Mosaic GPU can compile."""
    traced = jax.make_jaxpr(function)(*arguments)
    (result,) = _evaluate(traced.jaxpr, arguments)
    return result


def _evaluate(jaxpr: Jaxpr, arguments: Any) -> list[Any]:
    values = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        inputs = [read(x) for x in equation.invars]
        inner = _inner(equation.params)
        if inner is not None:
            results = _evaluate(inner, inputs)
        elif str(equation.primitive) == "not" and inputs[0].dtype == jnp.bool_:
            results = [jnp.where(inputs[0], 0, 1) == 1]  # there is no negation of flags in registers
        else:
            results = equation.primitive.bind(*inputs, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]
