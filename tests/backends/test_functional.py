"""The functions for PyTorch engines, against a dense computation in float64, and what they leave untouched."""

import math

import jax
import pytest
import torch

from jaxpaged.backends.functional import (
    copy_blocks,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    merge_attn_states,
    reshape_and_cache,
    reshape_and_cache_flash,
    swap_blocks,
)
from jaxpaged.bridge.torch_cache import quantize

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEADS, HEAD_SIZE = 24, 8, 2, 6, 32
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def dense(q, k, v, *, causal=False, window=(-1, -1), softcap=0.0, slopes=None, sinks=None, first=None):
    """Attention of one request in float64: q [m, heads, d], k, v [n, kv_heads, d]; the output and the lse [heads, m].

    Args:
      first: position of the first query; `n - m` when None.
    """
    q, k, v = (x.double() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    q_pos = torch.arange(len(q))[:, None] + (len(k) - len(q) if first is None else first)
    kv_pos = torch.arange(len(k))[None]
    scores = torch.einsum("mhd,nhd->hmn", q, k) / math.sqrt(q.shape[2])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (q_pos - kv_pos).abs()
    keep = torch.ones(len(q), len(k), dtype=torch.bool)
    if causal:
        keep &= kv_pos <= q_pos
    if window[0] >= 0:
        keep &= kv_pos >= q_pos - window[0]
    if window[1] >= 0:
        keep &= kv_pos <= q_pos + window[1]
    scores = scores.masked_fill(~keep, -torch.inf)
    lse = torch.logsumexp(scores, -1) if len(k) else torch.full(scores.shape[:2], -torch.inf, dtype=torch.float64)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None])
    weights = torch.exp(scores - total[..., None]).nan_to_num(nan=0.0)
    return torch.einsum("hmn,nhd->mhd", weights, v), lse


class Paged:
    """A cache with requests of given lengths in it, garbage in all that is not theirs, and what they hold."""

    def __init__(self, lens, dtype=torch.float32, how="N2HD", head_sizes=(HEAD_SIZE, HEAD_SIZE)):
        torch.manual_seed(7)
        self.key_cache, self.value_cache = make_caches(how, dtype, head_sizes)
        self.key_cache.fill_(torch.nan)
        self.value_cache.fill_(torch.nan)
        width = max(math.ceil(n / BLOCK_SIZE) for n in lens) + 1
        blocks = torch.randperm(NUM_BLOCKS).tolist()
        table = torch.full((len(lens) + 1, width), 10**6, dtype=torch.int32)
        table[:, ::2] = -7
        self.keys, self.values = [], []
        for i, n in enumerate(lens):
            for j in range(math.ceil(n / BLOCK_SIZE)):
                table[i + 1, j] = blocks.pop()
            slots = self.slots(table[i + 1], 0, n)
            self.keys.append(torch.randn(n, KV_HEADS, head_sizes[0]).to(dtype))
            self.values.append(torch.randn(n, KV_HEADS, head_sizes[1]).to(dtype))
            self.key_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = self.keys[-1]
            self.value_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = self.values[-1]
        self.table = table[1:]  # a slice: it starts at no multiple of 64 bytes
        self.lens = torch.tensor(lens, dtype=torch.int32)

    @staticmethod
    def slots(row, start, stop):
        position = torch.arange(start, stop)
        return row[position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE

    def bits(self):
        return [x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in self.tensors()]

    def tensors(self):
        return self.key_cache, self.value_cache, self.table, self.lens


def make_caches(how, dtype, head_sizes):
    shape = (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS)
    d, dv = head_sizes
    if how == "N2HD":
        return torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, d, dtype=dtype).unbind(1)
    if how == "HN2D":
        rows = torch.zeros(NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, d + dv, dtype=dtype)
        return [x.transpose(1, 2) for x in rows.split([d, dv], -1)]
    return torch.zeros(*shape, d, dtype=dtype), torch.zeros(*shape, dv, dtype=dtype)


def queries(lens, dtype=torch.float32, heads=HEADS, d=HEAD_SIZE):
    """Queries as a slice of a fused projection, and their cumulative lengths as a slice of a larger tensor."""
    torch.manual_seed(8)
    q = torch.randn(sum(lens), heads * d + 24).to(dtype)[:, 24:].view(-1, heads, d)
    starts = torch.tensor([99, 0, *lens]).cumsum(0).int() - 99
    return q, starts[1:]


def assert_close(ours, theirs, dtype=torch.float32):
    torch.testing.assert_close(ours.double(), theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


QUERY_LENS, SEQ_LENS = [1, 5, 0, 12, 1, 0], [37, 5, 20, 40, 1, 0]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.05, 0.01])
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0, 4.0, -3.0])
OPTIONS = {
    "plain": {"causal": True},
    "all": {"causal": True, "window": (9, 0), "softcap": 2.0, "slopes": SLOPES, "sinks": SINKS},
    "encoder": {"window": (4, 3), "slopes": SLOPES},
}


