"""The functions for PyTorch engines on a GPU: JAX's bits, no word to the host, in place, and a step in a CUDA graph.

The cases of the suite go through the same functions by the doors whose names end in cuda (`tests/test_suite.py`).
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jaxpaged
from jaxpaged import KVCache, PagedBatch
from jaxpaged.backends.functional import (
    copy_blocks,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    merge_attn_states,
    plan_attention,
    reshape_and_cache_flash,
    swap_blocks,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]
BLOCKS, BLOCK, HEADS, KV_HEADS, SIZE = 64, 16, 32, 8, 128
BF16 = torch.bfloat16
MIXED = ([9, 700, 64, 300, 1, 0, 90, 1000], [1, 200, 1, 300, 1, 0, 5, 4])
DECODES = ([64, 9, 1000, 1, 333, 0, 77, 12], [1] * 8)
GUESSES = ([64, 9, 1000, 4, 333, 2, 77, 12], [4, 1, 3, 4, 2, 2, 4, 4])


@pytest.fixture
def no_sync() -> Iterator[Any]:
    """A function after whose call PyTorch raises an error where the host would wait for the device."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def step(lens: Any, new: Any, padding: int = 0) -> dict[str, Any]:
    """Keyword arguments of `flash_attn_varlen_func` for a batch of requests."""
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    kv = torch.randn(BLOCKS, 2, BLOCK, KV_HEADS, SIZE, device="cuda").to(BF16)
    table = torch.randint(0, BLOCKS, (len(lens), -(-max(lens) // BLOCK) + 1), dtype=torch.int32)
    for row, n in zip(table, lens, strict=True):
        row[-(-n // BLOCK) :] = -7  # never looked up
    return {
        "q": torch.randn(int(starts[-1]) + padding, HEADS, SIZE, device="cuda").to(BF16),
        "k": kv[:, 0], "v": kv[:, 1], "cu_seqlens_q": torch.from_numpy(starts).cuda(),
        "seqused_k": torch.tensor(lens, dtype=torch.int32, device="cuda"), "block_table": table.cuda(), "causal": True,
        "max_seqlen_q": max(new),
    }  # fmt: skip


def on_cpu(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def close(x: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(x.cpu().float(), expected.float(), rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("batch", [MIXED, DECODES, GUESSES], ids=["mixed", "decodes", "guesses"])
def test_bits_are_those_of_jax(batch: Any) -> None:
    given = step(*batch)
    here = on_cpu(given)
    query, key, value = (jnp.asarray(here[n].contiguous().float().numpy(), jnp.bfloat16) for n in ("q", "k", "v"))
    expected = jaxpaged.paged_attention(
        query,
        KVCache.from_arrays(key, value),
        PagedBatch.create(*(here[n].numpy() for n in ("block_table", "seqused_k", "cu_seqlens_q"))),
        implementation="mosaic_gpu",
    )
    out = flash_attn_varlen_func(**given)
    np.testing.assert_array_equal(out.cpu().float().numpy(), np.asarray(expected.astype(jnp.float32)))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (99, 0)},
    "soft cap": {"softcap": 20.0},
    "not causal": {"causal": False},
    "scale": {"softmax_scale": 0.2},
    "slopes": {"alibi_slopes": torch.linspace(0.01, 0.1, HEADS)},
    "slopes of each": {"alibi_slopes": torch.linspace(0.01, 0.1, 8 * HEADS).view(8, HEADS)},
    "sinks": {"s_aux": torch.linspace(-1, 2, HEADS).to(BF16)},
}


BATCHES = {"mixed": MIXED, "decodes": DECODES, "guesses": GUESSES}
CALLS = [(name, batch, False) for name in OPTIONS for batch in BATCHES]
CALLS += [(name, batch, True) for name in ("plain", "sinks") for batch in BATCHES]


@pytest.mark.parametrize(("name", "kind", "return_lse"), CALLS)
def test_results_are_those_of_the_cpu(name: str, kind: str, return_lse: bool) -> None:
    batch = BATCHES[kind]
    given = step(*batch, padding=3) | {"return_softmax_lse": return_lse}
    options = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in OPTIONS[name].items()}
    out = torch.full_like(given["q"], torch.nan)
    result = flash_attn_varlen_func(**given | options, out=out)
    expected = flash_attn_varlen_func(**on_cpu(given) | OPTIONS[name])
    if return_lse:
        result, lse = result
        expected, expected_lse = expected
        torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-4, atol=1e-4)
    assert result is out
    close(out, expected)


def eight_bits(given: dict[str, Any], dtype: torch.dtype, scale: Any) -> dict[str, Any]:
    """The step over a cache of 8 bits."""
    kv = torch.randn(2, BLOCKS, BLOCK, KV_HEADS, SIZE, device="cuda") * 0.5
    numbers = (kv / 0.03).clamp(-127, 127)
    stored = (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
    return given | {"k": stored[0], "v": stored[1], "k_descale": scale, "v_descale": scale}


def scales_of(kind: str) -> Any:
    one = torch.full((), 0.03, device="cuda")
    by_head = torch.linspace(0.02, 0.04, KV_HEADS, device="cuda")
    by_token = torch.linspace(0.02, 0.04, BLOCKS * BLOCK * KV_HEADS, device="cuda").view(BLOCKS, BLOCK, KV_HEADS)
    return {"number": 0.03, "one": one.expand(8, KV_HEADS), "head": by_head.expand(8, KV_HEADS), "token": by_token}[
        kind
    ]


EIGHT_BITS = [(d, s) for d in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8) for s in ("number", "one", "head")]


CALLS_OF_8_BITS = [(d, s, batch) for d, s in EIGHT_BITS for batch in BATCHES]
CALLS_OF_8_BITS += [(torch.int8, "token", batch) for batch in ("decodes", "guesses")]


@pytest.mark.parametrize(("dtype", "kind", "batch"), CALLS_OF_8_BITS)
def test_8_bit_caches_give_the_results_of_the_cpu(dtype: torch.dtype, kind: str, batch: str, no_sync: Any) -> None:
    given = eight_bits(step(*BATCHES[batch], padding=3), dtype, scales_of(kind))
    flash_attn_varlen_func(**given, return_softmax_lse=True)
    torch.cuda.synchronize()
    no_sync()
    out, lse = flash_attn_varlen_func(**given, return_softmax_lse=True)
    torch.cuda.set_sync_debug_mode("default")
    expected, expected_lse = flash_attn_varlen_func(**on_cpu(given), return_softmax_lse=True)
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=2e-2)  # weights are rounded, too
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("what", ["scales of tokens", "float32", "slopes to both sides"])
def test_what_the_kernels_do_not_take_jax_does(what: str) -> None:
    given = step(*MIXED)
    if what == "scales of tokens":
        given = eight_bits(given, torch.int8, scales_of("token"))
    elif what == "float32":
        given |= {n: given[n].float() for n in ("q", "k", "v")}
    else:
        given |= {"alibi_slopes": torch.rand(HEADS, device="cuda") / 50, "causal": False}
    out = torch.full_like(given["q"], 7.0)
    assert flash_attn_varlen_func(**given, out=out) is out
    torch.testing.assert_close(out.cpu().float(), flash_attn_varlen_func(**on_cpu(given)).float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_new_tokens_of_8_bit_caches_and_their_graph(seqlen_q: int) -> None:
    given = eight_bits(step(*DECODES), torch.float8_e4m3fn, 0.03)
    caches, start = (given["k"], given["v"]), [given[n].clone() for n in "kv"]
    q, k, v = (torch.randn(8, seqlen_q, n, SIZE, device="cuda").to(BF16) for n in (HEADS, KV_HEADS, KV_HEADS))
    how = {"cache_seqlens": given["seqused_k"], "block_table": torch.randperm(64).int().view(8, 8).cuda()}
    how |= {"causal": True, "k_descale": 0.03, "v_descale": 0.03}
    how["cache_seqlens"].clamp_(max=80)
    there = [x.cpu() for x in (q, *start, k, v)]
    expected = flash_attn_with_kvcache(*there, **on_cpu(how))
    out = flash_attn_with_kvcache(q, *caches, k, v, **how)
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(caches, there[1:3], strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
    graph, captured = torch.cuda.CUDAGraph(), torch.empty_like(q)
    with torch.cuda.graph(graph):
        flash_attn_with_kvcache(q, *caches, k, v, **how, out=captured)
    graph.replay()
    assert torch.equal(captured, out)


def test_nothing_waits_for_the_device(no_sync: Any) -> None:
    """With what was compiled, and made once, before."""
    mixed, decodes = step(*MIXED), step(*DECODES)
    caches, sinks = (mixed["k"], mixed["v"]), torch.randn(HEADS, device="cuda")
    rows, slots = torch.randn(2, 512, KV_HEADS, SIZE, device="cuda").to(BF16), torch.randperm(1000).cuda()[:512]
    pairs = torch.tensor([[1, 2], [3, 4]], device="cuda")
    q, new = (torch.randn(8, 1, n, SIZE, device="cuda").to(BF16) for n in (HEADS, KV_HEADS))
    place = {"cache_seqlens": decodes["seqused_k"], "block_table": decodes["block_table"], "causal": True}
    tables = {"rotary_cos": torch.randn(2000, 32, device="cuda"), "rotary_sin": torch.randn(2000, 32, device="cuda")}
    states, lses = torch.randn(2, 37, HEADS, SIZE, device="cuda").to(BF16), torch.randn(2, HEADS, 37, device="cuda")

    def run() -> None:
        for given in (mixed, decodes):
            names = ("block_table", "seqused_k", "cu_seqlens_q", "max_seqlen_q")
            plan = plan_attention(*(given[name] for name in names))
            for lse in (False, True):
                flash_attn_varlen_func(**given, s_aux=sinks, scheduler_metadata=plan, return_softmax_lse=lse)
        reshape_and_cache_flash(*rows, *caches, slots, "auto", 1.0, 1.0)
        flash_attn_with_kvcache(q, *caches, new, new, **tables, **place)
        copy_blocks([caches[0]], [caches[1]], pairs)
        merge_attn_states(states[0], states[0], lses[0], states[1], lses[1])

    run()
    torch.cuda.synchronize()
    no_sync()
    run()
    with pytest.raises(RuntimeError, match="synchroniz"):
        mixed["seqused_k"].cpu()  # what it would have found


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
def test_new_tokens_are_written_and_attended_to(paged: bool, seqlen_q: int) -> None:
    torch.manual_seed(3)
    size = BLOCK if paged else 512
    caches = [torch.randn(8 * 512 // size, size, KV_HEADS, SIZE, device="cuda").to(BF16) for _ in range(2)]
    q, k, v = (torch.randn(8, seqlen_q, n, SIZE, device="cuda").to(BF16) for n in (HEADS, KV_HEADS, KV_HEADS))
    given: dict[str, Any] = {"cache_seqlens": torch.randint(0, 400, (8,), dtype=torch.int32, device="cuda")}
    if paged:
        given["block_table"] = torch.randperm(256).int().view(8, 32).cuda()
    else:
        given["cache_batch_idx"] = torch.randperm(8).int().cuda()
    given |= {"rotary_cos": torch.randn(600, 32).cuda(), "rotary_sin": torch.randn(600, 32).cuda(), "causal": True}
    on_host = [x.cpu() for x in (q, *caches, k, v)]
    pointers = [x.data_ptr() for x in caches]
    out = torch.full_like(q, torch.nan)
    result, lse = flash_attn_with_kvcache(q, *caches, k, v, **given, out=out, return_softmax_lse=True)
    expected, expected_lse = flash_attn_with_kvcache(*on_host, **on_cpu(given), return_softmax_lse=True)
    assert result is out
    close(out, expected)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-3, atol=1e-3)
    assert [x.data_ptr() for x in caches] == pointers
    for ours, theirs in zip(caches, on_host[1:3], strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-2, atol=1e-3)  # rotations may round otherwise
    again = flash_attn_with_kvcache(q, *caches, cache_seqlens=given["cache_seqlens"] + seqlen_q, causal=True, **{
        n: x for n, x in given.items() if n in ("block_table", "cache_batch_idx")})  # fmt: skip
    assert again.shape == out.shape


def test_a_cache_as_engines_keep_it_is_written_in_place() -> None:
    kv = torch.zeros(BLOCKS, 2, BLOCK, KV_HEADS, SIZE, dtype=BF16, device="cuda")
    qkv = torch.randn(70, HEADS + 2 * KV_HEADS, SIZE, device="cuda").to(BF16)
    key, value = qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
    slots = torch.randperm(BLOCKS * BLOCK)[:70].cuda()
    expected = kv.cpu()
    reshape_and_cache_flash(key.cpu(), value.cpu(), *expected.unbind(1), slots.cpu(), "auto", 1.0, 1.0)
    reshape_and_cache_flash(key, value, *kv.unbind(1), slots, "auto", 1.0, torch.ones((), device="cuda"))
    assert torch.equal(kv.cpu(), expected)
    pairs = torch.tensor([[0, 5], [5, 6], [-1, 3]])
    copy_blocks([expected[:, 0]], [expected[:, 1]], pairs)
    copy_blocks([kv[:, 0]], [kv[:, 1]], pairs.cuda())
    assert torch.equal(kv.cpu(), expected)
    for target in (torch.zeros_like(kv), torch.zeros_like(expected)):
        swapped = torch.zeros_like(expected)
        swap_blocks(expected, swapped, pairs)
        swap_blocks(kv, target, pairs)
        assert torch.equal(target.cpu(), swapped)
    eight = torch.zeros(2, BLOCKS, BLOCK, KV_HEADS, SIZE, device="cuda").to(torch.float8_e4m3fn)
    there = eight.cpu()
    reshape_and_cache_flash(key.cpu(), value.cpu(), *there.unbind(0), slots.cpu(), "fp8", 0.5, 0.25)
    reshape_and_cache_flash(key, value, *eight.unbind(0), slots, "fp8", 0.5, 0.25)
    assert torch.equal(eight.cpu().view(torch.uint8), there.view(torch.uint8))


@pytest.mark.parametrize("num_tokens", [1, 32, 77])
@pytest.mark.parametrize("in_place", [False, True])
def test_states_are_merged(num_tokens: int, in_place: bool) -> None:
    states = torch.randn(2, num_tokens, HEADS, SIZE, device="cuda").to(BF16)
    lses = torch.randn(2, HEADS, num_tokens, device="cuda") * 3
    lses[0, :, 0] = -torch.inf
    out, out_lse = torch.empty(num_tokens, HEADS, SIZE).to(BF16), torch.empty(HEADS, num_tokens)
    merge_attn_states(out, states[0].cpu(), lses[0].cpu(), states[1].cpu(), lses[1].cpu(), out_lse)
    ours, ours_lse = (states[0] if in_place else torch.empty_like(states[0])), torch.empty_like(lses[0])
    merge_attn_states(ours, states[0], lses[0], states[1], lses[1], ours_lse)
    torch.testing.assert_close(ours.cpu(), out, rtol=8e-3, atol=1e-3)
    torch.testing.assert_close(ours_lse.cpu(), out_lse, rtol=1e-5, atol=1e-5)


def test_a_graph_of_a_step_of_layers() -> None:
    """Writes, and attention with and without a window by one plan; replayed over other batches in the same memory."""
    given = step([1000] * 8, [64] * 8)
    layers = [torch.randn(BLOCKS, 2, BLOCK, KV_HEADS, SIZE, device="cuda").to(BF16) for _ in range(4)]
    start, outs = [x.clone() for x in layers], [torch.zeros_like(given["q"]) for _ in layers]
    rows = torch.randn(2, 512, KV_HEADS, SIZE, device="cuda").to(BF16)
    slots, sinks = torch.randperm(BLOCKS * BLOCK)[:512].cuda(), torch.randn(HEADS, device="cuda").to(BF16)

    def run() -> None:
        plan = plan_attention(given["block_table"], given["seqused_k"], given["cu_seqlens_q"])
        for i, (layer, out) in enumerate(zip(layers, outs, strict=True)):
            k, v = layer.unbind(1)
            reshape_and_cache_flash(*rows, k, v, slots, "auto", 1.0, 1.0)
            how = {"window_size": (63, 0) if i % 2 else (-1, -1), "s_aux": sinks, "out": out}
            flash_attn_varlen_func(**given | {"k": k, "v": v}, **how, scheduler_metadata=plan)

    def restore() -> None:
        for x, old in zip(layers, start, strict=True):
            x.copy_(old)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    rng = np.random.default_rng(0)
    for _ in range(4):
        new = rng.choice([0, 1, 1, 30, 100, 200], 8)
        new[np.cumsum(new) > 512] = 0
        lens = np.where(new > 0, new + rng.integers(0, 700, 8), 0)
        starts = np.concatenate([[0], np.cumsum(new)])
        for name, values in (("seqused_k", lens), ("cu_seqlens_q", starts)):
            given[name].copy_(torch.from_numpy(values.astype(np.int32)))
        given["block_table"].copy_(torch.from_numpy(rng.integers(0, BLOCKS, given["block_table"].shape)))
        given["q"].normal_()
        rows.normal_()
        restore()
        run()
        expected = [x.clone() for x in (*outs, *layers)]
        restore()
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip((*outs, *layers), expected, strict=True))


@pytest.mark.parametrize("causal", [True, False])
def test_packed_keys_and_their_graph(causal: bool, no_sync: Any) -> None:
    lens = [1, 700, 64, 0, 300]
    starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(1100, n, SIZE, device="cuda").to(BF16) for n in (HEADS, KV_HEADS, KV_HEADS))
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_k": 700}
    given["causal"] = causal
    out = flash_attn_varlen_func(**given)
    torch.cuda.synchronize()
    no_sync()
    assert flash_attn_varlen_func(**given).shape == out.shape
    torch.cuda.set_sync_debug_mode("default")
    close(out, flash_attn_varlen_func(**on_cpu(given)))
    graph, captured = torch.cuda.CUDAGraph(), torch.full_like(q, torch.nan)
    with torch.cuda.graph(graph):
        flash_attn_varlen_func(**given, out=captured)
    starts.copy_(torch.tensor([0, 10, 20, 500, 501, 1100], dtype=torch.int32))
    graph.replay()
    assert torch.equal(captured, flash_attn_varlen_func(**given))


def test_what_a_gpu_does_not_take() -> None:
    given = step(*DECODES)
    with pytest.raises(ValueError, match="seqused_k: expected a tensor on cuda:0"):
        flash_attn_varlen_func(**given | {"seqused_k": given["seqused_k"].cpu()})
    with pytest.raises(TypeError, match="scheduler_metadata"):
        flash_attn_varlen_func(**given, scheduler_metadata=given["seqused_k"])
