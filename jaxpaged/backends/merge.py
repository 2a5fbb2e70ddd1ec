"""merge_attn_states: attention states over parts of the keys, put together."""

import torch

from jaxpaged.backends.checks import check_activation, check_out, check_tensors, on_gpu
from jaxpaged.backends.padded_calls import merge_call
from jaxpaged.bridge.merge_calls import merge_on_gpu


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
) -> None:
    """Merge attention to a prefix and to a suffix of the keys into attention to both, in place.

    Args:
      output: [num_tokens, num_heads, v_head_size], written; it may be one of the inputs.
      prefix_output, suffix_output: the same shape and dtype, float32, bfloat16 or float16.
      prefix_lse, suffix_lse: [num_heads, num_tokens] float32, natural logarithm; infinite where nothing was attended.
      output_lse: [num_heads, num_tokens] float32, written.

    Raises:
      NotImplementedError: on a GPU, what the kernel doesn't take.
      TypeError, ValueError: an argument doesn't fit; nothing has been written.
    """
    tensors = {
        "output": output, "prefix_output": prefix_output, "prefix_lse": prefix_lse, "suffix_output": suffix_output,
        "suffix_lse": suffix_lse, "output_lse": output_lse,
    }  # fmt: skip
    gpu = on_gpu(**tensors)
    if not gpu:
        check_tensors(**tensors)
    check_activation("prefix_output", prefix_output, ("num_tokens", "num_heads", "v_head_size"))
    shape, dtype = tuple(prefix_output.shape), prefix_output.dtype
    check_activation("suffix_output", suffix_output, shape, dtype)
    check_out(output, shape, dtype, name="output")
    for name, lse in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse), ("output_lse", output_lse)):
        check_out(lse, (shape[1], shape[0]), torch.float32, name=name)
    if gpu:
        merge_on_gpu([prefix_output, suffix_output], [prefix_lse, suffix_lse], output, output_lse)
        return
    merged, merged_lse = merge_call([prefix_output, suffix_output], [prefix_lse, suffix_lse])
    output.copy_(merged)
    if output_lse is not None and merged_lse is not None:
        output_lse.copy_(merged_lse)