def call_options(options):
    """The options of `dense` under the names of flash-attn."""
    names = {"window": "window_size", "slopes": "alibi_slopes", "sinks": "s_aux"}
    return {names.get(name, name): value for name, value in options.items()}


def varlen_expected(q, query_lens, keys, values, options):
    outs, lses = zip(
        *(dense(qi, k, v, **options) for qi, k, v in zip(q.split(query_lens), keys, values, strict=True)), strict=True
    )
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_varlen_to_a_paged_cache(options):
    paged = Paged(SEQ_LENS)
    q, starts = queries(QUERY_LENS)
    before, pointers = paged.bits(), [x.data_ptr() for x in paged.tensors()]
    out, lse = flash_attn_varlen_func(
        q, paged.key_cache, paged.value_cache, starts, max_seqlen_q=12, max_seqlen_k=40, seqused_k=paged.lens,
        block_table=paged.table, return_softmax_lse=True, **call_options(options),
    )  # fmt: skip
    expected, expected_lse = varlen_expected(q, QUERY_LENS, paged.keys, paged.values, options)
    assert out.dtype == q.dtype and lse.dtype == torch.float32 and lse.is_contiguous()
    assert_close(out, expected)
    assert_close(lse, expected_lse)
    assert all(torch.equal(a, b) for a, b in zip(before, paged.bits(), strict=True))
    assert pointers == [x.data_ptr() for x in paged.tensors()]


@pytest.mark.parametrize("how", ["HN2D", "apart"])
def test_varlen_to_caches_that_are_views_of_one_buffer(how):
    sizes = (HEAD_SIZE, 16) if how in ("HN2D", "apart") else (HEAD_SIZE, HEAD_SIZE)
    paged = Paged(SEQ_LENS, how=how, head_sizes=sizes)
    q, starts = queries(QUERY_LENS)
    out = flash_attn_varlen_func(
        q, paged.key_cache, paged.value_cache, starts, seqused_k=paged.lens, block_table=paged.table, causal=True
    )
    assert_close(out, varlen_expected(q, QUERY_LENS, paged.keys, paged.values, {"causal": True})[0])


def test_varlen_takes_cumulative_lengths_and_int64_tables_and_hints_that_are_wrong():
    paged = Paged(SEQ_LENS)
    q, starts = queries(QUERY_LENS)
    common = {"block_table": paged.table, "causal": True}
    first = flash_attn_varlen_func(q, paged.key_cache, paged.value_cache, starts, seqused_k=paged.lens, **common)
    cu_seqlens_k = torch.tensor([0, *SEQ_LENS]).cumsum(0).int()
    common["block_table"] = paged.table.long()
    second = flash_attn_varlen_func(
        q, paged.key_cache, paged.value_cache, starts, cu_seqlens_k, 1, 1, deterministic=True, num_splits=3,
        fa_version=3, **common,
    )  # fmt: skip
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_in_16_bits(dtype):
    paged = Paged(SEQ_LENS, dtype)
    q, starts = queries(QUERY_LENS, dtype)
    out = torch.full(q.shape, torch.nan, dtype=dtype)
    result = flash_attn_varlen_func(
        q,
        paged.key_cache,
        paged.value_cache,
        starts,
        seqused_k=paged.lens,
        block_table=paged.table,
        causal=True,
        out=out,
    )
    assert result.data_ptr() == out.data_ptr() and out.dtype == dtype
    assert_close(out, varlen_expected(q, QUERY_LENS, paged.keys, paged.values, {"causal": True})[0], dtype)


