"""What the attention of transformers' continuous batching makes of a step: without transformers, against the oracle."""

import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_way import take_the_way_of_a_gpu  # noqa: E402
from transformers_fake_cache import SLIDING, FakeCache, Part, step_arguments  # noqa: E402

from jaxpaged.integrations import transformers as integration  # noqa: E402
from jaxpaged.integrations import transformers_attention  # noqa: E402
from jaxpaged.integrations.transformers_attention import attention_forward  # noqa: E402
from jaxpaged.testing import oracle  # noqa: E402

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 16
PROMPTS = [[Part(0, 0, 5), Part(1, 0, 1), Part(2, 0, 13)], [Part(2, 13, 7), Part(0, 5, 1), Part(1, 1, 1)]]
DECODES = [[Part(0, 6 + i, 1), Part(1, 2 + i, 1), Part(2, 20 + i, 1)] for i in range(9)]
LATER = [[Part(1, 11, 12), Part(0, 15, 3), Part(3, 0, 9)], [Part(1, 23, 1), Part(3, 9, 1)]]


class Requests:
    """All keys and values of requests, by layer, and what attention must give."""

    def __init__(self, cache: FakeCache, seed: int = 0, *, dtype: torch.dtype = torch.float32):
        self.cache, self.dtype = cache, dtype
        self.rng = np.random.default_rng(seed)
        self.history = {}

    def new(self, num_heads: int, num_tokens: int) -> torch.Tensor:
        """[1, num_heads, num_tokens, head_size], strided as models pass it."""
        x = self.rng.standard_normal((1, num_tokens, num_heads, HEAD_SIZE)).astype(np.float32)
        return torch.from_numpy(x).to(self.dtype).transpose(1, 2)

    def run(self, layer: int, parts: list[Part], arguments: dict, padding: int = 0, **options) -> tuple:
        """The result of a layer, [num_tokens, num_heads, head_size], and the oracle's, without padding."""
        num_tokens = sum(part.length for part in parts)
        query, key, value = (self.new(n, num_tokens + padding) for n in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
        module = types.SimpleNamespace(layer_idx=layer)
        out, weights = attention_forward(module, query, key, value, None, cache=self.cache, **arguments, **options)
        assert weights is None
        assert out.shape == (1, num_tokens + padding, NUM_HEADS, HEAD_SIZE)
        assert not out[0, num_tokens:].any()
        return out[0, :num_tokens], self.expected(layer, parts, query, key, value, options)

    def expected(self, layer: int, parts: list[Part], query, key, value, options) -> np.ndarray:
        start, keys, values = 0, [], []
        for part in parts:
            for kind, x in (("key", key), ("value", value)):
                old = self.history.get((layer, part.request, kind), np.zeros((0, NUM_KV_HEADS, HEAD_SIZE)))
                new = x[0, :, start : start + part.length].transpose(0, 1).double().numpy()
                self.history[layer, part.request, kind] = np.concatenate([old[: part.past], new])
            keys.append(self.history[layer, part.request, "key"])
            values.append(self.history[layer, part.request, "value"])
            start += part.length
        window = self.cache.window if self.cache.layer_types[layer] == SLIDING else options.get("sliding_window")
        out, _ = oracle.attention(
            query[0, :, :start].transpose(0, 1).double().numpy(),
            keys,
            values,
            np.array([part.length for part in parts]),
            scale=options.get("scaling"),
            window=None if window is None else (window - 1, 0),
            soft_cap=options.get("softcap"),
            sinks=None if options.get("s_aux") is None else options["s_aux"].double().numpy(),
        )
        return out


def check(result: torch.Tensor, expected: np.ndarray, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(result.double().numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("window", "block_size"), [(None, 4), (10, 4), (4, 16), (7, 5), (1000, 32)])
def test_full_and_rolling_layers_equal_the_oracle(window: int | None, block_size: int) -> None:
    """Prompts, chunks, decodes that go round a rolling cache, and chunks beside decodes."""
    cache = FakeCache(window=window, block_size=block_size)
    requests = Requests(cache)
    addresses = [x.data_ptr() for x in (*cache.key_cache, *cache.value_cache)]
    for parts in [*PROMPTS, *DECODES, *LATER]:
        arguments = step_arguments(cache, parts)
        for layer in cache.layer_index_to_group_indices:
            check(*requests.run(layer, parts, arguments))
    assert [x.data_ptr() for x in (*cache.key_cache, *cache.value_cache)] == addresses
    # Only steps with prompts read rolling caches row by row.
    assert cache.updates == (0 if window is None else len(PROMPTS) + 1)


@pytest.mark.parametrize("block_size", [4, 6])
def test_block_tables_of_transformers_equal_the_oracle(block_size: int) -> None:
    cache = FakeCache(window=None, block_size=block_size)
    requests = Requests(cache)
    for parts in PROMPTS:
        check(*requests.run(0, parts, step_arguments(cache, parts)))
    for parts in DECODES:
        check(*requests.run(0, parts, step_arguments(cache, parts, with_table=True)))


@pytest.mark.parametrize("with_table", [False, True])
def test_padding_for_cuda_graphs_gives_zeros_and_harms_nobody(with_table: bool) -> None:
    cache = FakeCache(window=None if with_table else 10, block_size=4)
    requests = Requests(cache)
    for parts in PROMPTS:
        arguments = step_arguments(cache, parts, padded_to=32)
        for layer in cache.layer_index_to_group_indices:
            check(*requests.run(layer, parts, arguments, padding=32 - sum(part.length for part in parts)))
    for parts in DECODES:
        arguments = step_arguments(cache, parts, padded_to=8, with_table=with_table)
        for layer in cache.layer_index_to_group_indices:
            check(*requests.run(layer, parts, arguments, padding=8 - len(parts)))


def test_options_reach_the_scores() -> None:
    options = {"scaling": 0.7, "softcap": 1.5, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0]), "dropout": 0.0}
    cache = FakeCache(window=10, block_size=4)
    requests = Requests(cache)
    for parts in [*PROMPTS, *DECODES[:4]]:
        arguments = step_arguments(cache, parts)
        for layer in cache.layer_index_to_group_indices:
            result, expected = requests.run(layer, parts, arguments, **options)
            check(result, expected)


