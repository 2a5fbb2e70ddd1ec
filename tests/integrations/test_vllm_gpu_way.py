"""vLLM's attention layers on their way to the kernels, over tensors of the CPU."""

import pytest
import test_vllm
import torch
from gpu_way import take_the_way_of_a_gpu
from small_engine import SmallEngine, assert_close
from test_vllm import MIXED, OPTIONS, layer
from vllm_batch import LAYOUTS, Batch, module

from jaxpaged.backends import cache_functions, gpu_plan
from jaxpaged.bridge.decode_shapes import ScoreOptions
from jaxpaged.bridge.prefill_shapes import prefill_shapes
from jaxpaged.integrations.vllm import layer as vllm_layer
from jaxpaged.integrations.vllm.metadata import JaxpagedMetadata

BF16 = torch.bfloat16
DECODES = ([1, 1, 1], [50, 17, 1])


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return take_the_way_of_a_gpu(monkeypatch, cache_functions, gpu_plan, vllm_layer)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_mixed_batch_in_both_layouts(called: list[str], name: str, layout: str) -> None:
    ours, oracles = OPTIONS[name]
    batch = Batch(SmallEngine(*MIXED, dtype=BF16), layout)
    out = batch.run(layer(**ours))
    assert out is batch.output
    batch.check(out, **oracles)
    assert called == ["reshape_and_cache", "plan_prefill", "prefill"]


def test_layers_share_the_plan_of_a_step_and_other_groups_of_caches_do_not(called: list[str]) -> None:
    batch = Batch(SmallEngine(*DECODES, dtype=BF16))
    meta = JaxpagedMetadata.of(batch.common())
    first = batch.run(layer(), metadata=meta).clone()
    assert called == ["reshape_and_cache", "plan_decode", "decode"]
    called.clear()
    assert torch.equal(batch.run(layer(), metadata=meta)[:3], first[:3])
    assert called == ["reshape_and_cache", "decode"]
    called.clear()
    moved = meta.with_blocks(batch.engine.table.clone(), batch.slots)
    assert torch.equal(batch.run(layer(), metadata=moved)[:3], first[:3])
    assert called == ["reshape_and_cache", "plan_decode", "decode"]


@pytest.mark.parametrize("window", [None, 20])
def test_some_requests_are_causal_and_some_are_not(called: list[str], window: int | None) -> None:
    """By JAX's general path."""
    test_vllm.test_some_requests_are_causal_and_some_are_not(window)
    assert set(called) == {"reshape_and_cache"}


@pytest.mark.parametrize("attn_type", ["encoder_only", "encoder"])
def test_an_encoder_attends_to_the_calls_keys_and_keeps_nothing(called: list[str], attn_type: str) -> None:
    batch = Batch(SmallEngine([7, 1, 30], [7, 1, 30], dtype=BF16))
    batch.kv_cache = torch.tensor([])
    meta = JaxpagedMetadata.of(batch.common(causal=False))
    out = batch.run(layer(attn_type=attn_type, sliding_window=9), metadata=meta)
    assert_close(batch.actual(out), batch.engine.expected(causal=False, window=(8, 8)))
    with pytest.raises(ValueError, match="key, value: expected an encoder's keys and values, got None"):
        batch.run(layer(attn_type=attn_type), metadata=meta, key=None, value=None)


