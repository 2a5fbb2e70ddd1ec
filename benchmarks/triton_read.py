"""A Triton kernel that does nothing but read, to see how fast reads can be."""

import torch
import triton
import triton.language as tl


@triton.jit
def _sum(x_ptr, out_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * STEPS * BLOCK
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        total += tl.load(x_ptr + start + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def read_all(x: torch.Tensor, steps: int = 16, block: int = 4096) -> torch.Tensor:
    """Sums of runs of `steps * block` int32 numbers of `x`, whose length is a multiple of that."""
    programs = x.numel() // (steps * block)
    out = torch.empty(programs, dtype=torch.int32, device=x.device)
    _sum[(programs,)](x, out, STEPS=steps, BLOCK=block)
    return out
