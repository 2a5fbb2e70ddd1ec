"""The way of the functions for PyTorch to the operators, as on a GPU, but over tensors of the CPU: the operators' CPU
implementations stand in for the kernels."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_way import take_the_way_of_a_gpu

from jaxpaged import notices
from jaxpaged.backends import cache_functions, checks, gpu_kvcache, gpu_plan, kvcache, merge, varlen
from jaxpaged.backends.functional import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    plan_attention,
    reshape_and_cache,
    reshape_and_cache_flash,
)
from jaxpaged.bridge import head_values
from jaxpaged.testing import doors
from jaxpaged.testing.cases import QUANTIZED, named_cases
from jaxpaged.testing.verify import compare

T = torch.zeros
BF16 = torch.bfloat16
EIGHT = torch.zeros(12, 16, 2, 64).to(torch.float8_e4m3fn)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Within it tensors of the CPU take a GPU's way. Gives the names of operators called."""
    yield take_the_way_of_a_gpu(monkeypatch, varlen, kvcache, cache_functions, merge, gpu_plan)


DECODED, PREFILLED = ["plan_decode", "decode"], ["plan_prefill", "prefill"]
RUNS: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    "varlen": (doors._run_torch_varlen, doors._torch_refuses, False),
    "planned": (doors._run_torch_without_lse, doors._torch_refuses, True),
    "kvcache": (doors._run_torch_kvcache, doors._kvcache_refuses, True),
}
EIGHT_BITS = tuple(
    case.name for case in named_cases()
    if case.cache_dtype in QUANTIZED and doors.on_gpu_refuses(doors._in_half(case), True) is None
)  # fmt: skip
NAMES = (
    "mixed", "decode", "empty-rows", "all-padding", "speculative", "extra-tokens", "mixed-many", "many-decodes",
    "cross-attention", "table-too-narrow", "bad-blocks", "option-window", "option-soft-cap", "option-alibi",
    "option-alibi-per-request", "option-sinks", "option-encoder", "layout-N2HD", "layout-2NHD", "layout-NH2D",
    "v-head-size-NHD", "gqa-3", "gqa-32", "head-size-80", "block-size-8", "float16", *EIGHT_BITS,
)  # fmt: skip
CASES = {case.name: case for case in named_cases()}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", NAMES)
def test_cases_by_the_operators(as_on_gpu: list[str], name: str, run: str) -> None:
    function, refuses, known = RUNS[run]
    door = doors.Door(function, lambda case: refuses(case) or doors.on_gpu_refuses(case, known), doors._in_half, 1.5)
    result = compare(CASES[name], run, door)
    if result.skipped:
        pytest.skip(result.skipped)
    assert result.ok, result
    if name != "all-padding":
        assert as_on_gpu


REFUSED = (
    "block-size-3", "int8-token_head", "bfloat16-float32-cache", "layout-VLLM_V0", "block-size-1"
)  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_do_not_take_jax_does(as_on_gpu: list[str], name: str) -> None:
    """With a warning. The doors know what the kernels don't take."""
    case = doors._in_half(CASES[name])
    if name == "bfloat16-float32-cache":
        case = dataclasses.replace(case, cache_dtype="float32")
    assert doors.on_gpu_refuses(case) is not None
    if doors._torch_refuses(case) is not None:
        return
    notices._given.clear()
    with pytest.warns(RuntimeWarning, match="JAX's functions serve instead"):
        result = compare(case, "varlen", doors.Door(doors._run_torch_varlen, doors._torch_refuses, doors._in_half, 1.5))
    assert result.ok, result
    assert not set(as_on_gpu) & {"decode", "prefill"}


def step() -> dict[str, Any]:
    kv = torch.randn(2, 12, 16, 2, 64).to(BF16)
    return {
        "q": torch.randn(9, 4, 64).to(BF16), "k": kv[0], "v": kv[1],
        "cu_seqlens_q": torch.tensor([0, 1, 9], dtype=torch.int32),
        "seqused_k": torch.tensor([20, 30], dtype=torch.int32),
        "block_table": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), "causal": True,
    }  # fmt: skip