@pytest.mark.parametrize(
    ("stored", "scales"),
    [
        (torch.float8_e4m3fn, "tensor"),
        (torch.float8_e5m2, "head"),
        (torch.int8, "token_head"),
    ],
)
def test_8_bit_caches_written_and_read(stored, scales):
    paged = Paged(SEQ_LENS)
    shape = {"tensor": (), "head": (KV_HEADS,), "token_head": (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS)}[scales]
    k_scale, v_scale = torch.rand(shape) * 0.02 + 0.03, torch.rand(shape) * 0.02 + 0.03
    caches = torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE).to(stored).unbind(1)
    slots = torch.cat([paged.slots(row, 0, n) for row, n in zip(paged.table, SEQ_LENS, strict=True)])
    name = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}[stored]
    as_engines_do = [c.view(torch.uint8) for c in caches] if scales == "tensor" and name != "int8" else caches
    keys, values = torch.cat(paged.keys), torch.cat(paged.values)
    reshape_and_cache_flash(keys, values, *as_engines_do, slots, name, k_scale, v_scale)

    def dequantized(x, scale):
        if scales == "token_head":
            scale = scale.flatten(0, 1)[slots]
        scale = scale[..., None] if scale.ndim else scale
        return (quantize(x, stored, scale).view(stored).float() * scale).split(SEQ_LENS)

    q, starts = queries(QUERY_LENS)
    descales = [s.expand(len(SEQ_LENS), KV_HEADS) if scales != "token_head" else s for s in (k_scale, v_scale)]
    out = flash_attn_varlen_func(
        q, *caches, starts, seqused_k=paged.lens, block_table=paged.table, causal=True, k_descale=descales[0],
        v_descale=descales[1],
    )  # fmt: skip
    stored_kv = dequantized(keys, k_scale), dequantized(values, v_scale)
    assert_close(out, varlen_expected(q, QUERY_LENS, *stored_kv, {"causal": True})[0])
    unquantized = varlen_expected(q, QUERY_LENS, paged.keys, paged.values, {"causal": True})[0]
    assert (out.double() - unquantized).abs().max() < 0.4


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_varlen_to_dense_keys(options):
    kv_lens = [9, 5, 3, 12, 1, 0]
    q, starts = queries(QUERY_LENS)
    torch.manual_seed(9)
    kv = torch.randn(sum(kv_lens) + 2, KV_HEADS, 2 * HEAD_SIZE)
    kv[sum(kv_lens) :] = torch.nan
    k, v = kv.chunk(2, -1)
    cu_seqlens_k = torch.tensor([0, *kv_lens]).cumsum(0).int()
    out, lse = flash_attn_varlen_func(
        q, k, v, starts, cu_seqlens_k, 12, 12, return_softmax_lse=True, **call_options(options)
    )
    keys, values = (x[: sum(kv_lens)].split(kv_lens) for x in (k, v))
    expected, expected_lse = varlen_expected(q, QUERY_LENS, keys, values, options)
    assert_close(out, expected)
    assert_close(lse, expected_lse)


def test_varlen_agrees_with_torch():
    q, starts = queries([19])
    k, v = torch.randn(2, 19, KV_HEADS, HEAD_SIZE)
    out = flash_attn_varlen_func(q, k, v, starts, starts, 19, 19, causal=True)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, theirs[0].transpose(0, 1), rtol=2e-5, atol=2e-5)


def test_varlen_to_dense_keys_of_which_some_are_unused():
    kv_lens, used = [9, 5, 3, 9, 4, 2], [7, 5, 0, 8, 1, 2]
    q, starts = queries(QUERY_LENS)
    k, v = torch.randn(2, sum(kv_lens), KV_HEADS, HEAD_SIZE)
    keys, values = ([x[:n] for x, n in zip(t.split(kv_lens), used, strict=True)] for t in (k, v))
    slopes = torch.rand(6, HEADS)
    out = flash_attn_varlen_func(
        q, k, v, starts, torch.tensor([0, *kv_lens]).cumsum(0).int(), seqused_k=torch.tensor(used).int(), causal=True,
        alibi_slopes=slopes,
    )  # fmt: skip
    expected = [
        dense(qi, ki, vi, causal=True, slopes=s)[0]
        for qi, ki, vi, s in zip(q.split(QUERY_LENS), keys, values, slopes, strict=True)
    ]
    assert_close(out, torch.cat(expected))


def test_calls_in_inference_mode():
    """As engines make them: caches too are made there."""
    with torch.inference_mode():
        paged = Paged([8, 12])
        q, kv = torch.randn(2, 1, HEADS, HEAD_SIZE), torch.randn(2, 1, KV_HEADS, HEAD_SIZE)
        lens = torch.tensor([8, 12], dtype=torch.int32)
        out = flash_attn_with_kvcache(
            q, paged.key_cache, paged.value_cache, cache_seqlens=lens, block_table=paged.table
        )
        assert_close(out[1], dense(q[1], paged.keys[1], paged.values[1])[0])
        reshape_and_cache_flash(
            kv[:, 0], kv[:, 0], paged.key_cache, paged.value_cache, paged.slots(paged.table[0], 6, 8), "auto", 1.0, 1.0
        )
        out.mul_(2)
        again = flash_attn_with_kvcache(
            q, paged.key_cache, paged.value_cache, cache_seqlens=lens, block_table=paged.table
        )
    keys, values = (torch.cat((x[0][:6], kv[:, 0])) for x in (paged.keys, paged.values))
    assert_close(again[0], dense(q[0], keys, values)[0])


