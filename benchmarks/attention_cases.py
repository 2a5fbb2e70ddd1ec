"""The attention cases that are measured on a GPU, what each should reach, and how much work each must do."""

import dataclasses
from typing import Literal

import numpy as np

Option = Literal["soft_cap", "alibi", "sinks", "lse", "score_mod"]
CacheDtype = Literal["bfloat16", "float8_e4m3fn", "int8"]
Window = tuple[int | None, int | None]

FLASH, TRITON, READS, PLAN = "FlashAttention-3", "Triton", "read ceiling", "plan"
BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}


@dataclasses.dataclass(frozen=True)
class Target:
    """What a case should reach.

    Attributes:
      ratio: the least of their time over ours; for the read ceiling, of our bandwidth over it; for the plan the most
        microseconds that it may take.
      against: a peer's name, "read ceiling", "plan", or the name of another case, which is then ours as well.
    """

    ratio: float
    against: str

    def __str__(self) -> str:
        if self.against == READS:
            return f">= {100 * self.ratio:.0f}% of reads"
        if self.against == PLAN:
            return f"plan <= {self.ratio:.0f} us"
        if self.against in (FLASH, TRITON):
            return f">= {self.ratio:.2f}x {self.against}"
        if self.ratio < 1:
            return f"<= {1 / self.ratio:.2f}x the time of {self.against}"
        return f">= {self.ratio:.2f}x {self.against}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `paged_attention`.

    Attributes:
      query_lens, seq_lens: new and all tokens of each request.
      shared_prefix: tokens at the start of every request that lie in the same blocks.
      option: what else the call asks for.
      command_buffers: whether XLA may make CUDA graphs of our program's kernels, in which no kernel starts early.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    targets: tuple[Target, ...] = ()
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    causal: bool = True
    window: Window | None = None
    cache: CacheDtype = "bfloat16"
    shared_prefix: int = 0
    option: Option | None = None
    command_buffers: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def uniform_queries(self) -> bool:
        return len(set(self.query_lens)) == 1

    def tiny(self) -> "Case":
        """The same kind of call, small enough for a CPU."""

        def shrink(length: int) -> int:
            return length if length <= 8 else 8 + length % 23

        prefix = 2 * self.block_size if self.shared_prefix else 0
        pairs = list(zip(self.query_lens, self.seq_lens, strict=True))
        pairs = pairs[:1] + pairs[1:][-2:]
        queries = tuple(shrink(q) for q, _ in pairs)
        lens = tuple(
            shrink(s - q) + shrink(q) + prefix if s > q else shrink(q) for q, s in pairs
        )  # context, if there is any, and new tokens
        window = None if self.window is None else (7, self.window[1])
        return dataclasses.replace(self, query_lens=queries, seq_lens=lens, shared_prefix=prefix, window=window)


def attended(case: Case, query_len: int, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """The first position that each new token of a request attends to, and the one after its last."""
    positions = seq_len - query_len + np.arange(query_len)
    left, right = case.window or (None, None)
    first = np.zeros_like(positions) if left is None else np.maximum(positions - left, 0)
    end = np.full_like(positions, seq_len) if right is None else np.minimum(positions + right + 1, seq_len)
    return first, np.minimum(end, positions + 1) if case.causal else end


def operations(case: Case) -> int:
    """Floating-point operations of the two matrix products, of the pairs that are attended to alone."""
    pairs = 0
    for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True):
        first, end = attended(case, query_len, seq_len)
        pairs += int((end - first).sum())
    return 4 * pairs * case.num_heads * case.head_size


def tokens_read(case: Case) -> int:
    """Tokens of the cache that have to be read once: those attended to, a shared prefix counted once."""
    tokens, prefix_start = 0, case.shared_prefix
    for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True):
        first, end = attended(case, query_len, seq_len)
        low, high = int(first.min()), int(end.max())
        tokens += high - max(low, min(case.shared_prefix, high))
        prefix_start = min(prefix_start, low)
    return tokens + case.shared_prefix - prefix_start


def bytes_read(case: Case) -> int:
    """Bytes of keys and values, and of scales per token, that have to be read once."""
    scale = 4 if case.cache == "int8" else 0
    return 2 * tokens_read(case) * case.num_kv_heads * (case.head_size * BYTES[case.cache] + scale)


def memory_bound(case: Case) -> bool:
    """Whether reading takes longer than computing on an H200, by its measured rates."""
    return bytes_read(case) / 4.37e12 > operations(case) / 790e12


Lens = tuple[int, ...]


def _decode(num_reqs: int, seq_len: int) -> tuple[Lens, Lens]:
    return (1,) * num_reqs, (seq_len,) * num_reqs


def _prefill(num_reqs: int, query_len: int, context: int = 0) -> tuple[Lens, Lens]:
    return (query_len,) * num_reqs, (context + query_len,) * num_reqs


def lognormal_lens() -> tuple[int, ...]:
    """64 lengths of at most 8192, 175,932 in all."""
    lens = np.random.default_rng(2790).lognormal(7.5, 1.0, 64).astype(int) + 1
    return tuple(int(n) for n in np.minimum(lens, 8192))


