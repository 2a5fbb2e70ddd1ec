"""Where a layer's result goes: a new tensor, or the engine's buffer, perhaps in 8 bits."""

import math

import torch

from jaxpaged.backends.checks import check_tensors, on_gpu
from jaxpaged.bridge.torch_cache import QUANTIZED_DTYPES, quantize


def check_output(
    output: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    output_block_scale: torch.Tensor | None,
    query: torch.Tensor,
) -> None:
    """Raise unless `store` can put results for `query` there; see the arguments of `store`."""
    if not on_gpu(query=query, output=output, output_scale=output_scale):
        check_tensors(output=output, output_scale=output_scale)
    if output_block_scale is not None:
        raise NotImplementedError("output_block_scale: 4-bit outputs are not supported, expected None")
    if output_scale is None:
        if output is not None and output.dtype != query.dtype:
            raise TypeError(f"output: expected {query.dtype}, as query is, got {output.dtype}")
    else:
        if output is None or output.dtype not in QUANTIZED_DTYPES:
            got = None if output is None else output.dtype
            raise TypeError(f"output: with output_scale, expected one of {QUANTIZED_DTYPES}, got {got}")
        if output_scale.dtype != torch.float32 or output_scale.numel() != 1:
            raise ValueError(
                f"output_scale: expected one float32 number, got {output_scale.dtype} {list(output_scale.shape)}"
            )
    if output is None:
        return
    row = math.prod(query.shape[1:])
    if output.ndim < 2 or math.prod(output.shape[1:]) != row or output.shape[0] < query.shape[0]:
        raise ValueError(f"output: expected {query.shape[0]} rows or more of {row}, got shape {list(output.shape)}")


def store(result: torch.Tensor, output: torch.Tensor, output_scale: torch.Tensor | None) -> None:
    """Write rows into the first rows of an engine's buffer.

    Args:
      result: [n, num_heads, head_size].
      output: [n or more, num_heads, head_size] or [.., num_heads * head_size]; later rows stay as they are.
      output_scale: one float32 number by which rows are divided to be stored in an `output` of 8 bits.
    """
    rows = output[: result.shape[0]]
    result = result.reshape(rows.shape)
    if output_scale is None:
        rows.copy_(result)
        return
    stored = quantize(result, output.dtype, output_scale.reshape(()))
    (rows if output.dtype == torch.int8 else rows.view(torch.uint8)).copy_(stored)
