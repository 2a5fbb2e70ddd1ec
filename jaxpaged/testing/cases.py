"""The suite of cases that every implementation must pass, through every way in, and how a case's arrays are made."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxpaged.metadata.layout import CacheDims, KVLayout
from jaxpaged.testing import oracle

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
QUANTIZED = (*FLOAT8, "int8")
ScaleKind = Literal["tensor", "head", "token_head"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch over a paged cache, to be drawn with `build`.

    Attributes:
      query_lens, seq_lens: new and all tokens of each request; a request with neither is a padding row.
      scales: for 8-bit caches.
      options: names and values of arguments of `paged_attention`; "alibi", "alibi_per_request" and "sinks" stand for
        random arrays, functions for themselves.
      shared: how many first blocks every request shares with the first one.
      extra_tokens: rows of the query that belong to no request; they hold NaN.
      short_table: the table is a block too narrow for the longest request, whose length is clamped.
      bad_blocks: the first block of every other request of several blocks is out of range.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    v_head_size: int | None = None
    block_size: int = 16
    layout: str = "NHD"
    dtype: str = "float32"
    cache_dtype: str | None = None
    scales: ScaleKind | None = None
    options: tuple[tuple[str, Any], ...] = ()
    shared: int = 0
    extra_tokens: int = 0
    short_table: bool = False
    bad_blocks: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A case's arrays, all NumPy; buffers in the case's layout, poisoned where no request may read.

    Attributes:
      slot_mapping: [num_tokens] int32, where each new token's key and value lie; -1 for one that has no slot.
      options: arguments of `paged_attention`.
      key_values, value_values: what the cache holds, in float64 [num_blocks, block_size, num_kv_heads, head_size].
    """

    case: Case
    query: np.ndarray
    key_buffer: np.ndarray
    value_buffer: np.ndarray | None
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None
    block_table: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    slot_mapping: np.ndarray
    options: dict[str, Any]
    key_values: np.ndarray
    value_values: np.ndarray

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """The oracle's output and lse."""
        keys, values, valid = oracle.gather(self.key_values, self.value_values, self.block_table, self.seq_lens)
        options = {k: v for k, v in self.options.items() if k not in ("out_dtype", "batch_invariant")}
        query = self.query.astype(np.float64)
        return oracle.attention(query, keys, values, np.diff(self.query_start_loc), valid=valid, **options)


def build(case: Case) -> Inputs:
    """Draw a case's arrays from its seed."""
    rng = np.random.default_rng(case.seed)
    seq_lens = np.array(case.seq_lens, np.int32)
    table, num_blocks = _block_table(case, rng)
    dims = CacheDims(num_blocks, case.block_size, case.num_kv_heads, case.head_size, case.v_head_size or case.head_size)
    used = np.zeros((num_blocks, case.block_size), bool)
    for row, length in zip(table, seq_lens, strict=True):
        position = np.arange(min(length, len(row) * case.block_size))
        block = row[position // case.block_size]
        real = (block >= 0) & (block < num_blocks)
        used[block[real], position[real] % case.block_size] = True
    key, k_scale, key_values = _stored(
        case, rng, (num_blocks, case.block_size, case.num_kv_heads, dims.head_size), used
    )
    value, v_scale, value_values = _stored(
        case, rng, (num_blocks, case.block_size, case.num_kv_heads, dims.v_head_size), used
    )
    key_buffer, value_buffer = _laid_out(KVLayout.of(case.layout), dims, key, value)
    starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(case.query_lens, dtype=np.int32)])
    query_shape = (int(starts[-1]) + case.extra_tokens, case.num_heads, case.head_size)
    query = rng.standard_normal(query_shape).astype(case.dtype)
    query[starts[-1] :] = np.nan
    return Inputs(
        case=case,
        query=query,
        key_buffer=key_buffer,
        value_buffer=value_buffer,
        k_scale=k_scale,
        v_scale=v_scale,
        block_table=table,
        seq_lens=seq_lens,
        query_start_loc=starts,
        slot_mapping=_slot_mapping(case, table, num_blocks),
        options=_drawn_options(case, rng),
        key_values=key_values,
        value_values=value_values,
    )


