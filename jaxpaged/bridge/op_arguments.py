"""Operators' arguments by name. What an operator takes its function for GPUs says, once for all that serve it."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from jaxpaged.bridge.decode_calls import by_query_head
from jaxpaged.bridge.decode_shapes import ScoreOptions


class Arguments(SimpleNamespace):
    """A call's arguments as attributes, defaults included."""

    @classmethod
    def of(cls, function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> "Arguments":
        """Those of a call that `function` would take.

        Raises:
          TypeError: it would not take them.
        """
        bound = _signature(function).bind(*given, **named)
        bound.apply_defaults()
        return cls(**bound.arguments)

    @property
    def scores(self) -> ScoreOptions:
        return ScoreOptions(self.scale, self.causal, self.window_left, self.window_right, self.soft_cap)

    @property
    def layer(self) -> tuple[Any, ...]:
        """The first arguments of `decode_shapes` and `prefill_shapes`."""
        return self.query, self.key_cache, self.value_cache, self.block_table

    @property
    def how(self) -> tuple[Any, ...]:
        """Their others; `max_query_len` is decode's alone."""
        longest = [self.max_query_len] if hasattr(self, "max_query_len") else []
        return *longest, self.batch_invariant, self.scores, self.k_scale, self.v_scale

    @property
    def cache(self) -> tuple[Any, ...]:
        """Keys, values and their scales."""
        return self.key_cache, self.value_cache, self.k_scale, self.v_scale

    @property
    def by_query_head(self) -> tuple[Any, Any]:
        """Decode's slopes [1 or num_reqs, num_heads] and sinks [1, num_heads], or None."""
        kind = {"num_heads": self.out.shape[1], "num_kv_heads": self.key_cache.shape[2]}
        kind["max_query_len"] = self.max_query_len
        return by_query_head(self.slopes, **kind), by_query_head(self.sinks, **kind)


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)