@pytest.mark.parametrize(("longest", "operator"), [(1, "decode"), (9, "prefill")])
@pytest.mark.parametrize("per_head", [False, True])
def test_8_bit_caches_are_attended_to(
    called: list[str], monkeypatch: pytest.MonkeyPatch, per_head: bool, longest: int, operator: str
) -> None:
    scales = module([0.05, 0.04], [0.02, 0.03]) if per_head else module(0.05, 0.02)
    torch.manual_seed(2)
    attention = layer(kv_cache_dtype="fp8", head_size=64, scale=64**-0.5)
    cache = torch.randn(8, 16, 2, 128).to(torch.float8_e4m3fn).view(torch.uint8).transpose(1, 2)
    n = longest + 2
    states = [torch.randn(n, heads, 64).to(BF16) for heads in (4, 2, 2)]
    starts = torch.tensor([0, longest, longest + 1, n], dtype=torch.int32)
    meta = JaxpagedMetadata(
        n, starts, torch.tensor([20, 16, 1], dtype=torch.int32),
        torch.tensor([[1, 2], [3, -1], [4, -1]], dtype=torch.int32),
        torch.tensor([*range(36 - longest, 36), 63, 64]), True, longest,
    )  # fmt: skip

    def run(kv_cache: torch.Tensor) -> torch.Tensor:
        attention.do_kv_cache_update(scales, *states[1:], kv_cache, meta.slot_mapping)
        return attention.forward(scales, *states, kv_cache, meta, torch.zeros(n, 4, 64, dtype=BF16))

    ours, theirs = cache.clone(), cache.clone()
    out = run(ours)
    assert called == ["reshape_and_cache", f"plan_{operator}", operator]
    monkeypatch.undo()
    torch.testing.assert_close(out, run(theirs), rtol=1e-2, atol=4e-3)
    assert torch.equal(ours, theirs)


def test_outputs_of_two_axes_and_of_8_bits(called: list[str]) -> None:
    batch = Batch(SmallEngine(*MIXED, dtype=BF16))
    plain = batch.run(layer()).clone()
    n = int(batch.engine.starts[-1])
    flat = torch.full((len(plain), 128), 7.0, dtype=BF16)
    assert torch.equal(batch.run(layer(), output=flat)[:n], plain[:n].flatten(1))
    assert (flat[n:] == 7).all()
    scale = torch.tensor([0.05])
    stored = torch.zeros(plain.shape).to(torch.float8_e4m3fn)
    batch.run(layer(), output=stored, output_scale=scale)
    torch.testing.assert_close(stored[:n].float() * scale, plain[:n].float(), rtol=0.1, atol=0.01)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "float32"),
        ({"head_size": 512}, "head_size 512"),
        ({"kv_cache_dtype": "fp8"}, None),
        ({"kv_cache_dtype": "fp8_e5m2", "head_size": 192, "dtype": torch.float16}, None),
        ({"kv_cache_dtype": "fp8", "head_size": 256}, "kv_cache_dtype fp8 not supported on a GPU with head_size 256"),
        ({"kv_cache_dtype": "fp8_e4m3", "head_size": 80}, "kv_cache_dtype fp8_e4m3 not supported on a GPU"),
        ({"block_size": 12}, "block_size 12"),
    ],
)
def test_what_is_refused_when_a_model_is_loaded(change: dict[str, object], match: str | None) -> None:
    given = {"head_size": 128, "dtype": BF16, "kv_cache_dtype": "auto", "block_size": 16} | change
    reason = vllm_layer.gpu_refusal(**given)
    assert reason is None if match is None else match in reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_sizes_of_8_bit_caches_are_those_that_prompts_can_attend_to(dtype: torch.dtype) -> None:
    taken = []
    for size in vllm_layer.HEAD_SIZES:
        query, table = torch.empty(64, 4, size, dtype=dtype), torch.empty(2, 8, dtype=torch.int32)
        caches = [torch.empty(8, 16, 2, size, dtype=torch.float8_e4m3fn) for _ in range(2)]
        try:
            prefill_shapes(query, *caches, table, False, ScoreOptions(1.0, True, -1, -1, 0.0))
        except NotImplementedError:
            continue
        taken.append(size)
    assert tuple(taken) == vllm_layer.FLOAT8_HEAD_SIZES


def test_a_profiling_run_gives_zeros(called: list[str]) -> None:
    batch = Batch(SmallEngine(*MIXED, dtype=BF16))
    meta = JaxpagedMetadata.of(batch.common())
    out = layer().forward(module(), batch.query, batch.key, batch.value, batch.kv_cache, None, batch.output)
    assert not out.any()
    assert meta.max_query_len == 40


def test_float32_goes_by_jax(called: list[str]) -> None:
    batch = Batch(SmallEngine(*MIXED))
    batch.check(batch.run(layer()))
    assert not set(called) & {"decode", "prefill"}