def _block_table(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """A table of permuted blocks, garbage past each request's own, and the number of physical blocks."""
    needed = [-(-length // case.block_size) for length in case.seq_lens]
    num_blocks = sum(needed) + 3
    free = rng.permutation(num_blocks).tolist()
    width = max(needed, default=0) + 2
    table = rng.choice([-1, 0, 1, num_blocks, 2**30, -(2**31), 2**31 - 1], (len(needed), width)).astype(np.int32)
    for i, n in enumerate(needed):
        own = [free.pop() for _ in range(n)]
        common = min(case.shared, n, needed[0])
        table[i, :n] = [*table[0, :common], *own[common:]] if i else own
        if case.bad_blocks and n > 1:
            table[i, 0] = (-1, num_blocks, 2**31 - 1, table[i, 0])[i % 4]
    return table[:, : max(needed) - 1] if case.short_table else table, num_blocks


def _slot_mapping(case: Case, table: np.ndarray, num_blocks: int) -> np.ndarray:
    slots = []
    for row, query_len, seq_len in zip(table, case.query_lens, case.seq_lens, strict=True):
        length = min(seq_len, len(row) * case.block_size)
        for position in range(length - query_len, length):
            block = int(row[position // case.block_size]) if position >= 0 else -1
            slots.append(block * case.block_size + position % case.block_size if 0 <= block < num_blocks else -1)
    return np.array(slots + [-1] * case.extra_tokens, np.int32)


def _stored(
    case: Case, rng: np.random.Generator, shape: tuple[int, ...], used: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Random cache content: as stored, its scales, and its float64 values; what is not `used` is poison."""
    dtype = case.cache_dtype or case.dtype
    x = rng.standard_normal(shape).astype(np.float32)
    if dtype not in QUANTIZED:
        stored = x.astype(dtype)
        stored[~used] = np.nan
        return stored, None, stored.astype(np.float64)
    scale: np.ndarray | None
    by_row: Any
    if case.scales == "token_head":
        scale = oracle.row_scales(x, dtype)
        by_row = scale[..., None].copy()
        scale[~used] = np.nan
    elif case.scales == "head":
        scale = rng.uniform(0.02, 0.05, shape[2]).astype(np.float32)
        by_row = scale[:, None]
    elif case.scales == "tensor":
        scale = np.array(0.03, np.float32)
        by_row = scale
    else:
        scale, by_row = None, np.float32(1)
    stored = oracle.quantize(x, dtype, by_row)
    values = oracle.dequantize(stored, by_row)
    stored[~used] = 101 if dtype == "int8" else np.nan
    return stored, scale, values


def _laid_out(
    layout: KVLayout, dims: CacheDims, key: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Logical arrays [n, s, h, d] in the buffers of a layout, by a rule of its own rather than the package's."""

    def arrange(x: np.ndarray, axes: str) -> np.ndarray:
        names = axes.split()
        if "x" in names:
            inner = max(1, 16 // x.dtype.itemsize)
            x = x.reshape(*x.shape[:3], -1, inner)
        order = ["n", "s", "h", "d", "x"]
        return x.transpose([order.index(a) for a in names if a in order])

    if layout.value is not None:
        return arrange(key, layout.key), arrange(value, layout.value)
    if "(2d)" in layout.key:
        return arrange(np.concatenate([key, value], -1), layout.key.replace("(2d)", "d")), None
    at = layout.key.split().index("2")
    plain = layout.key.replace("2", "")
    return np.stack([arrange(key, plain), arrange(value, plain)], at), None


def _drawn_options(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    options = dict(case.options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = rng.uniform(0.01, 0.3, case.num_heads).astype(np.float32)
    if options.pop("alibi_per_request", False):
        options["alibi_slopes"] = rng.uniform(0.01, 0.3, (len(case.seq_lens), case.num_heads)).astype(np.float32)
    if options.pop("sinks", False):
        options["sinks"] = rng.standard_normal(case.num_heads).astype(np.float32)
    return options


def tolerance(case: Case) -> float:
    """Largest error allowed, relative to the largest number of the oracle's output.

    Accumulation is in float32, so float32 has its rounding and the others half a unit of theirs, with a margin for
    the unit's jump at powers of two.
    """
    out_dtype = dict(case.options).get("out_dtype", case.dtype)
    return {"float32": 2e-6, "bfloat16": 4.1e-3, "float16": 5.2e-4}[jnp.dtype(out_dtype).name]


# Functions on positions, as a user would write them.


def every_third(b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
    """Positions a multiple of 3 back, other ones for other heads and requests."""
    return (q_pos - kv_pos + h + b) % 3 == 0


def nothing_early(b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
    """Nothing for the first queries: some rows stay empty."""
    return (q_pos >= 5) & (kv_pos >= 4)


def only_even_queries(score: Any, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
    """A mask by score: -inf for every other query, whose rows stay empty."""
    return jnp.where(q_pos % 2 == 0, score, -jnp.inf)


def favour_recent(score: Any, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
    """A penalty by distance that depends on head and request."""
    return score - 0.05 * (q_pos - kv_pos) * (1 + h % 2) + 0.1 * b


MIXED: dict[str, Any] = {"query_lens": (5, 1, 0, 40, 1, 3), "seq_lens": (9, 33, 0, 150, 1, 70)}
DECODE: dict[str, Any] = {"query_lens": (1, 1, 1, 1), "seq_lens": (50, 1, 0, 130)}
PREFILL: dict[str, Any] = {"query_lens": (37, 1, 16), "seq_lens": (37, 1, 16)}
LAYOUTS = ("NHD", "HND", "2NHD", "2HND", "N2HD", "HN2D", "NH2D", "VLLM_V0")
OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.3},
    "window": {"window": (20, 0)},
    "window-left-0": {"window": (0, None)},
    "window-both-sides": {"window": (7, 9), "causal": False},
    "window-right": {"window": (None, 3), "causal": False},
    "soft-cap": {"soft_cap": 2.0},
    "alibi": {"alibi": True},
    "alibi-per-request": {"alibi_per_request": True},
    "sinks": {"sinks": True},
    "encoder": {"causal": False},
    "mask-mod": {"mask_mod": every_third},
    "mask-mod-empty-rows": {"mask_mod": nothing_early, "sinks": True},
    "score-mod": {"score_mod": favour_recent},
    "score-mod-empty-rows": {"score_mod": only_even_queries},
    "batch-invariant": {"batch_invariant": True},
    "everything": {
        "window": (30, 0), "soft_cap": 5.0, "alibi": True, "sinks": True, "mask_mod": every_third,
        "score_mod": favour_recent, "scale": 0.2,
    },
}  # fmt: skip


def named_cases() -> list[Case]:
    """The curated cases."""
    cases = [Case("mixed", **MIXED), Case("decode", **DECODE), Case("prefill", **PREFILL)]
    cases += [
        Case("one-request", (1,), (77,)),
        Case("all-padding", (0, 0), (0, 0)),
        Case("empty-rows", (0, 2), (30, 2)),
    ]
    cases += [Case("speculative", (4, 4, 8), (64, 4, 200)), Case("long-prefill", (300,), (300,), block_size=32)]
    cases += [Case("chunked-prefill", (33, 128), (400, 129)), Case("extra-tokens", **MIXED, extra_tokens=7)]
    cases += [Case("mixed-many", (1, 40, 1, 3, 0, 1, 17, 1, 1), (33, 150, 1, 70, 0, 64, 17, 128, 300), extra_tokens=3)]
    cases += [Case("shared-prefix", **MIXED, shared=2), Case("many-decodes", (1,) * 33, tuple(range(0, 99, 3)))]
    cases += [Case("shared-prefix-long", (1,) * 33, tuple(range(521, 620, 3)), shared=32, num_kv_heads=1)]
    cross: dict[str, Any] = {"query_lens": (9, 1, 4), "seq_lens": (3, 20, 0)}
    cases += [Case("cross-attention", **cross, options=(("causal", False),)), Case("more-new-than-all", **cross)]
    cases += [Case("table-too-narrow", **MIXED, short_table=True), Case("bad-blocks", **MIXED, bad_blocks=True)]
    cases += [Case(f"option-{n}", **MIXED, options=tuple(o.items())) for n, o in OPTIONS.items()]
    cases += [
        Case(f"decode-{n}", **DECODE, options=tuple(OPTIONS[n].items()), num_heads=8)
        for n in ("window", "soft-cap", "sinks", "everything")
    ]
    cases += [Case(f"layout-{n}", **MIXED, layout=n) for n in LAYOUTS]
    cases += [Case(f"layout-{n}-bf16", **DECODE, layout=n, dtype="bfloat16") for n in LAYOUTS]
    cases += [Case(f"v-head-size-{n}", **MIXED, layout=n, v_head_size=32) for n in ("NHD", "HND", "VLLM_V0")]
    cases += [
        Case(f"gqa-{ratio}", **MIXED, num_heads=ratio * kv, num_kv_heads=kv)
        for ratio, kv in ((1, 3), (3, 2), (4, 1), (7, 2), (8, 2), (32, 1))
    ]
    cases += [Case(f"head-size-{n}", **MIXED, head_size=n) for n in (8, 40, 80, 96, 112, 128, 160, 256)]
    cases += [Case(f"block-size-{n}", **MIXED, block_size=n) for n in (1, 2, 3, 8, 32, 48, 64, 128, 300)]
    cases += [Case(f"block-300-{n}", **MIXED, block_size=300, layout=n) for n in ("HND", "N2HD", "HN2D")]
    for dtype in ("bfloat16", "float16"):
        cases += [
            Case(f"{dtype}", **MIXED, dtype=dtype),
            Case(f"{dtype}-float32-cache", **DECODE, dtype=dtype, cache_dtype="float32"),
        ]
        cases += [Case(f"{dtype}-float32-out", **MIXED, dtype=dtype, options=(("out_dtype", "float32"),))]
    for cache_dtype in QUANTIZED:
        for scales in ("tensor", "head", "token_head"):
            name = f"{cache_dtype}-{scales}"
            cases.append(Case(name, **MIXED, dtype="bfloat16", cache_dtype=cache_dtype, scales=scales))
        cases.append(Case(f"{cache_dtype}-float32", **DECODE, cache_dtype=cache_dtype, scales="head", layout="HND"))
        cases.append(
            Case(f"{cache_dtype}-block-300", **DECODE, cache_dtype=cache_dtype, scales="token_head", block_size=300)
        )
    cases += [Case(f"{n}-no-scale", **DECODE, cache_dtype=n) for n in FLOAT8]
    cases += [
        Case(
            f"{n}-speculative", (4, 2, 3, 1), (64, 200, 3, 90), dtype="bfloat16", cache_dtype=n,
            scales="head" if n in FLOAT8 else "token_head", num_heads=16, num_kv_heads=8, bad_blocks=True,
        )
        for n in QUANTIZED
    ]  # fmt: skip
    return cases


def stored_as_bits(buffer: np.ndarray | None) -> np.ndarray | None:
    """float8 buffers as uint8, as `KVCache.zeros` keeps them."""
    if buffer is None or buffer.dtype not in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        return buffer
    return buffer.view(np.uint8)


def aligned(x: np.ndarray) -> np.ndarray:
    """A copy of a test's buffer at an address that JAX can share."""
    room = np.empty(x.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy
