"""vLLM's FlexAttention backend on its way to the kernels, over tensors of the CPU."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import test_flex
import torch
from gpu_way import take_the_way_of_a_gpu
from instances import layer_scales
from small_engine import TOLERANCE, SmallEngine, assert_close
from test_flex import MIXED, OPTIONS, SLOPES, built, impl, run

from jaxpaged.backends import cache_functions, flex, flex_masks, gpu_plan, outputs

BF16 = torch.bfloat16
DECODES = ([1, 1, 1], [40, 3, 61])


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return take_the_way_of_a_gpu(monkeypatch, cache_functions, flex, flex_masks, gpu_plan, outputs)


def small(lens: object = MIXED) -> SmallEngine:
    return SmallEngine(*lens, dtype=BF16, garbage=0)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("lens", "operator"), [(MIXED, "prefill"), (DECODES, "decode")], ids=["mixed", "decodes"])
def test_batches_with_padding(called: list[str], name: str, lens: object, operator: str) -> None:
    ours, oracles = OPTIONS[name]
    engine = small(lens)
    meta = built(engine)
    out = run(impl(**ours), engine, meta, padding=6)
    engine.check(out, **oracles)
    assert called == [f"plan_{operator}", "reshape_and_cache", operator]
    called.clear()
    assert torch.equal(run(impl(**ours), engine, meta, padding=6), out)  # another layer: by the same plan
    assert called == ["reshape_and_cache", operator]


def test_a_batch_with_other_blocks_is_planned_anew(called: list[str]) -> None:
    engine = small(DECODES)
    meta = built(engine)
    run(impl(), engine, meta)
    meta.block_table = meta.block_table.clone()
    engine.check(run(impl(), engine, meta))
    assert called.count("plan_decode") == 2


def test_outputs_of_other_strides_and_in_8_bits(called: list[str]) -> None:
    engine = small()
    shape = (len(engine.query), 4, 32)
    strided = torch.zeros(shape[0], 4, 64, dtype=BF16)[..., ::2]
    assert run(impl(), engine, built(engine), output=strided) is not None
    assert_close(strided, engine.expected(), TOLERANCE[BF16])
    eight, scale = torch.zeros(shape[0], 4 * 32, dtype=torch.float8_e4m3fn), torch.tensor(0.02)
    x = [getattr(engine, name).view(-1, h, 32) for name, h in (("query", 4), ("key", 2), ("value", 2))]
    impl().forward(layer_scales(), *x, engine.kv_cache, built(engine), eight, scale)
    assert_close(eight.float().view(shape) * 0.02, engine.expected(), 0.05)


def test_8_bit_caches_with_scales(called: list[str]) -> None:
    engine = SmallEngine(*DECODES, dtype=BF16, garbage=0, head_size=64)
    stored = torch.float8_e4m3fn
    cache = torch.stack([engine.kv_cache[0].float() / 0.05, engine.kv_cache[1].float() / 0.02]).to(stored)
    x = [getattr(engine, name).view(-1, h, 64) for name, h in (("query", 4), ("key", 2), ("value", 2))]
    out = impl(kv_cache_dtype="fp8", head_size=64, scale=64**-0.5).forward(
        layer_scales(0.05, 0.02), *x, cache.view(torch.uint8), built(engine), output=torch.empty_like(x[0])
    )
    engine.keys = [((x.float() / 0.05).to(stored).float() * 0.05).double() for x in engine.keys]
    engine.values = [((x.float() / 0.02).to(stored).float() * 0.02).double() for x in engine.values]
    assert_close(out, engine.expected(), TOLERANCE[BF16])
    assert called == ["plan_decode", "reshape_and_cache", "decode"]


def test_a_layer_that_shares_anothers_cache_writes_nothing(called: list[str]) -> None:
    engine = small()
    engine.kv_cache.copy_(engine.written().view(BF16))
    before = engine.bits()
    out = run(impl(kv_sharing_target_layer_name="layers.0"), engine, built(engine), key=None, value=None)
    assert_close(out, engine.expected(), TOLERANCE[BF16])
    assert torch.equal(engine.bits(), before)
    assert called == ["plan_prefill", "prefill"]


def test_encoders_see_both_sides(called: list[str]) -> None:
    engine = small(([7, 1, 30], [7, 1, 30]))
    engine.check(run(impl(attn_type="encoder_only"), engine, built(engine)), causal=False)


REPLACED: dict[str, Callable[[], None]] = {
    "a logical mask": functools.partial(test_flex.test_a_logical_mask_takes_effect, test_flex.prefix_lm, False),
    "a logical mask for JAX": functools.partial(
        test_flex.test_a_logical_mask_takes_effect,
        lambda b, h, q, kv: (kv <= q) | jnp.logical_and(kv < 12, h != 1),
        True,
    ),
    "with a window": test_flex.test_a_logical_mask_goes_with_a_layers_window,
    "scores": test_flex.test_a_score_function_takes_effect,
    "a mask": test_flex.test_a_mask_function_takes_effect,
    "other requests": test_flex.test_a_mask_function_may_reach_other_requests,
    "a block mask": functools.partial(test_flex.test_a_block_mask_takes_effect, BF16),
    "new functions": test_flex.test_steps_with_new_functions_compile_nothing_anew,
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_users_replace_takes_effect(called: list[str], name: str) -> None:
    """By JAX's general path, which writes by the operator."""
    REPLACED[name]()
    assert "reshape_and_cache" in called
    assert set(called) == {"reshape_and_cache"} | ({"plan_prefill", "prefill"} if name == "a block mask" else set())