def uniform_lens(low: int, high: int, count: int) -> tuple[int, ...]:
    """Lengths from `low` to `high`, both included."""
    return tuple(int(n) for n in np.random.default_rng(0).integers(low, high + 1, count))


def half_decode_lens() -> tuple[Lens, Lens]:
    """New and all tokens of 32 decodes of 4096 tokens and 32 prefills of 7..503 on 0..2048: 8192 new tokens in all."""
    new = tuple(7 + 16 * i for i in range(32))
    contexts = tuple(2048 * (13 * i % 32) // 31 for i in range(32))
    return (1,) * 32 + new, (4096,) * 32 + tuple(q + c for q, c in zip(new, contexts, strict=True))


def _cases() -> tuple[Case, ...]:
    plain = "decode 64x4096"

    def flash(ratio: float) -> tuple[Target, ...]:
        return (Target(ratio, FLASH),)

    reads = (Target(0.98, READS), *flash(1.05))
    cases = [
        Case(plain, *_decode(64, 4096), targets=reads),
        Case("decode 16x8192", *_decode(16, 8192), targets=reads),
        Case("decode 128x1024", *_decode(128, 1024), targets=flash(1.2)),
        Case("decode 256x512", *_decode(256, 512), targets=flash(1.2)),
        Case("decode 128x256", *_decode(128, 256), targets=flash(1.2)),
        Case("decode 4x32768", *_decode(4, 32768), targets=flash(1.12)),
        Case("decode 2x32768", *_decode(2, 32768), targets=flash(1.2)),
        Case("decode 1x32768", *_decode(1, 32768), targets=flash(1.35)),
        Case("decode 64 lognormal", (1,) * 64, lognormal_lens(), targets=flash(1.05)),
        Case("decode 64 uniform", (1,) * 64, uniform_lens(1, 8191, 64), targets=flash(1.05)),
        Case("decode 64x4096 window 1024", *_decode(64, 4096), window=(1023, 0), targets=flash(1.05)),
        Case("decode 64x4096, 4 new", (4,) * 64, (4096,) * 64, targets=flash(1.0)),
        Case("decode 64x4096, 8 new", (8,) * 64, (4096,) * 64, targets=flash(1.0)),
        Case("decode 64x4096 fp8", *_decode(64, 4096), cache="float8_e4m3fn", targets=(Target(1.85, plain),)),
        Case("decode 64x4096 int8", *_decode(64, 4096), cache="int8", targets=(Target(1.7, plain),)),
        Case("decode 64 shared 4096+256", *_decode(64, 4096 + 256), shared_prefix=4096, targets=flash(5.0)),
    ]
    for block_size, ratio in ((16, 1.1), (128, 1.05)):
        suffix = "" if block_size == 16 else f" block {block_size}"
        for causal, num_reqs, length in ((True, 8, 4096), (True, 4, 8192), (True, 1, 32768), (False, 4, 8192)):
            kind = "prefill" if causal else "prefill not causal"
            name = f"{kind} {num_reqs}x{length}{suffix}"
            sizes = _prefill(num_reqs, length)
            cases.append(Case(name, *sizes, causal=causal, block_size=block_size, targets=flash(ratio)))
    ragged = uniform_lens(1, 900, 48)
    mixed_queries, mixed_lens = (1,) * 63 + (2048,), (4096,) * 63 + (32768 + 2048,)
    cases += [
        Case("chunk 2048 on 32768", *_prefill(1, 2048, 32768), targets=flash(1.05)),
        Case("mixed chunk + 63 decodes", mixed_queries, mixed_lens, targets=flash(1.05)),
        Case("mixed 64 requests, 8192 new", *half_decode_lens(), targets=(Target(300, PLAN),)),
        Case("mixed chunk, no XLA graph", mixed_queries, mixed_lens, targets=flash(1.05), command_buffers=False),
        Case(
            "mixed 64 requests, no XLA graph", *half_decode_lens(), targets=(Target(300, PLAN),), command_buffers=False
        ),
        Case("32x128 new on 4096", *_prefill(32, 128, 4096), targets=flash(1.05)),
        Case("prefill 48 ragged 1..900", ragged, ragged, targets=flash(1.05)),
        Case("1x128 new on 32768", *_prefill(1, 128, 32768), targets=flash(1.2)),
    ]
    for num_heads, num_kv_heads, head_size in ((64, 8, 64), (16, 16, 128), (8, 1, 256), (28, 4, 128), (96, 8, 128)):
        targets = flash(1.0) if head_size == 128 else (Target(1.5, TRITON),)
        for kind, lens in (("decode 64x4096", _decode(64, 4096)), ("prefill 4x4096", _prefill(4, 4096))):
            name = f"heads {num_heads}/{num_kv_heads} of {head_size}: {kind}"
            case = Case(name, *lens, targets, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)
            cases.append(case)
    options: tuple[Option, ...] = ("soft_cap", "alibi", "sinks", "lse", "score_mod")
    for option in options:
        case = Case(f"{plain} {option}", *_decode(64, 4096), option=option, targets=(Target(1 / 1.1, plain),))
        cases.append(case)
    return tuple(cases)


CASES = _cases()
PAGED_READS = CASES[0]
"""Whose keys and values are read to see how fast reads of blocks can be."""
