"""The merge of attention states for PyTorch's tensors on a GPU: one launch, on copies that lie side by side."""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from jaxpaged.bridge import kernel_functions
from jaxpaged.bridge.cache_shapes import array_shape, check_one_device
from jaxpaged.bridge.launch import program
from jaxpaged.bridge.process import forget_after_fork
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.pallas import merge

_mergers: dict[Any, Any] = {}
forget_after_fork(_mergers.clear)


def merge_on_gpu(
    outputs: list[torch.Tensor], lses: list[torch.Tensor], out: torch.Tensor, out_lse: torch.Tensor | None
) -> None:
    """`jaxpaged.merge_attention_states` into `out`, which may be one of the states.

    Args:
      outputs: [num_tokens, num_heads, v_head_size] each.
      lses: [num_heads, num_tokens] float32 each.

    Raises:
      NotImplementedError: the kernel doesn't take such states.
    """
    num_tokens, num_heads, width = out.shape
    if 0 in out.shape:
        return
    check_one_device(out, **{f"outputs[{i}]": x for i, x in enumerate(outputs)}, out_lse=out_lse)
    size = max(next_bucket(num_tokens), merge.tile_tokens(width, array_shape(out).dtype))  # whole tiles
    states = out.new_empty((len(outputs), size, num_heads, width))
    state_lses = out.new_empty((len(outputs), num_heads, size), dtype=torch.float32)
    launch = _merger(states)
    for i, (x, lse) in enumerate(zip(outputs, lses, strict=True)):
        states[i, :num_tokens].copy_(x)
        state_lses[i, :, :num_tokens].copy_(lse)
    merged, merged_lse = states.new_empty(states.shape[1:]), state_lses.new_empty(state_lses.shape[1:])
    launch(tuple(x.data_ptr() for x in (states, state_lses, merged, merged_lse)))
    out.copy_(merged[:num_tokens])
    if out_lse is not None:
        out_lse.copy_(merged_lse[:, :num_tokens])


def _merger(states: torch.Tensor) -> Any:
    name = (states.shape, states.dtype, states.get_device())
    found = _mergers.get(name)
    if found is None:
        shape = array_shape(states)
        reason = merge.refusal(shape)
        if reason is not None:
            raise NotImplementedError(reason)
        n, size, num_heads, _ = shape.shape
        lses = jax.ShapeDtypeStruct((n, num_heads, size), jnp.float32)
        made = program(kernel_functions.merge_states, shape, lses, device=states.get_device())
        found = _mergers[name] = made.bind(0, 1, results=(2, 3))
    return found