def test_a_window_of_a_model_whose_cache_keeps_all_is_applied() -> None:
    cache = FakeCache(window=None, block_size=4)
    requests = Requests(cache)
    for parts in [*PROMPTS, *DECODES[:2]]:
        check(*requests.run(0, parts, step_arguments(cache, parts), sliding_window=3))
    check(*requests.run(0, DECODES[2], step_arguments(cache, DECODES[2], with_table=True), sliding_window=3))


@pytest.mark.parametrize("fault", [{"scaling": 0.3}, {"softcap": 0.5}, {"s_aux": torch.ones(4)}, {"sliding_window": 4}])
def test_a_planted_fault_shows(fault: dict) -> None:
    cache = FakeCache(window=None, block_size=4)
    requests = Requests(cache)
    result, _ = requests.run(0, PROMPTS[0], step_arguments(cache, PROMPTS[0]), **fault)
    sound = Requests(FakeCache(window=None, block_size=4))
    _, expected = sound.run(0, PROMPTS[0], step_arguments(sound.cache, PROMPTS[0]))
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check(result, expected, 1e-3)


def test_bfloat16_caches() -> None:
    cache = FakeCache(window=10, block_size=4, dtype=torch.bfloat16)
    requests = Requests(cache, dtype=torch.bfloat16)
    for parts in [*PROMPTS, *DECODES[:3]]:
        arguments = step_arguments(cache, parts)
        for layer in cache.layer_index_to_group_indices:
            result, expected = requests.run(layer, parts, arguments)
            assert result.dtype == torch.bfloat16
            check(result, expected, 2e-2)