def test_layers_share_the_plan_of_their_step(as_on_gpu: list[str]) -> None:
    given = step()
    batch = {name: given[name] for name in ("block_table", "seqused_k", "cu_seqlens_q")}
    plan = plan_attention(**batch)
    outs = [flash_attn_varlen_func(**given, scheduler_metadata=plan) for _ in range(3)]
    assert as_on_gpu == ["plan_prefill", *["prefill"] * 3]
    as_on_gpu.clear()
    window = flash_attn_varlen_func(**given, scheduler_metadata=plan, window_size=(5, 0))
    flash_attn_varlen_func(**given, scheduler_metadata=plan, window_size=(5, 0))
    assert as_on_gpu == ["plan_prefill", "prefill", "prefill"]
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], window)
    as_on_gpu.clear()
    decoded = plan_attention(**batch, max_seqlen_q=8)
    assert torch.equal(flash_attn_varlen_func(**given, scheduler_metadata=decoded), outs[0])
    assert as_on_gpu == ["plan_decode", "decode"]
    as_on_gpu.clear()
    assert torch.equal(flash_attn_varlen_func(**given, max_seqlen_q=8), outs[0])
    out, lse = flash_attn_varlen_func(**given, max_seqlen_q=8, return_softmax_lse=True)
    assert as_on_gpu == ["plan_decode", "decode"] * 2
    assert torch.equal(out, outs[0])
    torch.testing.assert_close(lse, flash_attn_varlen_func(**given, return_softmax_lse=True)[1])


def test_a_plan_of_another_batch_is_refused(as_on_gpu: list[str]) -> None:
    given = step()
    plan = plan_attention(given["block_table"], given["seqused_k"], given["cu_seqlens_q"])
    for name in ("block_table", "seqused_k", "cu_seqlens_q"):
        with pytest.raises(ValueError, match=f"scheduler_metadata: it was planned for another {name}"):
            flash_attn_varlen_func(**given | {name: given[name].clone()}, scheduler_metadata=plan)
    with pytest.raises(TypeError, match="scheduler_metadata: on a GPU, expected None or what plan_attention returns"):
        flash_attn_varlen_func(**given, scheduler_metadata=T(3))
    with pytest.raises(TypeError, match="max_seqlen_q"):
        plan_attention(given["block_table"], given["seqused_k"], given["cu_seqlens_q"], 3.0)
    assert not as_on_gpu


def test_out_is_written_in_place_whatever_its_strides(as_on_gpu: list[str]) -> None:
    given = step()
    expected = flash_attn_varlen_func(**given)
    for out in (torch.full((9, 4, 64), torch.nan).to(BF16), torch.full((4, 9, 64), torch.nan).to(BF16).transpose(0, 1)):
        assert flash_attn_varlen_func(**given, out=out) is out
        assert torch.equal(out, expected)


