"""Aphrodite's FlashAttention backend on its way to the kernels, over tensors of the CPU."""

import pytest
import test_flash
import torch
from gpu_way import take_the_way_of_a_gpu
from small_engine import SmallEngine, assert_close
from test_flash import DECODES, MIXED, OPTIONS, PROMPTS, impl, metadata, run

from jaxpaged.backends import cache_functions, flash, gpu_plan

BF16 = torch.bfloat16


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return take_the_way_of_a_gpu(monkeypatch, cache_functions, flash, gpu_plan)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("lens", "num_prefills"), [(MIXED, 3), (PROMPTS, 3), (DECODES, 0)], ids=["mixed", "prompts", "decodes"]
)
def test_batches_that_attend_to_the_cache(called: list[str], name: str, lens: object, num_prefills: int) -> None:
    ours, oracles = OPTIONS[name]
    engine = SmallEngine(*lens, dtype=BF16)
    meta = metadata(engine, num_prefills)
    out = run(impl(**ours), engine, meta)
    engine.check(out, **oracles)
    plans = [n for n in called if n.startswith("plan")]
    called.clear()
    assert torch.equal(run(impl(**ours), engine, meta), out)  # another layer: by the same plans
    assert called == ["reshape_and_cache", *[n.removeprefix("plan_") for n in plans]]


@pytest.mark.parametrize("name", OPTIONS)
def test_whole_prompts_without_tables(called: list[str], name: str) -> None:
    ours, oracles = OPTIONS[name]
    engine = SmallEngine(*PROMPTS, dtype=BF16)
    engine.check(run(impl(**ours), engine, metadata(engine, 3, cached=False)), **oracles)
    assert called == ["reshape_and_cache", "reshape_and_cache", "plan_prefill", "prefill"]


def test_a_profile_run_has_no_cache(called: list[str]) -> None:
    engine = SmallEngine(*PROMPTS, dtype=BF16)
    out = run(impl(), engine, metadata(engine, 3, cached=False), kv_cache=None)
    assert_close(out.view(-1, 4, 32), engine.expected())
    assert torch.equal(engine.bits(), engine.before)


def test_padding_of_a_cuda_graph_harms_nobody(called: list[str]) -> None:
    engine = SmallEngine(*DECODES, dtype=BF16)
    padded = {n: torch.nn.functional.pad(getattr(engine, n), (0, 0, 0, 2)) for n in ("query", "key", "value")}
    out = run(impl(), engine, metadata(engine, 0, pad=2), **padded)
    engine.check(out[:3])


def test_encoders_see_both_sides_and_keep_nothing(called: list[str]) -> None:
    engine = SmallEngine(*PROMPTS, dtype=BF16)
    out = run(impl(), engine, metadata(engine, 3, cached=False), attn_type="encoder")
    assert_close(out.view(-1, 4, 32), engine.expected(causal=False))
    assert torch.equal(engine.bits(), engine.before)


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize(
    ("lens", "num_prefills", "operators"),
    [(DECODES, 0, ["decode"]), (PROMPTS, 3, ["prefill"]), (MIXED, 3, ["prefill", "decode"])],
    ids=["decodes", "prompts", "mixed"],
)
def test_8_bit_caches_are_attended_to(
    called: list[str],
    monkeypatch: pytest.MonkeyPatch,
    lens: object,
    num_prefills: int,
    operators: list[str],
    name: str,
    dtype: torch.dtype,
) -> None:
    engine = SmallEngine(*lens, dtype=BF16, head_size=64)
    stored = (engine.kv_cache.float() / 0.05).to(dtype).view(torch.uint8)
    layer = impl(head_size=64, scale=64**-0.5, kv_cache_dtype=name)
    given = {"k_scale": 0.05, "v_scale": 0.04}
    out = run(layer, engine, metadata(engine, num_prefills), kv_cache=(ours := stored.clone()), **given)
    assert called == [*(f"plan_{n}" for n in operators), "reshape_and_cache", *operators]
    monkeypatch.undo()
    expected = run(layer, engine, metadata(engine, num_prefills), kv_cache=(theirs := stored.clone()), **given)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=4e-3)
    assert torch.equal(ours, theirs)


def test_prompts_that_prefill_has_no_room_for(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By JAX's general path."""
    engine = SmallEngine(*MIXED, dtype=BF16, head_size=256)
    cache = (engine.kv_cache.nan_to_num().float() / 0.05).to(torch.float8_e4m3fn).view(torch.uint8)
    layer, given = impl(head_size=256, scale=1 / 16, kv_cache_dtype="fp8"), {"k_scale": 0.05, "v_scale": 0.05}
    out = run(layer, engine, metadata(engine, 3), kv_cache=cache.clone(), **given)
    assert "prefill" not in called
    monkeypatch.undo()
    expected = run(layer, engine, metadata(engine, 3), kv_cache=cache, **given)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize("homo", [{}, {"homo_head_group": True}])
def test_block_sparse_layers(called: list[str], homo: dict[str, bool]) -> None:
    """By JAX's general path."""
    test_flash.test_block_sparse_layers(homo)
    assert called == ["reshape_and_cache"]


def test_block_sparse_prompts_without_tables(called: list[str]) -> None:
    engine = SmallEngine(*PROMPTS, dtype=BF16)
    sparse = {"block_size": 8, "local_blocks": 1, "vert_stride": 4, "homo_head": True}
    out = run(impl(blocksparse_params=sparse), engine, metadata(engine, 3, cached=False))
    engine.check(out, mask_mod=lambda b, h, q, k: ((k // 8 + 1) % 4 == 0) | (k // 8 > q // 8 - 1))
    assert set(called) == {"reshape_and_cache"}


def test_float32_goes_by_jax(called: list[str]) -> None:
    engine = SmallEngine(*MIXED)
    engine.check(run(impl(sliding_window=20), engine, metadata(engine, 3)), window=(19, 0))
    assert called == ["plan_prefill", "plan_decode", "reshape_and_cache", "plan_prefill", "plan_decode"]


def test_what_does_not_fit_is_refused_before_anything_is_written(called: list[str]) -> None:
    engine = SmallEngine(*MIXED, dtype=BF16)
    for cache, error, message in (
        (engine.kv_cache[:, :, :, :1], ValueError, "kv_cache: expected shape"),
        (engine.kv_cache.to(torch.float8_e4m3fn), TypeError, "kv_cache: expected 16 or 32 bits"),
    ):
        with pytest.raises(error, match=message):
            run(impl(), engine, metadata(engine, 3), kv_cache=cache)
