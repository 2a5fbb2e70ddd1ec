"""Triton kernels that do nothing but read, and add up what they read, to see how fast reads can be."""

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


@triton.jit
def _sum_pages(
    key_ptr,
    value_ptr,
    table_ptr,
    out_ptr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEPS: tl.constexpr,
):
    head = tl.program_id(0)
    program = tl.program_id(1)
    row, word = tl.arange(0, BLOCKS * SLOTS), tl.arange(0, WORDS)
    total = tl.zeros([BLOCKS * SLOTS, WORDS], tl.int32)
    for step in range(STEPS):
        block = tl.load(table_ptr + (program * STEPS + step) * BLOCKS + row // SLOTS).to(tl.int64)
        start = ((block * SLOTS + row % SLOTS) * HEADS + head) * WORDS
        place = start[:, None] + word[None, :]
        total += tl.load(key_ptr + place) + tl.load(value_ptr + place)
    tl.store(out_ptr + program * HEADS + head, tl.sum(tl.sum(total, axis=1), axis=0))


def read_pages(
    key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, blocks: int = 4, steps: int = 4, warps: int = 4
) -> torch.Tensor:
    """Sums over blocks of a paged cache, for runs of `blocks * steps` blocks and for each kv head.

    Args:
      key, value: [num_blocks, block_size, num_kv_heads, words] int32. A program reads one head's part of a block, as
        paged attention does.
      table: int32 indices of blocks, their number a multiple of `blocks * steps`.
      blocks: blocks read at a time.
    """
    _, slots, heads, words = key.shape
    programs = table.numel() // (blocks * steps)
    out = torch.empty(programs, heads, dtype=torch.int32, device=key.device)
    sizes = {"SLOTS": slots, "HEADS": heads, "WORDS": words, "BLOCKS": blocks, "STEPS": steps}
    _sum_pages[(heads, programs)](key, value, table, out, **sizes, num_warps=warps)
    return out
