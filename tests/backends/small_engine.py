"""A batch as an engine hands it to a backend: a cache with requests in it, poison in all that is not theirs."""

import math

import numpy as np
import pytest
import torch

from jaxpaged.bridge.dlpack import to_numpy
from jaxpaged.testing import oracle

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4.1e-3, torch.float16: 5.2e-4}
"""Relative to the largest number of the oracle's output."""


class SmallEngine:
    """Requests with new tokens that are not in the cache yet.

    Attributes:
      kv_cache: [2, num_blocks, block_size, num_kv_heads, head_size], NaN but for the tokens before the new ones. Block
        0 is nobody's.
      table: [num_reqs, max_blocks_per_req] int32, no multiple of 64 bytes from the start of its memory; garbage past a
        request's blocks.
      query, key, value: [num_tokens, heads * head_size], slices of one fused projection.
      slots: [num_tokens] int64.
      keys, values: of each request, [seq_len, num_kv_heads, head_size], the new ones included.
    """

    def __init__(
        self, query_lens, seq_lens, *, dtype=torch.float32, heads=(4, 2), head_size=32, block_size=16, garbage=10**6
    ):
        torch.manual_seed(0)
        self.query_lens, self.lens_list, self.dtype = list(query_lens), list(seq_lens), dtype
        self.num_heads, self.num_kv_heads = heads
        self.head_size, self.block_size = head_size, block_size
        needed = [math.ceil(n / block_size) for n in seq_lens]
        num_blocks = sum(needed) + 3
        self.kv_cache = torch.full((2, num_blocks, block_size, heads[1], head_size), torch.nan, dtype=dtype)
        free = (torch.randperm(num_blocks - 1) + 1).tolist()
        table = torch.full((len(seq_lens) + 1, max(needed, default=0) + 2), garbage, dtype=torch.int32)
        for row, n in zip(table[1:], needed, strict=True):
            row[:n] = torch.tensor([free.pop() for _ in range(n)], dtype=torch.int32)
        self.table = table[1:]
        self.lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.keys, self.values = ([torch.randn(n, heads[1], head_size).to(dtype) for n in seq_lens] for _ in "kv")
        sizes = [heads[0] * head_size, heads[1] * head_size, heads[1] * head_size]
        fused = torch.randn(sum(query_lens), sum(sizes)).to(dtype)
        self.query, self.key, self.value = fused.split(sizes, 1)
        slots = []
        for i, (new, n) in enumerate(zip(query_lens, seq_lens, strict=True)):
            position = torch.arange(n)
            own = self.table[i][position // block_size].long() * block_size + position % block_size
            for x, side in ((self.keys[i], 0), (self.values[i], 1)):
                self.kv_cache[side].flatten(0, 1)[own[: n - new]] = x[: n - new]
            rows = slice(int(self.starts[i]), int(self.starts[i + 1]))
            self.key[rows], self.value[rows] = (x[n - new :].flatten(1) for x in (self.keys[i], self.values[i]))
            slots.append(own[n - new :])
        self.slots = torch.cat(slots) if slots else torch.zeros(0, dtype=torch.long)
        self.before = self.bits()

    def bits(self):
        return self.kv_cache.clone().view(torch.uint8)

    def expected(self, **options):
        """The oracle's output [num_tokens, num_heads, head_size]."""
        query = to_numpy(self.query.contiguous()).astype(np.float64)
        keys, values = ([to_numpy(x).astype(np.float64) for x in xs] for xs in (self.keys, self.values))
        out, _ = oracle.attention(
            query.reshape(-1, self.num_heads, self.head_size), keys, values, np.array(self.query_lens), **options
        )
        return out

    def written(self):
        """The cache's bits as they must be after a write: the new tokens in their slots, all else untouched."""
        written = self.before.view(self.dtype).clone()
        for side, x in enumerate((self.key, self.value)):
            written[side].flatten(0, 1)[self.slots] = x.reshape(-1, self.num_kv_heads, self.head_size)
        return written.view(torch.uint8)

    def check(self, out, **options):
        """`out` is the oracle's, and the cache holds the new tokens and is otherwise untouched."""
        assert_close(out.reshape(-1, self.num_heads, self.head_size), self.expected(**options))
        assert torch.equal(self.bits(), self.written())

    def check_refused(self, call, metadata, fields, error, match):
        """`call()` raises when `fields` of the metadata are others, and writes nothing."""
        for field, value in fields.items():
            setattr(metadata, field, value)
        with pytest.raises(error, match=match):
            call()
        assert torch.equal(self.bits(), self.before)


def assert_close(out, expected, tolerance=None):
    tolerance = TOLERANCE[out.dtype] if tolerance is None else tolerance
    error = np.abs(out.double().numpy() - expected).max(initial=0)
    assert np.isfinite(error)
    assert error <= tolerance * np.abs(expected).max(initial=1e-30), error