def test_rows_past_the_last_request_give_0():
    paged = Paged(SEQ_LENS)
    q, starts = queries([*QUERY_LENS, 4])
    out, lse = flash_attn_varlen_func(
        q, paged.key_cache, paged.value_cache, starts[:-1], seqused_k=paged.lens, block_table=paged.table, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    assert torch.all(out[-4:] == 0) and torch.all(lse[:, -4:] == -torch.inf)
    assert_close(out[:-4], varlen_expected(q[:-4], QUERY_LENS, paged.keys, paged.values, {"causal": True})[0])


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_decode_from_a_paged_cache(options):
    lens = [37, 5, 40, 1, 0]
    paged = Paged(lens)
    q = queries([1] * 5)[0].unsqueeze(1)
    out, lse = flash_attn_with_kvcache(
        q, paged.key_cache, paged.value_cache, cache_seqlens=paged.lens, block_table=paged.table,
        return_softmax_lse=True, **call_options(options),
    )  # fmt: skip
    expected, expected_lse = varlen_expected(q[:, 0], [1] * 5, paged.keys, paged.values, options)
    assert out.shape == q.shape and lse.shape == (5, HEADS, 1)
    assert_close(out[:, 0], expected)
    assert_close(lse[..., 0].t(), expected_lse)


def rotated(x, cos, sin, positions, interleaved):
    """A plain rotary embedding of x [tokens, heads, d] by complex numbers."""
    half = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[positions][:, None]
    front, rest = x.double()[..., : 2 * half], x.double()[..., 2 * half :]
    pairs = front.unflatten(-1, (half, 2)) if interleaved else front.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat((turned.flatten(-2), rest), -1)


@pytest.mark.parametrize("rotary", [None, "interleaved", "half", "not causal"])
def test_new_tokens_are_put_into_a_paged_cache(rotary):
    lens, new, causal = [30, 5, 14, 0], 3, rotary != "not causal"
    paged = Paged([n + new for n in lens])
    q = torch.randn(4, new, HEADS, HEAD_SIZE)
    kv = torch.randn(4, new, KV_HEADS, 2 * HEAD_SIZE)
    k, v = kv.chunk(2, -1)
    angles = torch.rand(40, 12)
    cos, sin = angles.cos(), angles.sin()
    arguments = {}
    if rotary:
        interleaved = rotary != "half"
        arguments = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    out = flash_attn_with_kvcache(
        q, paged.key_cache, paged.value_cache, k, v, cache_seqlens=torch.tensor(lens), block_table=paged.table,
        causal=causal, **arguments,
    )  # fmt: skip
    for i, n in enumerate(lens):
        steps = torch.arange(new)
        key, query = k[i], q[i]
        if rotary:
            key = rotated(key, cos, sin, n + steps, interleaved).float()
            query = rotated(query, cos, sin, n + (steps if causal else 0 * steps), interleaved)
        slots = paged.slots(paged.table[i], n, n + new)
        torch.testing.assert_close(paged.key_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE], key)
        assert torch.equal(paged.value_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE], v[i])
        keys, values = torch.cat((paged.keys[i][:n], key)), torch.cat((paged.values[i][:n], v[i]))
        assert_close(out[i], dense(query, keys, values, causal=causal)[0])


def test_a_cache_that_is_not_paged():
    lens, new = [20, 3, 47], 2
    buffer = torch.randn(5, 2, 64, KV_HEADS, HEAD_SIZE)
    k_cache, v_cache = buffer.unbind(1)
    rows = torch.tensor([4, 0, 3], dtype=torch.int32)
    for row, n in zip(rows, lens, strict=True):
        buffer[row, :, n:] = torch.nan
    untouched = buffer[[1, 2]].clone()
    q, k, v = torch.randn(3, new, HEADS, HEAD_SIZE), *torch.randn(2, 3, new, KV_HEADS, HEAD_SIZE)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(lens, dtype=torch.int32), cache_batch_idx=rows,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    for i, (row, n) in enumerate(zip(rows, lens, strict=True)):
        assert torch.equal(k_cache[row, n : n + new], k[i]) and torch.equal(v_cache[row, n : n + new], v[i])
        expected, expected_lse = dense(q[i], k_cache[row, : n + new], v_cache[row, : n + new], causal=True)
        assert_close(out[i], expected)
        assert_close(lse[i], expected_lse)
    assert torch.equal(buffer[[1, 2]], untouched)
    k_cache, v_cache = torch.randn_like(buffer).unbind(1)
    all_of_it = flash_attn_with_kvcache(q, k_cache, v_cache, causal=True)
    assert_close(all_of_it[1], dense(q[1], k_cache[1], v_cache[1], causal=True)[0])
    one_length = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=11, causal=True, softmax_scale=HEAD_SIZE**-0.5
    )
    assert_close(one_length[2], dense(q[2], k_cache[2, :11], v_cache[2, :11], causal=True)[0])


