"""Order between PyTorch's current stream on a GPU and XLA's own, kept by the GPU: the host waits for neither."""

import jax
import torch

from jaxpaged.bridge.dlpack import to_jax
from jaxpaged.bridge.process import forget_after_fork

_tokens: dict[torch.device, torch.Tensor] = {}
forget_after_fork(_tokens.clear)


def queued_work(device: torch.device) -> jax.Array:
    """An array [1] int32 that is there once PyTorch's current stream has done what is queued on it now.

    An XLA program starts when all its arguments are there, those included that it doesn't use.
    """
    token = _tokens.get(device)
    if token is None:
        token = _tokens[device] = torch.zeros(1, dtype=torch.int32, device=device)
    return to_jax(token, "token")


def wait_for(done: jax.Array) -> None:
    """What PyTorch's current stream is given from now on waits for an array; on the CPU, the host does."""
    if next(iter(done.devices())).platform == "cpu":
        done.block_until_ready()
    else:
        torch.from_dlpack(done)  # asks JAX for the memory on the current stream


def keep_until_done(*tensors: torch.Tensor) -> None:
    """Let PyTorch hand out the tensors' memory anew only after what its current stream has now, on whichever stream."""
    for x in tensors:
        if x.device.type == "cuda":
            x.record_stream(torch.cuda.current_stream(x.device))
