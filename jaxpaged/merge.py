"""merge_attention_states: check the arguments, call the implementation."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.attention import QUERY_DTYPES, check_array_like
from jaxpaged.implementations import choose, static_options
from jaxpaged.metadata.checks import check_dtype, check_shape
from jaxpaged.operation import operation, refuse_vmap
from jaxpaged.reference import merge as reference


def merge_attention_states(outputs: Any, lses: Any, *, implementation: str | None = None) -> tuple[Any, Any]:
    """The attention to all keys from attentions to disjoint parts of them (Liu et al., Ring Attention, 2023).

    Args:
      outputs: states [num_states, num_tokens, num_heads, v_head_size], or a sequence of arrays of the last three axes,
        of one float dtype. They were computed without sinks; sinks are applied to the merged state, by
        `out * sigmoid(lse - sink)`.
      lses: [num_states, num_heads, num_tokens] float32, or a sequence; natural logarithm. -inf, and also +inf, marks a
        row that attended to nothing, whose output is not looked at.
      implementation: "reference", "mosaic_gpu" (Hopper GPUs), or None for the best one.

    Returns:
      The merged output [num_tokens, num_heads, v_head_size] in the dtype of `outputs` and lse [num_heads, num_tokens]
      float32. Rows with nothing attended in any state give 0 and -inf.
    """
    if isinstance(outputs, Sequence) or isinstance(lses, Sequence):
        if len(outputs) != len(lses) or len(outputs) == 0:
            raise ValueError(
                f"lses: expected as many as outputs, at least one, got {len(lses)} and {len(outputs)} outputs"
            )
        for i, (out, lse) in enumerate(zip(outputs, lses, strict=True)):
            check_array_like(f"outputs[{i}]", out)
            check_array_like(f"lses[{i}]", lse)
            check_dtype(f"outputs[{i}]", out.dtype, [outputs[0].dtype])
            check_shape(f"outputs[{i}]", out.shape, outputs[0].shape)
            check_shape(f"lses[{i}]", lse.shape, lses[0].shape)
        outputs, lses = jnp.stack(outputs), jnp.stack(lses)
    check_array_like("outputs", outputs)
    check_array_like("lses", lses)
    check_dtype("outputs", outputs.dtype, QUERY_DTYPES)
    check_dtype("lses", lses.dtype, [jnp.float32])
    check_shape("outputs", outputs.shape, ("num_states", "num_tokens", "num_heads", "v_head_size"))
    check_shape("lses", lses.shape, (outputs.shape[0], outputs.shape[2], outputs.shape[1]))
    if outputs.shape[0] == 0:
        raise ValueError("outputs: expected at least one state, got 0")

    def refusal() -> str | None:
        from jaxpaged.pallas import merge

        return merge.refusal(outputs)

    choice = choose(implementation, (outputs, lses), refusal)
    return _merge(outputs, lses, **static_options(choice))


@functools.partial(jax.jit, static_argnames=("implementation", "interpret"))
@operation("merge_attention_states")
def _merge(outputs: Any, lses: Any, *, implementation: str, interpret: Any) -> tuple[Any, Any]:
    if implementation == "reference":
        return reference.merge_attention_states(outputs, lses)
    from jaxpaged.pallas import merge

    outputs, lses = refuse_vmap("merge_attention_states", (outputs, lses))
    return merge.merge_attention_states(outputs, lses, interpret=interpret)