def test_tables_are_made_once_a_step_for_all_layers_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FakeCache(window=10, block_size=4)
    requests = Requests(cache)
    seen, attend = [], transformers_attention.flash_attn_varlen_func

    def spy(q, k, v, *args, **kwargs):
        seen.append((kwargs["block_table"], kwargs["seqused_k"], k.data_ptr(), v.data_ptr()))
        return attend(q, k, v, *args, **kwargs)

    for parts in PROMPTS:
        for layer in (0, 1):
            requests.run(layer, parts, step_arguments(cache, parts))
    monkeypatch.setattr(transformers_attention, "flash_attn_varlen_func", spy)
    for parts in DECODES[:2]:
        arguments = step_arguments(cache, parts)
        for layer in (0, 1, 0, 1):
            requests.run(layer, parts, arguments)
    for first in (0, 1, 4, 5):
        assert seen[first][0] is seen[first + 2][0]
        assert seen[first][1] is seen[first + 2][1]
    assert len({id(table) for table, *_ in seen}) == 4
    assert {at for *_, at, _ in seen} == {cache.key_cache[0].data_ptr()}
    assert {at for *_, at in seen} == {cache.value_cache[0].data_ptr()}


def call(**changes):
    """A call of a first step, and the cache, which must stay as it was if it raises."""
    cache = changes.pop("fake_cache", None) or FakeCache(window=10, block_size=4)
    requests = Requests(cache)
    parts = PROMPTS[0]
    states = {"query": requests.new(NUM_HEADS, 19), "key": requests.new(NUM_KV_HEADS, 19)}
    states["value"] = requests.new(NUM_KV_HEADS, 19)
    module = types.SimpleNamespace(layer_idx=changes.pop("layer_idx", 0), is_causal=changes.pop("module_causal", True))
    arguments = {"attention_mask": None, "cache": cache, **step_arguments(cache, parts), **states, **changes}
    before = cache.key_cache[0].clone()
    try:
        return attention_forward(module, **arguments)
    except (TypeError, ValueError):
        assert torch.equal(cache.key_cache[0].nan_to_num(7.0), before.nan_to_num(7.0))
        raise