def test_tokens_to_the_left_are_skipped():
    lens, pad, new = [20, 9, 47], [4, 9, 0], 2
    k_cache, v_cache = torch.randn(2, 3, 64, KV_HEADS, HEAD_SIZE)
    for i in range(3):
        for cache in (k_cache, v_cache):
            cache[i, : pad[i]] = cache[i, lens[i] :] = torch.nan
    q, k, v = torch.randn(3, new, HEADS, HEAD_SIZE), *torch.randn(2, 3, new, KV_HEADS, HEAD_SIZE)
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(lens), cache_leftpad=torch.tensor(pad), causal=True,
        window_size=(15, 0),
    )  # fmt: skip
    for i in range(3):
        part = slice(pad[i], lens[i] + new)
        assert_close(out[i], dense(q[i], k_cache[i, part], v_cache[i, part], causal=True, window=(15, 0))[0])


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_vllms_old_cache_is_written(slot_dtype):
    key, value = torch.randn(2, 5, KV_HEADS, HEAD_SIZE)
    x = 4
    key_cache = torch.zeros(NUM_BLOCKS, KV_HEADS, HEAD_SIZE // x, BLOCK_SIZE, x)
    value_cache = torch.zeros(NUM_BLOCKS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE)
    slots = torch.tensor([9, -1, 0, 10**6, 23], dtype=slot_dtype)
    reshape_and_cache(key, value, key_cache, value_cache, slots, "auto", 1.0, 1.0)
    rows = key_cache.permute(0, 3, 1, 2, 4).reshape(-1, KV_HEADS, HEAD_SIZE)
    value_rows = value_cache.permute(0, 3, 1, 2).reshape(-1, KV_HEADS, HEAD_SIZE)
    for written, new in ((rows, key), (value_rows, value)):
        assert torch.equal(written[[9, 0, 23]], new[[0, 2, 4]])
        assert written.count_nonzero() == new[[0, 2, 4]].count_nonzero()


def test_engines_write_to_views_of_one_buffer():
    key_cache, value_cache = torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16).unbind(1)
    qkv = torch.randn(7, (HEADS + 2 * KV_HEADS) * HEAD_SIZE).bfloat16()
    _, key, value = qkv.view(7, -1, HEAD_SIZE).split([HEADS, KV_HEADS, KV_HEADS], 1)
    slots = torch.tensor([3, 17, 80, 4, 5])  # fewer than tokens: the rest is padding
    reshape_and_cache_flash(key, value, key_cache, value_cache, slots, "auto", torch.ones(1), torch.ones(1))
    for cache, new in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache.reshape(-1, KV_HEADS, HEAD_SIZE)[slots], new[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_of_all_layers_are_copied(dtype):
    layers = [torch.randn(2, 6, 4, 16).to(dtype) for _ in range(3)]
    before = [layer.clone() for layer in layers]
    mapping = torch.tensor([[0, 5], [5, 0], [2, 3], [9, 1], [1, -1]])
    copy_blocks([layer[0] for layer in layers], [layer[1] for layer in layers], mapping)
    order = [5, 1, 2, 2, 4, 0]
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer.float(), old.float()[:, order])


def test_blocks_are_swapped():
    src, dst = torch.randn(6, 4, 16), torch.randn(4, 9, 16).transpose(0, 1)
    before, source = dst.clone(), src.clone()
    swap_blocks(src, dst, torch.tensor([[5, 8], [0, 2], [1, 9]], dtype=torch.int32))
    assert torch.equal(dst[[8, 2]], src[[5, 0]]) and torch.equal(src, source)
    rest = [i for i in range(9) if i not in (8, 2)]
    assert torch.equal(dst[rest], before[rest])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_merged(dtype):
    torch.manual_seed(11)
    q, k, v = torch.randn(7, HEADS, 16), *torch.randn(2, 30, HEADS, 16)
    (first, first_lse), (second, second_lse) = (dense(q, k[s], v[s]) for s in (slice(0, 11), slice(11, 30)))
    first[3], first_lse[:, 3] = torch.nan, -torch.inf  # nothing attended
    expected, expected_lse = dense(q, k, v)
    expected[3], expected_lse[:, 3] = second[3], second_lse[:, 3]
    outputs = [x.to(dtype) for x in (first, second)]
    output, output_lse = torch.empty(7, HEADS, 16, dtype=dtype), torch.empty(HEADS, 7)
    merge_attn_states(output, outputs[0], first_lse.float(), outputs[1], second_lse.float(), output_lse)
    assert_close(output, expected, dtype)
    assert_close(output_lse, expected_lse)
    in_place = outputs[0].clone()
    merge_attn_states(in_place, in_place, first_lse.float(), outputs[1], second_lse.float())
    assert torch.equal(in_place, output)


