"""Decode and prefill on the CPU, beside PyTorch's gather and scaled_dot_product_attention on the same paged cache.

python benchmarks/attention_cpu.py [--write]
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness import Row, compare, report

from jaxpaged import KVCache, PagedBatch, paged_attention
from jaxpaged.bridge.dlpack import to_jax

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
# float32 sums in another order; bfloat16 outputs are rounded, and torch also rounds its weights.
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2}


def calls(num_reqs: int, query_len: int, seq_len: int, dtype: str) -> dict[str, Callable[[], Any]]:
    """The peer and ours on one cache of random numbers with permuted blocks."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = num_reqs * seq_len // BLOCK_SIZE

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(getattr(torch, dtype))

    key_cache = random(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    value_cache = random(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    query = random(num_reqs * query_len, NUM_HEADS, HEAD_SIZE)
    table = torch.randperm(num_blocks, generator=generator).view(num_reqs, -1)

    def gather_and_sdpa() -> torch.Tensor:
        def dense(cache: torch.Tensor) -> torch.Tensor:
            return cache[table].view(num_reqs, seq_len, NUM_KV_HEADS, HEAD_SIZE).transpose(1, 2)

        q = query.view(num_reqs, query_len, NUM_HEADS, HEAD_SIZE).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, dense(key_cache), dense(value_cache), is_causal=query_len > 1, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(query.shape)

    cache = KVCache.from_arrays(to_jax(key_cache), to_jax(value_cache))
    batch = PagedBatch.create(
        table.to(torch.int32).numpy(), np.full(num_reqs, seq_len), query_lens=np.full(num_reqs, query_len)
    )
    shared_query = to_jax(query)
    return {
        "torch gather + SDPA": gather_and_sdpa,
        "jaxpaged reference": lambda: paged_attention(shared_query, cache, batch).block_until_ready(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    rows: list[Row] = []
    for dtype in ("float32", "bfloat16"):
        for name, num_reqs, query_len in (
            ("decode, 16 requests of 2048", 16, 1),
            ("prefill, 1 prompt of 2048", 1, 2048),
        ):
            size = (2 * num_reqs * 2048 * NUM_KV_HEADS + num_reqs * query_len * NUM_HEADS) * HEAD_SIZE
            inputs = size * (4 if dtype == "float32" else 2)
            case = f"{name}, {dtype}, inputs {inputs / 1e6:.0f} MB"
            rows += compare(case, calls(num_reqs, query_len, 2048, dtype), tolerance=TOLERANCE[dtype])
    report(
        "Attention on the CPU",
        rows,
        packages=("jax", "torch", "numpy"),
        notes=[
            f"{NUM_HEADS} query heads, {NUM_KV_HEADS} kv heads of {HEAD_SIZE}, block size {BLOCK_SIZE}, causal.",
            "ms: median of 9 rounds of the least of 3 calls, in turns. Extra peak: growth of the process during a "
            "call, its output included.",
        ],
        file="attention_cpu.md" if arguments.write else None,
    )


if __name__ == "__main__":
    main()