def test_the_call_that_the_refusals_change_works() -> None:
    assert call()[0].shape == (1, 19, NUM_HEADS, HEAD_SIZE)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention_mask": torch.zeros(1, 1, 19, 19)}, ValueError, "attention_mask: .*expected None, got Tensor"),
        ({"dropout": 0.1}, ValueError, r"dropout: not supported, expected 0, got 0.1; call model.eval\(\)"),
        ({"output_attentions": True}, ValueError, "output_attentions: not supported"),
        ({"position_bias": torch.zeros(1)}, ValueError, "position_bias: not supported"),
        ({"is_causal": False}, ValueError, "is_causal: .* expected True, got False"),
        ({"module_causal": False}, ValueError, "is_causal: .* expected True, got False"),
        ({"cache": None}, ValueError, "cache: expected that of continuous batching, got None"),
        ({"layer_idx": 2}, ValueError, "module.layer_idx: expected a layer of the cache, got 2"),
        ({"layer_idx": None}, ValueError, "module.layer_idx: expected a layer of the cache, got None"),
        ({"layer_idx": 1, "sliding_window": 9}, ValueError, "sliding_window: expected 10, .* got 9"),
        ({"sliding_window": 0}, ValueError, "sliding_window: expected 1 or more"),
        ({"sliding_window": 4.0}, TypeError, "sliding_window: expected an int or None, got 4.0"),
        ({"read_index": None, "max_seqlen_q": None}, TypeError, "read_index, max_seqlen_q: expected from"),
        ({"query": torch.zeros(19, NUM_HEADS, HEAD_SIZE)}, ValueError, r"query: expected shape \[1, heads, num_tokens"),
        ({"key": torch.zeros(1, 2, 18, HEAD_SIZE)}, ValueError, r"key: expected shape \[1, heads, 19, head_size\]"),
        ({"value": [0.0]}, TypeError, "value: expected a tensor, got list"),
        ({"key": torch.zeros(1, 3, 19, HEAD_SIZE)}, ValueError, "key: expected"),
        ({"value": torch.zeros(1, 2, 19, 8)}, ValueError, "value: expected"),
        ({"query": torch.zeros(1, 4, 19, HEAD_SIZE, requires_grad=True)}, ValueError, "query: it requires grad"),
        ({"scaling": float("nan")}, ValueError, "scal"),
        ({"softcap": -1.0}, ValueError, "softcap: expected a number above 0"),
        ({"s_aux": torch.zeros(3)}, ValueError, "s_aux: expected shape"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_what_cannot_work_is_refused_by_name_before_anything_is_written(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize("layer", [0, 1])
def test_bad_options_are_refused_before_anything_is_written_in_either_kind_of_layer(layer: int) -> None:
    for changes in ({"softcap": -1.0}, {"s_aux": torch.zeros(3)}, {"query": torch.zeros(1, 3, 19, HEAD_SIZE)}):
        with pytest.raises(ValueError):
            call(layer_idx=layer, **changes)


@pytest.mark.parametrize("version", ["5.16.2", "4.57.0"])
def test_an_older_release_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(integration.importlib.metadata, "version", lambda package: version)
    with pytest.raises(ImportError, match=f"expected 5.17, .* got {version}"):
        integration.register()


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tensors of the CPU take a GPU's way, and the operators' CPU implementations stand in. Gives the operators."""
    from jaxpaged.backends import cache_functions, gpu_plan, varlen

    return take_the_way_of_a_gpu(monkeypatch, cache_functions, gpu_plan, transformers_attention, varlen)


@pytest.mark.parametrize(("window", "padded"), [(None, False), (16, False), (16, True), (24, False)])
def test_the_way_of_a_gpu_equals_the_oracle(as_on_gpu: list[str], window: int | None, padded: bool) -> None:
    cache = FakeCache(window=window, block_size=8, dtype=torch.bfloat16)
    requests = Requests(cache, dtype=torch.bfloat16)
    for parts in [*PROMPTS, *DECODES, *LATER]:
        tokens = sum(part.length for part in parts)
        size = max(32, tokens) if padded else tokens
        arguments = step_arguments(cache, parts, padded_to=size if padded else None)
        for layer in cache.layer_index_to_group_indices:
            result, expected = requests.run(layer, parts, arguments, padding=size - tokens)
            check(result, expected, 2e-2)
    assert {"reshape_and_cache", "prefill"} <= set(as_on_gpu)


def test_layers_share_a_plan_on_a_gpu(as_on_gpu: list[str]) -> None:
    cache = FakeCache(window=16, block_size=8, dtype=torch.bfloat16)
    requests = Requests(cache, dtype=torch.bfloat16)
    for parts in PROMPTS:
        for layer in (0, 1):
            requests.run(layer, parts, step_arguments(cache, parts))
    as_on_gpu.clear()
    arguments = step_arguments(cache, DECODES[0])
    for layer in (0, 1, 0, 1):
        requests.run(layer, DECODES[0], arguments)
    first, later = ["plan_decode", "reshape_and_cache", "decode"], ["reshape_and_cache", "decode"]
    assert as_on_gpu == [*first * 2, *later * 2]


@pytest.mark.parametrize("padded", [False, True])
def test_block_tables_of_transformers_on_a_gpu(as_on_gpu: list[str], padded: bool) -> None:
    cache = FakeCache(window=None, block_size=8, dtype=torch.bfloat16)
    requests = Requests(cache, dtype=torch.bfloat16)
    for parts in PROMPTS:
        check(*requests.run(0, parts, step_arguments(cache, parts)), 2e-2)
    as_on_gpu.clear()
    for parts in DECODES:
        arguments = step_arguments(cache, parts, with_table=True, padded_to=8 if padded else None)
        for options in ({}, {"sliding_window": 3}):
            check(*requests.run(0, parts, arguments, padding=8 - len(parts) if padded else 0, **options), 2e-2)
    assert as_on_gpu == ["plan_decode", "reshape_and_cache", "decode"] * 2 * len(DECODES)


@pytest.mark.parametrize("layer", [0, 1])
def test_float32_on_a_gpu_goes_by_jax(as_on_gpu: list[str], layer: int) -> None:
    cache = FakeCache(window=10, block_size=4)
    requests = Requests(cache)
    for parts in (*PROMPTS, *DECODES):
        check(*requests.run(layer, parts, step_arguments(cache, parts)))
    assert "reshape_and_cache" in as_on_gpu and not set(as_on_gpu) & {"decode", "prefill"}