def varlen_arguments(**changes):
    paged = Paged([5, 9])
    q, starts = queries([2, 3])
    arguments = {
        "q": q, "k": paged.key_cache, "v": paged.value_cache, "cu_seqlens_q": starts, "seqused_k": paged.lens,
        "block_table": paged.table, "causal": True, "out": torch.full_like(q, 3.0).contiguous(),
    }  # fmt: skip
    return arguments | changes


T = torch.zeros
BAD_VARLEN = {
    "dropout": ({"dropout_p": 0.1}, NotImplementedError, "dropout_p: not supported"),
    "probs": ({"return_attn_probs": True}, NotImplementedError, "return_attn_probs: not supported"),
    "q_descale": ({"q_descale": T(2, 2)}, NotImplementedError, "q_descale: "),
    "vllm's order": ({"cu_seqlens_q": 7}, TypeError, "cu_seqlens_q=7; vLLM orders .*: pass them by keyword"),
    "vllm's order, later": ({"max_seqlen_q": T(3)}, TypeError, "max_seqlen_q a tensor; vLLM orders"),
    "q dtype": ({"q": T(5, 6, 32).double()}, TypeError, "q: expected torch.float32 or"),
    "q shape": ({"q": T(5, 192)}, ValueError, r"q: expected shape \[total_q, num_heads, head_size\], got \[5, 192\]"),
    "q heads": ({"q": T(5, 5, 32), "out": None}, ValueError, "q: the number of heads must be a multiple of"),
    "head size": ({"q": T(5, 6, 16), "out": None}, ValueError, r"k: expected shape \[num_blocks, block_size, .* 16\]"),
    "q list": ({"q": [1.0]}, TypeError, "q: expected a tensor, got list"),
    "cache dtype": ({"k": T(24, 8, 2, 32).half()}, TypeError, "k: expected torch.float32, as q is"),
    "v dtype": ({"v": T(24, 8, 2, 32).half()}, TypeError, "v: expected"),
    "uint8": ({"k": T(24, 8, 2, 32).byte()}, TypeError, "k: uint8 .* view it as torch.float8"),
    "v shape": ({"v": T(24, 8, 1, 32)}, ValueError, r"v: expected shape \[24, 8, 2, v_head_size\]"),
    "starts dtype": ({"cu_seqlens_q": T(3)}, TypeError, "cu_seqlens_q: expected torch.int32 or torch.int64"),
    "starts fall": ({"cu_seqlens_q": torch.tensor([0, 4, 2])}, ValueError, "cu_seqlens_q: expected cumulative"),
    "starts end": ({"cu_seqlens_q": torch.tensor([0, 4, 6])}, ValueError, "cu_seqlens_q: it ends at 6, past the 5"),
    "lens": ({"seqused_k": torch.tensor([3, -1])}, ValueError, "seqused_k: expected lengths of 0 or more"),
    "lens shape": ({"seqused_k": torch.tensor([3])}, ValueError, r"seqused_k: expected shape \[2\]"),
    "no lens": ({"seqused_k": None}, ValueError, "seqused_k: with block_table, expected it or cu_seqlens_k"),
    "table dtype": ({"block_table": T(2, 3)}, TypeError, "block_table: expected torch.int32"),
    "table rows": ({"block_table": T(3, 3).int()}, ValueError, r"block_table: expected shape \[2, max_bl"),
    "out shape": ({"out": T(5, 6, 16)}, ValueError, r"out: expected shape \[5, 6, 32\]"),
    "out dtype": ({"out": T(5, 6, 32).half()}, TypeError, "out: expected torch.float32"),
    "window": ({"window_size": 3}, ValueError, r"window_size: expected \(left, right\) or None, got 3"),
    "window side": ({"window_size": (1.5, 0)}, TypeError, "window_size: expected an int on each side"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap: expected a number above 0"),
    "scale": ({"softmax_scale": math.nan}, ValueError, "softmax_scale: expected a finite number"),
    "slopes dtype": ({"alibi_slopes": T(6).half()}, TypeError, "alibi_slopes: expected torch.float32"),
    "slopes": ({"alibi_slopes": T(5)}, ValueError, r"alibi_slopes: expected shape \[6\] or \[2, 6\], got \[5\]"),
    "sinks": ({"s_aux": T(5)}, ValueError, r"s_aux: expected shape \[6\], got \[5\]"),
    "gradient": ({"q": T(5, 6, 32, requires_grad=True)}, ValueError, "q: it requires grad, and gradients are not supp"),
    "descale": ({"k_descale": 2.0}, ValueError, "k_descale: it belongs to 8-bit caches"),
    "device": ({"k": T(24, 8, 2, 32, device="meta")}, NotImplementedError, "k: expected a tensor on the CPU.*GPU"),
    "a part of a cache": (
        {"k": T(24, 8, 4, 32)[:, :, :2], "v": T(24, 8, 4, 32)[:, :, :2]}, ValueError, "key_cache: .*compact"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_VARLEN)
def test_bad_varlen_calls_are_refused_and_write_nothing(case):
    changes, error, message = BAD_VARLEN[case]
    arguments = varlen_arguments(**changes)
    out = arguments["out"]
    before = None if out is None else out.clone()
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**arguments)
    assert out is None or torch.equal(out, before)


def test_positional_calls_in_vllms_order_are_refused():
    a = varlen_arguments()
    with pytest.raises(TypeError, match="pass them by keyword"):
        flash_attn_varlen_func(a["q"], a["k"], a["v"], 3, a["cu_seqlens_q"], 9, None, a["seqused_k"])


BAD_KVCACHE = {
    "q_descale": ({"q_descale": T(1)}, NotImplementedError, "q_descale"),
    "q": ({"q": T(2, 6, 32)}, ValueError, r"q: expected shape \[batch, seqlen_q, num_heads, head_size\]"),
    "k alone": ({"v": None}, ValueError, "k, v: expected both or neither"),
    "no lens": ({"cache_seqlens": None}, ValueError, "cache_seqlens: expected the lengths before the new tokens"),
    "k shape": ({"k": T(2, 3, 1, 32)}, ValueError, r"k: expected shape \[2, seqlen_new, 2, 32\]"),
    "v shape": ({"v": T(2, 2, 2, 32)}, ValueError, r"v: expected shape \[2, 3, 2, 32\]"),
    "k dtype": ({"k": T(2, 3, 2, 32).half()}, TypeError, "k: expected torch.float32"),
    "rows of a paged cache": ({"cache_batch_idx": T(2).int()}, ValueError, "cache_batch_idx: it belongs to a cache"),
    "pad of a paged cache": ({"cache_leftpad": T(2).int()}, ValueError, "cache_leftpad: it belongs to a cache that is"),
    "rotary": ({"rotary_cos": T(40, 4)}, ValueError, "rotary_cos, rotary_sin: expected both or neither"),
    "rotary rows": ({"rotary_cos": T(7, 4), "rotary_sin": T(7, 4)}, ValueError, "rotary_cos: it has 7 positions, exp"),
    "rotary size": ({"rotary_cos": T(40, 17), "rotary_sin": T(40, 17)}, ValueError, "rotary_cos: it rotates 34"),
    "rotary without k": (
        {"k": None, "v": None, "rotary_cos": T(40, 4), "rotary_sin": T(40, 4)}, ValueError, "rotary_cos: queries are"),
    "out": ({"out": T(2, 3, 6, 31)}, ValueError, r"out: expected shape \[2, 3, 6, 32\]"),
    "sinks": ({"s_aux": T(2)}, ValueError, "s_aux: expected shape"),
    "table": ({"block_table": T(1, 3).int()}, ValueError, r"block_table: expected shape \[2, max"),
    "misaligned caches": (
        {"k_cache": T(24 * 512 + 1)[1:].view(24, 8, 2, 32), "v_cache": T(24 * 512 + 1)[1:].view(24, 8, 2, 32)},
        ValueError, "key_cache: .*64 bytes"),
    "float8 query": ({"q": T(2, 3, 6, 32).to(torch.float8_e4m3fn)}, TypeError, "q: expected torch.float32"),
    "int8 without scales": (
        {"k_cache": T(24, 8, 2, 32).to(torch.int8), "v_cache": T(24, 8, 2, 32).to(torch.int8)}, ValueError, "k_scale"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_KVCACHE)
def test_bad_kvcache_calls_are_refused_and_write_nothing(case):
    changes, error, message = BAD_KVCACHE[case]
    paged = Paged([8, 12])
    arguments = {
        "q": T(2, 3, 6, 32), "k_cache": paged.key_cache, "v_cache": paged.value_cache, "k": torch.ones(2, 3, 2, 32),
        "v": torch.ones(2, 3, 2, 32), "cache_seqlens": torch.tensor([5, 9]), "block_table": paged.table,
    }  # fmt: skip
    before = paged.bits()
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**arguments | changes)
    assert all(torch.equal(a, b) for a, b in zip(before, paged.bits(), strict=True))


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="k_cache: it has 1 rows, expected one for each of 2 requests"):
        flash_attn_with_kvcache(T(2, 1, 6, 32), T(1, 8, 2, 32), T(1, 8, 2, 32))