def test_replaced_functions_over_8_bit_caches_with_slopes(called: list[str]) -> None:
    engine = SmallEngine(*MIXED, dtype=BF16, garbage=0)
    stored = torch.float8_e4m3fn
    cache = torch.stack([engine.kv_cache[0].float() / 0.05, engine.kv_cache[1].float() / 0.02]).to(stored)
    x = [getattr(engine, name).view(-1, h, 32) for name, h in (("query", 4), ("key", 2), ("value", 2))]
    meta = built(engine)
    meta.logical_mask_mod = test_flex.prefix_lm
    layer = impl(kv_cache_dtype="fp8", alibi_slopes=SLOPES)
    out = layer.forward(layer_scales(0.05, 0.02), *x, cache.view(torch.uint8), meta, output=torch.empty_like(x[0]))
    engine.keys = [((x.float() / 0.05).to(stored).float() * 0.05).double() for x in engine.keys]
    engine.values = [((x.float() / 0.02).to(stored).float() * 0.02).double() for x in engine.values]

    def bias(score: Any, b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
        return score - np.array(SLOPES)[h] * np.abs(kv_pos - q_pos)

    expected = engine.expected(causal=False, mask_mod=test_flex.same_in_numpy, score_mod=bias)
    assert_close(out, expected, TOLERANCE[BF16])


@pytest.mark.parametrize("field", ["logical_mask_mod", "score_mod"])
def test_functions_that_do_not_fit_are_refused_before_anything_is_written(called: list[str], field: str) -> None:
    engine = small()
    meta = built(engine)
    setattr(meta, field, lambda *x: "no")
    with pytest.raises(TypeError, match=f"^{field}: expected a function of PyTorch or of JAX"):
        run(impl(), engine, meta)
    assert torch.equal(engine.bits(), engine.before)
    assert called == []


def test_maps_of_a_gpu_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.tensor([[3, 0, 5, 3, 99], [-1, 7, 7, 2, 0], [0, 0, 0, 0, 0]], dtype=torch.int32)
    offsets = torch.tensor([2, 5, 5, 9], dtype=torch.int32)
    maps = [flex_masks.physical_to_logical_mapping(table, n) for n in (9, 100, None)]
    documents = flex_masks.offsets_to_doc_ids(offsets)
    take_the_way_of_a_gpu(monkeypatch, flex_masks)
    for expected, n in zip(maps, (9, 100, None), strict=True):
        got = flex_masks.physical_to_logical_mapping(table, n)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    got = flex_masks.offsets_to_doc_ids(offsets)
    assert (got.dtype, got.tolist()) == (documents.dtype, documents.tolist())
