"""Random inputs of an attention case, on the GPU or the CPU, and float64 results for some of their rows."""

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from attention_cases import Case, attended

SOFT_CAP = 30.0
FP8_SCALE = 1 / 64
GARBAGE = (-1, 2**30, -(2**31))
"""What fills a block table past a request's length."""


def score_mod(score: Any, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
    """A bias by distance for three of every four heads, of JAX arrays or torch tensors."""
    return score - 1e-3 * (h % 4) * (q_pos - kv_pos)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Torch tensors of one case; JAX gets views of them.

    Attributes:
      query: [num_tokens, num_heads, head_size] bfloat16.
      key, value: [num_blocks, block_size, num_kv_heads, head_size], of the case's cache dtype.
      block_table: [num_reqs, width] int32, 0 past a request's length.
      garbage_table: the same on the host, with garbage there.
      seq_lens, query_starts: [num_reqs] and [num_reqs + 1] int32.
      k_scale, v_scale: [] float32 for float8, [num_blocks, block_size, num_kv_heads] for int8, else None.
      alibi_slopes, sinks: [num_heads] float32.
      unused: indices of the cache's slots that hold no token.
    """

    case: Case
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    block_table: torch.Tensor
    garbage_table: np.ndarray
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    alibi_slopes: torch.Tensor
    sinks: torch.Tensor
    unused: torch.Tensor

    @property
    def scale(self) -> float:
        return self.case.head_size**-0.5

    def fill_unused(self, *, poison: bool) -> None:
        """Write NaN, or the largest number of a dtype that has none, to the slots that hold no token; or else 0."""
        for cache, scale in ((self.key, self.k_scale), (self.value, self.v_scale)):
            slots = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
            slots = slots.view(-1, *cache.shape[2:])
            nan = {torch.bfloat16: math.nan, torch.int8: 127, torch.uint8: 0x7F}[slots.dtype]
            slots[self.unused] = nan if poison else 0
            if scale is not None and scale.ndim == 3:
                scale.view(-1, scale.shape[-1])[self.unused] = math.nan if poison else 0.0


def make_inputs(case: Case, device: str, seed: int = 0) -> Inputs:
    """Normal random numbers in blocks that lie in random order, with some blocks between them that nobody uses."""
    generator = torch.Generator(device).manual_seed(seed)
    rng = np.random.default_rng(seed)
    table, num_blocks = _block_table(case, rng)
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    (key, k_scale), (value, v_scale) = (_cache(case, shape, generator, device) for _ in range(2))
    starts = np.concatenate([[0], np.cumsum(case.query_lens)])
    width = np.arange(table.shape[1])
    held = width * case.block_size < np.array(case.seq_lens)[:, None]
    garbage = np.where(held, table, rng.choice(GARBAGE, table.shape))
    used = np.zeros((num_blocks, case.block_size), bool)
    for row, seq_len in zip(table, case.seq_lens, strict=True):
        positions = np.arange(seq_len)
        used[row[positions // case.block_size], positions % case.block_size] = True

    def on_device(x: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.asarray(x)).to(device=device, dtype=dtype)

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    return Inputs(
        case=case,
        query=random(case.num_tokens, case.num_heads, case.head_size, dtype=torch.bfloat16),
        key=key,
        value=value,
        block_table=on_device(table, torch.int32),
        garbage_table=garbage.astype(np.int32),
        seq_lens=on_device(case.seq_lens, torch.int32),
        query_starts=on_device(starts, torch.int32),
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=on_device(2.0 ** (-8 * (1 + np.arange(case.num_heads)) / case.num_heads), torch.float32),
        sinks=random(case.num_heads, dtype=torch.float32),
        unused=on_device(np.flatnonzero(~used), torch.int64),
    )


def _block_table(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """[num_reqs, width], 0 past a request's length, and the number of blocks of the cache."""
    counts = [math.ceil(seq_len / case.block_size) for seq_len in case.seq_lens]
    shared = case.shared_prefix // case.block_size
    num_blocks = sum(counts) - shared * (len(counts) - 1 if shared else 0) + 8
    free = iter(rng.permutation(num_blocks))
    prefix = [next(free) for _ in range(shared)]
    table = np.zeros((len(counts), max(counts)), np.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = prefix + [next(free) for _ in range(count - shared)]
    return table, num_blocks


def _cache(
    case: Case, shape: tuple[int, ...], generator: torch.Generator, device: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys or values, and their scales."""
    numbers = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
    if case.cache == "bfloat16":
        return numbers, None
    if case.cache == "float8_e4m3fn":
        scale = torch.full((), FP8_SCALE, dtype=torch.float32, device=device)
        return (numbers.float() / FP8_SCALE).to(torch.float8_e4m3fn), scale
    floats = numbers.float()
    scales = floats.abs().amax(-1) / 127
    return torch.round(floats / scales[..., None]).to(torch.int8), scales


@dataclasses.dataclass(frozen=True)
class Sample:
    """Rows of the output: of some pairs of a token and a head, in float64.

    Attributes:
      tokens, heads: [rows] int64.
      out: [rows, head_size] float64.
      lse: [rows] float64.
    """

    tokens: torch.Tensor
    heads: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def errors(self, out: torch.Tensor) -> tuple[float, float]:
        """Of an output [num_tokens, num_heads, head_size]: norm of the error over that of the rows, largest error."""
        error = out[self.tokens, self.heads].double() - self.out
        return float(error.norm() / self.out.norm()), float(error.abs().max())


def sample_rows(inputs: Inputs, count: int = 64, seed: int = 0) -> Sample:
    """`count` rows, the first and the last token's among them."""
    case = inputs.case
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, case.num_tokens, count)
    tokens[:2] = 0, case.num_tokens - 1
    heads = rng.integers(0, case.num_heads, count)
    rows = [_row(inputs, int(token), int(head)) for token, head in zip(tokens, heads, strict=True)]
    device = inputs.query.device
    return Sample(
        torch.as_tensor(tokens).to(device),
        torch.as_tensor(heads).to(device),
        torch.stack([out for out, _ in rows]),
        torch.stack([lse for _, lse in rows]),
    )


def _row(inputs: Inputs, token: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of the output and its lse, by definition, in float64."""
    case = inputs.case
    starts = np.concatenate([[0], np.cumsum(case.query_lens)])
    request = int(np.searchsorted(starts, token, side="right")) - 1
    query_len, seq_len = case.query_lens[request], case.seq_lens[request]
    first, end = (int(x[token - starts[request]]) for x in attended(case, query_len, seq_len))
    q_pos = seq_len - query_len + token - int(starts[request])
    kv_pos = torch.arange(first, end, device=inputs.query.device)
    block = inputs.block_table[request, kv_pos // case.block_size].long()
    slot, kv_head = kv_pos % case.block_size, head // (case.num_heads // case.num_kv_heads)

    def rows(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        taken = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
        numbers = taken[block, slot, kv_head].view(cache.dtype).float().double()
        if scale is None:
            return numbers
        return numbers * (scale.double() if scale.ndim == 0 else scale[block, slot, kv_head].double()[:, None])

    scores = inputs.scale * (rows(inputs.key, inputs.k_scale) @ inputs.query[token, head].double())
    if case.option == "soft_cap":
        scores = SOFT_CAP * torch.tanh(scores / SOFT_CAP)
    if case.option == "score_mod":
        scores = score_mod(scores, request, head, q_pos, kv_pos)
    if case.option == "alibi":
        scores = scores + inputs.alibi_slopes[head].double() * (kv_pos - q_pos)
    lse = torch.logsumexp(scores, 0)
    total = torch.logaddexp(lse, inputs.sinks[head].double()) if case.option == "sinks" else lse
    return torch.exp(scores - total) @ rows(inputs.value, inputs.v_scale), lse