def test_scales_of_each_request_are_refused():
    caches = T(24, 8, 2, 32).to(torch.int8), T(24, 8, 2, 32).to(torch.int8)
    with pytest.raises(NotImplementedError, match="k_descale: a scale per request is not supported"):
        flash_attn_with_kvcache(T(2, 1, 6, 32), *caches, k_descale=torch.rand(2, 2), v_descale=1.0)
    with pytest.raises(ValueError, match=r"k_descale: expected shape .* or \[24, 8, 2\], got \[3\]"):
        flash_attn_with_kvcache(T(2, 1, 6, 32), *caches, k_descale=torch.rand(3), v_descale=1.0)


BAD_WRITES = {
    "kv_cache_dtype": ({"kv_cache_dtype": "int4"}, ValueError, "kv_cache_dtype: expected 'auto', 'fp8'"),
    "not auto": (
        {"key_cache": T(24, 8, 2, 32).byte()},
        TypeError,
        "kv_cache_dtype: a cache of torch.uint8 is not 'auto'",
    ),
    "not fp8": ({"kv_cache_dtype": "fp8"}, TypeError, "key_cache: expected torch.float8_e4m3fn, got torch.float32"),
    "slots": ({"slot_mapping": T(3)}, TypeError, "slot_mapping: expected torch.int32"),
    "heads": ({"key": T(3, 1, 32)}, ValueError, r"key: expected shape \[num_tokens, 2, 32\]"),
    "gradient": ({"value": T(3, 2, 32, requires_grad=True)}, ValueError, "value: it requires grad"),
    "device": ({"key": T(3, 2, 32, device="meta")}, NotImplementedError, "key: expected a tensor on the CPU"),
}