def test_queries_that_are_part_of_a_product_are_read_where_they_lie(
    as_on_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = step()
    expected = flash_attn_varlen_func(**given)
    qkv = torch.randn(9, 8, 64).to(BF16)
    qkv[:, :4] = given["q"]
    apart = given["q"].transpose(0, 1).contiguous().transpose(0, 1)
    for q in (qkv[:, :4], apart):
        assert torch.equal(flash_attn_varlen_func(**given | {"q": q}), expected)


BAD: dict[str, tuple[dict[str, Any], Any, str]] = {
    "dense": ({"block_table": None}, ValueError, "k: expected shape"),
    "no lengths": ({"seqused_k": None}, ValueError, "seqused_k: with block_table"),
    "descale": ({"k_descale": 2.0}, ValueError, "k_descale: it belongs to 8-bit caches"),
    "int8": ({n: EIGHT.view(torch.int8) for n in "kv"}, ValueError, "k_scale"),
    "scales of requests": (
        {**{n: EIGHT for n in "kv"}, "k_descale": torch.ones(2, 2)}, NotImplementedError, "k_descale: .* per request"
    ),
    "scale": ({**{n: EIGHT for n in "kv"}, "v_descale": torch.ones(3)}, ValueError, "v_descale: expected shape"),
    "scale's dtype": ({**{n: EIGHT for n in "kv"}, "v_descale": T(1).half()}, TypeError, "v_descale: expected torch"),
    "out": ({"out": T(8, 4, 64, dtype=BF16)}, ValueError, "out: expected shape"),
    "q": ({"q": T(9, 5, 64, dtype=BF16)}, ValueError, "q: the number of heads"),
    "starts": ({"cu_seqlens_q": T(3)}, TypeError, "cu_seqlens_q: expected torch"),
    "lens": ({"seqused_k": T(3, dtype=torch.int32)}, ValueError, "seqused_k: expected shape"),
    "table": ({"block_table": T(2, 2, dtype=torch.int64)}, TypeError, r"block_table: expected torch\.int32"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_before_anything_is_written(as_on_gpu: list[str], name: str) -> None:
    change, error, message = BAD[name]
    given = step()
    out = torch.full((9, 4, 64), 7.0).to(BF16)
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**{"out": out, **given} | change)
    assert (out == 7).all()


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("rotate", [True, False])
def test_new_tokens_are_written_as_on_the_cpu(
    as_on_gpu: list[str], monkeypatch: pytest.MonkeyPatch, paged: bool, rotate: bool
) -> None:
    torch.manual_seed(0)
    caches = [torch.randn(12, 16, 2, 64).to(BF16) for _ in range(2)]
    q, k, v = (torch.randn(3, 4, n, 64).to(BF16) for n in (4, 2, 2))
    given: dict[str, Any] = {"cache_seqlens": torch.tensor([0, 10, 14], dtype=torch.int32), "causal": True}
    if paged:
        given["block_table"] = torch.tensor([[1, 2], [3, -4], [5, 99]], dtype=torch.int32)
    else:
        given["cache_batch_idx"] = torch.tensor([5, 0, 7], dtype=torch.int32)
    if rotate:
        given |= {"rotary_cos": torch.randn(40, 16), "rotary_sin": torch.randn(40, 16)}
    ours = [x.clone() for x in caches]
    out, lse = flash_attn_with_kvcache(q, *ours, k, v, **given, return_softmax_lse=True)
    assert "reshape_and_cache" in as_on_gpu
    monkeypatch.undo()
    expected, expected_lse = flash_attn_with_kvcache(q, *caches, k, v, **given, return_softmax_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(ours, caches, strict=True))
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=4e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


def test_a_cache_is_not_written_if_attention_is_refused(as_on_gpu: list[str]) -> None:
    caches = [T(12, 4, 2, 64, dtype=BF16) for _ in range(2)]
    q, k = T(3, 1, 4, 64, dtype=BF16), torch.ones(3, 1, 2, 64, dtype=BF16)
    lens = T(3, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="cache_leftpad: not supported on a GPU"):
        flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=lens, cache_leftpad=lens)
    assert not any(x.any() for x in caches)


def test_scales_that_are_numbers_go_as_tensors_that_are_made_once(as_on_gpu: list[str]) -> None:
    from jaxpaged.backends.gpu_scales import _remembered

    key = torch.randn(4, 2, 64)
    slots, caches = torch.arange(4), [T(2, 16, 2, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    reshape_and_cache_flash(key, key, *caches, slots, "fp8", 0.5, 1.0)
    stored = (key / 0.5).to(torch.float8_e4m3fn)
    assert torch.equal(caches[0][0, :4].view(torch.uint8), stored.view(torch.uint8))
    assert _remembered(0.5, key.device) is _remembered(0.5, key.device)
    with pytest.raises(NotImplementedError, match="reshape_and_cache_flash"):
        reshape_and_cache(key, key, *caches, slots, "auto", 1.0, 1.0)


@pytest.mark.parametrize(("longest", "operators"), [(8, DECODED), (9, PREFILLED), (None, PREFILLED)])
def test_scales_of_8_bit_caches_reach_the_kernels(
    as_on_gpu: list[str], longest: int | None, operators: list[str]
) -> None:
    """As engines give them: numbers, of one element, expanded to requests and heads, of each head."""
    given = step() | {"max_seqlen_q": longest}
    caches = [torch.randn(12, 16, 2, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    eight = given | {"k": caches[0], "v": caches[1]}
    plain = given | {n: (x.float() * 0.5).to(BF16) for n, x in zip("kv", caches, strict=True)}
    expected = flash_attn_varlen_func(**plain)
    half = torch.full((1,), 0.5)
    kinds: list[Any] = [0.5, half, half[0], half.view(1, 1), half.expand(2, 2), half.expand(2), half.repeat(2)]
    kinds.append(half.repeat(2).expand(2, 2))
    as_on_gpu.clear()
    for scale in kinds:
        out = flash_attn_varlen_func(**eight, k_descale=scale, v_descale=scale)
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=4e-3)
    assert as_on_gpu == operators * len(kinds)
    for wrong in ({"k_descale": 0.5}, {"v_descale": 0.5}):
        assert not torch.allclose(flash_attn_varlen_func(**eight, **wrong), expected, rtol=1e-1, atol=1e-1)


@pytest.mark.parametrize(("longest", "operators"), [(8, DECODED), (None, PREFILLED)])
def test_layers_with_scales_of_other_shapes_have_plans_of_their_own(
    as_on_gpu: list[str], longest: int | None, operators: list[str]
) -> None:
    given = step() | {"k": EIGHT, "v": EIGHT}
    plan = plan_attention(given["block_table"], given["seqused_k"], given["cu_seqlens_q"], longest)
    for scale in (0.5, 0.25, torch.ones(2), torch.ones(2)):
        flash_attn_varlen_func(**given, k_descale=scale, v_descale=scale, scheduler_metadata=plan)
    assert as_on_gpu == [*operators, operators[1]] * 2


@pytest.mark.parametrize(("seqlen_q", "operators"), [(3, DECODED), (9, PREFILLED)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_new_tokens_are_stored_in_8_bits(
    as_on_gpu: list[str], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seqlen_q: int, operators: list[str]
) -> None:
    caches = [T(4, 16, 2, 64).to(dtype) for _ in range(2)]
    ours, theirs = ([x.clone() for x in caches] for _ in range(2))
    q, k, v = (torch.randn(2, seqlen_q, n, 64).to(BF16) for n in (4, 2, 2))
    given: dict[str, Any] = {
        "cache_seqlens": torch.tensor([2, 15], dtype=torch.int32), "causal": True, "k_descale": 0.03, "v_descale": 0.02,
        "block_table": torch.tensor([[1, 2], [0, 3]], dtype=torch.int32),
    }  # fmt: skip
    out = flash_attn_with_kvcache(q, *ours, k, v, **given)
    assert as_on_gpu == [operators[0], "reshape_and_cache", operators[1]]
    monkeypatch.undo()
    expected = flash_attn_with_kvcache(q, *theirs, k, v, **given)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=4e-3)
    for x, y, old in zip(ours, theirs, caches, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        assert not torch.equal(x.view(torch.uint8), old.view(torch.uint8))


def by_token() -> dict[str, Any]:
    lens, table = torch.tensor([2, 5], dtype=torch.int32), torch.tensor([[1], [0]], dtype=torch.int32)
    return {
        "q": torch.randn(2, 9, 4, 64).to(BF16), **{n: torch.randn(2, 9, 2, 64).to(BF16) for n in "kv"},
        **{f"{n}_cache": torch.randint(-99, 99, (4, 16, 2, 64), dtype=torch.int8) for n in "kv"},
        **{f"{n}_descale": torch.rand(4, 16, 2) / 50 for n in "kv"},
        "cache_seqlens": lens, "block_table": table, "causal": True,
    }  # fmt: skip


def in_float32() -> dict[str, Any]:
    given = by_token() | {f"{n}_cache": torch.randn(4, 16, 2, 64) for n in "kv"}
    given |= {n: given[n].float() for n in "qkv"}
    return given | {f"{n}_descale": None for n in "kv"}


def in_blocks_of_4() -> dict[str, Any]:
    given = in_float32() | {f"{n}_cache": torch.randn(16, 4, 2, 64) for n in "kv"}
    given["block_table"] = torch.randperm(16, dtype=torch.int32)[:8].view(2, 4)
    return {name: x.to(BF16) if x is not None and name[0] in "qkv" else x for name, x in given.items()}


def with_slopes_to_both_sides() -> dict[str, Any]:
    return in_blocks_of_4() | {"alibi_slopes": torch.rand(2, 4), "causal": False}


@pytest.mark.parametrize("make", [by_token, in_float32, in_blocks_of_4, with_slopes_to_both_sides])
def test_new_tokens_of_what_the_kernels_do_not_take(
    as_on_gpu: list[str], monkeypatch: pytest.MonkeyPatch, make: Callable[[], dict[str, Any]]
) -> None:
    """Written by the operator, and attended to by JAX's general path."""
    given = make()
    copies = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert "reshape_and_cache" in as_on_gpu and not set(as_on_gpu) & {"decode", "prefill"}
    monkeypatch.undo()
    expected, expected_lse = flash_attn_with_kvcache(**copies, return_softmax_lse=True)
    assert all(torch.equal(given[name], copies[name]) for name in ("k_cache", "v_cache"))
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=4e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


def test_values_per_head_are_made_once_and_again_when_written_to() -> None:
    sinks = torch.randn(8)
    how: dict[str, Any] = {"num_kv_heads": 2, "max_query_len": 1, "name": "s_aux"}
    made = head_values.by_column_once(sinks, **how)
    assert head_values.by_column_once(sinks, **how) is made
    assert made is not None
    assert made[0, 0].tolist() == sinks.tolist() + [0.0] * 8
    sinks.add_(1)
    again = head_values.by_column_once(sinks, **how)
    assert again is not None
    assert again[0, 0, 0] == sinks[0]
    assert head_values.compact(sinks) is sinks
    half = sinks.half()
    assert head_values.compact(half) is head_values.compact(half)
    count = len(head_values._made)
    del half
    assert len(head_values._made) == count - 1


def packed(total: int = 90) -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "q": torch.randn(9, 4, 64).to(BF16), "k": torch.randn(total, 2, 64).to(BF16),
        "v": torch.randn(total, 2, 128).to(BF16), "cu_seqlens_q": torch.tensor([0, 1, 1, 1, 7], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 3, 3, 10, 85], dtype=torch.int32), "causal": True,
    }  # fmt: skip


@pytest.mark.parametrize("how", [{}, {"max_seqlen_k": 75, "max_seqlen_q": 6}, {"causal": False}, {"used": True}])
def test_packed_keys_are_attended_to_as_on_the_cpu(
    as_on_gpu: list[str], monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    used = {"seqused_k": torch.tensor([2, 0, 7, 70], dtype=torch.int32)} if "used" in how else how
    given = packed() | used
    out, lse = flash_attn_varlen_func(**given, return_softmax_lse=True)
    attend = ["plan_decode", "decode"] if "max_seqlen_q" in how else ["plan_prefill", "prefill"]
    assert as_on_gpu == ["reshape_and_cache", *attend]
    narrow = flash_attn_varlen_func(**given | {"max_seqlen_k": 64})
    assert not torch.equal(narrow, out)  # a bound that isn't one
    monkeypatch.undo()
    expected, expected_lse = flash_attn_varlen_func(**given, return_softmax_lse=True)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=4e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


def test_packed_keys_take_no_plan_and_no_scales(as_on_gpu: list[str]) -> None:
    given = step()
    plan = plan_attention(given["block_table"], given["seqused_k"], given["cu_seqlens_q"])
    for change, message in (
        ({"scheduler_metadata": plan}, "scheduler_metadata: a plan is made for a block table"),
        ({"k_descale": 1.0}, "k_descale, v_descale: they belong to 8-bit caches"),
        ({"cu_seqlens_k": None}, "cu_seqlens_k: expected cumulative lengths"),
        ({"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens_k: expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn_varlen_func(**packed() | change)
    assert not as_on_gpu


def test_tensors_on_two_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        """What `on_gpu` looks at of a tensor."""

        is_cuda, device, requires_grad = True, torch.device("cuda", 0), False

    monkeypatch.setattr(checks.torch, "Tensor", (torch.Tensor, OnGpu))
    assert checks.on_gpu(q=OnGpu(), out=None)
    assert not checks.on_gpu(q=T(1))
    with pytest.raises(ValueError, match="k: expected a tensor on cuda:0, as others are, got one on cpu"):
        checks.on_gpu(q=OnGpu(), k=T(1))
    with pytest.raises(TypeError, match="k: expected a tensor, got list"):
        checks.on_gpu(q=OnGpu(), k=[])


def test_slots_without_room_are_skipped() -> None:
    cache = T(6, 8, 2, 64)
    table = torch.tensor([[1, 4], [2, -1], [9, 0]], dtype=torch.int32)
    lens = torch.tensor([7, 7, 6], dtype=torch.int32)
    found = gpu_kvcache.GpuCache(cache, cache, (None, None), table, lens).new_slots(10)
    expected = [15, *range(32, 40), -1, 23, *[-1] * 9, -1, -1, *range(8)]
    assert found.tolist() == expected