@pytest.mark.parametrize("case", BAD_WRITES)
def test_bad_writes_are_refused_and_write_nothing(case):
    changes, error, message = BAD_WRITES[case]
    caches = {"key_cache": T(24, 8, 2, 32), "value_cache": T(24, 8, 2, 32)}
    arguments = {
        "key": torch.ones(3, 2, 32), "value": torch.ones(3, 2, 32), **caches, "slot_mapping": torch.arange(3),
        "kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        reshape_and_cache_flash(**arguments | changes)
    assert not any(cache.any() for cache in caches.values())


def test_bad_block_copies_are_refused_and_write_nothing():
    cache = torch.randn(4, 8)
    before = cache.clone()
    mapping = torch.tensor([[0, 1]])
    for arguments, error, message in (
        (([cache], [], mapping), ValueError, "value_caches: expected 1 layers, as in key_caches, got 0"),
        (([cache], [T(())], mapping), ValueError, r"value_caches\[0\]: expected shape \[num_blocks"),
        (([cache], [cache.numpy()], mapping), TypeError, r"value_caches\[0\]: expected a tensor, got ndarray"),
        (([cache], [cache], mapping[0]), ValueError, r"src_to_dst: expected shape \[n, 2\]"),
    ):
        with pytest.raises(error, match=message):
            copy_blocks(*arguments)
    for dst, error, message in (
        (T(4, 7), ValueError, r"dst: expected shape \[num_blocks, 8\]"),
        (T(4, 8).half(), TypeError, "dst"),
    ):
        with pytest.raises(error, match=message):
            swap_blocks(cache, dst, mapping)
    assert torch.equal(cache, before)


def test_bad_merges_are_refused_and_write_nothing():
    output, state, lse = torch.ones(3, 2, 8), T(3, 2, 8), T(2, 3)
    for arguments, error, message in (
        ((output, state, lse, state[:2], lse), ValueError, r"suffix_output: expected shape \[3, 2, 8\]"),
        ((output, state, lse, state.half(), lse), TypeError, "suffix_output: expected torch.float32"),
        ((output, state, lse.t(), state, lse), ValueError, r"prefix_lse: expected shape \[2, 3\]"),
        ((output.half(), state, lse, state, lse), TypeError, "output: expected torch.float32"),
        ((output, state, lse, state, lse.double()), TypeError, "suffix_lse: expected torch.float32"),
        ((output, state, lse, state, lse, T(3, 2)), ValueError, "output_lse: expected shape"),
    ):
        with pytest.raises(error, match=message):
            merge_attn_states(*arguments)
    assert torch.all(output == 1)


def test_steps_of_an_engine_share_programs():
    """Numbers of requests, tokens and table columns change from step to step, but what is compiled does not."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    paged = Paged([7] * 16)
    persistent = torch.zeros(16, 16, dtype=torch.int32)
    for step in range(1, 17):
        q = torch.randn(step, 1, HEADS, HEAD_SIZE)
        width = step % 7 + 1
        table = persistent[:step, :width]
        table[:, :1] = paged.table[:step, :1]
        lens = paged.lens[:step] - step % 3
        out = flash_attn_with_kvcache(q, paged.key_cache, paged.value_cache, cache_seqlens=lens, block_table=table)
        assert_close(out[-1], dense(q[-1], paged.keys[step - 1][: lens[-1]], paged.values[step - 1][: lens[-1]])[0])
    assert len(compiled) <= 3  # attention, and the reading of a table on one page of memory and on two
