"""Models of real families on transformers' continuous batching: jaxpaged says what transformers' own attention says."""

import collections
import itertools
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the engine, of the extra jaxpaged[transformers]")

from transformers_families import FAMILIES, SIZES, batching, generate, model_of, reference, register_instead  # noqa: E402

from jaxpaged.demo.engine import Engine  # noqa: E402
from jaxpaged.demo.export import export_model  # noqa: E402
from jaxpaged.demo.model import load_demo_model  # noqa: E402
from jaxpaged.demo.scheduler import Request  # noqa: E402
from jaxpaged.demo.text import DOCUMENT_BOUNDARY, decode, encode  # noqa: E402
from jaxpaged.integrations import transformers as integration  # noqa: E402
from jaxpaged.integrations import transformers_decode_path  # noqa: E402

DEMO_PROMPTS = [
    "import os\n\n\ndef walk(top):\n",
    'class Stack:\n    """A stack of items."""\n\n    def __init__(self):\n',
    "def main(argv=None):\n    import argparse\n    parser = argparse.ArgumentParser(",
]


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    yield
    integration.register()


class Recorder:
    """attention_forward, and what it was called with: calls by layer, the lists that steps are told apart by, kinds."""

    def __init__(self):
        self.calls, self.steps, self.kinds = collections.Counter(), [], collections.Counter()
        self.cache = None

    def __call__(self, module, query, *args, **kwargs):
        self.calls[module.layer_idx] += 1
        assert torch.is_grad_enabled() is False
        self.cache = kwargs["cache"]
        if module.layer_idx == 0:
            self.steps.append(kwargs["read_index"])
            past = kwargs["read_index"][0].numel() > 0
            lens = kwargs["cu_seq_lens_q"].diff()
            kind = "table" if kwargs["block_table"] is not None else "decode" if int(lens.max()) == 1 else "mixed"
            self.kinds[kind if past or kind == "table" else "first"] += 1
        else:
            assert kwargs["read_index"] is self.steps[-1]
        return integration.attention_forward(module, query, *args, **kwargs)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_those_of_transformers_own_attention(name: str) -> None:
    recorder = Recorder()
    register_instead(recorder)
    assert generate(model_of(name), integration.NAME) == reference(name)
    steps = len(recorder.steps)
    assert recorder.calls == {layer: steps for layer in range(model_of(name).config.num_hidden_layers)}
    assert min(recorder.kinds[kind] for kind in ("first", "mixed", "decode")) > 0
    # A plan is found again by its step's list: every step has to have its own.
    assert len({id(step) for step in recorder.steps}) == steps
    if recorder.cache.use_prefix_sharing:
        assert recorder.cache._total_prefix_length > 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_wrong_option_gives_other_tokens(name: str) -> None:
    """The comparison would notice: what is special of a family matters to its tokens."""

    def wrong(*args, **kwargs):
        return integration.attention_forward(*args, **kwargs | FAMILIES[name].fault)

    register_instead(wrong)
    assert generate(model_of(name), integration.NAME) != reference(name)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_attention_that_ignores_the_cached_context_gives_other_tokens(name: str) -> None:
    def forgetful(module, query, key, value, attention_mask, *, scaling, cu_seq_lens_q, **kwargs):
        out = torch.zeros(query.shape[2], query.shape[1], query.shape[3])
        for start, end in itertools.pairwise(cu_seq_lens_q.tolist()):
            new = (x[:, :, start:end] for x in (query, key, value))
            seen = torch.nn.functional.scaled_dot_product_attention(
                *new, scale=scaling, is_causal=True, enable_gqa=True
            )
            out[start:end] = seen[0].transpose(0, 1)
        return out.unsqueeze(0), None

    register_instead(forgetful)
    tokens = generate(model_of(name), integration.NAME)
    assert sum(ours != theirs for ours, theirs in zip(tokens, reference(name), strict=True)) >= 15


def test_windows_matter_to_the_tokens() -> None:
    config = transformers.MistralConfig(**SIZES | {"sliding_window": None})
    torch.manual_seed(0)
    assert generate(transformers.MistralForCausalLM(config).eval(), "paged|sdpa") != reference("mistral")


@pytest.mark.parametrize("block_size", [5, 256])
def test_other_block_sizes(block_size: int) -> None:
    assert generate(model_of("gemma3"), integration.NAME, block_size=block_size, num_blocks=128) == reference("gemma3")


def test_a_small_cache_sends_requests_away_and_takes_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    sent_away, offload = [], OffloadingManager.offload_requests

    def counted(self):
        sent_away.append(offload(self))
        return sent_away[-1]

    monkeypatch.setattr(OffloadingManager, "offload_requests", counted)
    assert generate(model_of("llama"), integration.NAME, num_blocks=24) == reference("llama")
    assert sum(sent_away) > 0


def test_block_tables_and_padding_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers does only on CUDA, on the CPU: its decode path, and the padding of steps for CUDA graphs."""
    from transformers.generation.continuous_batching import initialization, model_runner

    expected = reference("llama")  # before anything is changed, as it is kept
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)
    made = model_runner.ModelRunner.__init__

    def with_padding(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.pad_inputs = True

    for padded in (False, True):
        if padded:
            monkeypatch.setattr(model_runner.ModelRunner, "__init__", with_padding)
        recorder = Recorder()
        register_instead(recorder)
        assert generate(model_of("llama"), integration.NAME) == expected
        assert recorder.kinds["table"] > 5


def test_on_cuda_continuous_batching_is_to_take_it_for_flash_attention() -> None:
    from transformers.generation.continuous_batching import cache, initialization

    for name, expected in ((integration.NAME, True), ("paged|sdpa", False), ("paged|flash_attention_2", True)):
        config = transformers.LlamaConfig(attn_implementation=name)
        for module in (cache, initialization):
            assert module.is_flash_attention_requested(config) is expected
            assert module.is_flash_attention_requested(config, version=[2, 3]) is expected
    found = initialization.lazy_import_paged_flash_attention(integration.NAME)
    assert found == (integration.flash_attn_varlen_func, integration.flash_attn_with_kvcache)


def test_registering_again_wraps_nothing_twice() -> None:
    from transformers.generation.continuous_batching import initialization

    functions = (initialization.is_flash_attention_requested, initialization.lazy_import_paged_flash_attention)
    assert integration.register() == "paged|jaxpaged"
    assert functions == (
        initialization.is_flash_attention_requested,
        initialization.lazy_import_paged_flash_attention,
    )
    assert transformers.AttentionInterface()[integration.NAME] is integration.attention_forward


def test_a_change_of_what_is_private_to_transformers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching import initialization

    monkeypatch.delattr(initialization, "lazy_import_paged_flash_attention")
    with pytest.raises(ImportError, match=r"initialization has no lazy_import_paged_flash_attention"):
        transformers_decode_path.offer_block_tables(integration.NAME, (None, None))


def test_a_newer_release_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.register()
    monkeypatch.setattr(integration.importlib.metadata, "version", lambda package: "5.18.0.dev0")
    with pytest.warns(RuntimeWarning, match=r"written for 5.17 and never tested with 5.18.0.dev0"):
        integration.register()


def test_the_demo_model_says_what_it_says_in_its_own_engine(tmp_path) -> None:
    own = Engine(load_demo_model(), max_step_tokens=48)
    requests = [Request(text, encode(text), 40, stop_token=DOCUMENT_BOUNDARY) for text in DEMO_PROMPTS]
    for request in requests:
        own.add(request)
    collections.deque(own.run(), maxlen=0)
    model = transformers.LlamaForCausalLM.from_pretrained(export_model(tmp_path), dtype=torch.float32)
    recorder = Recorder()
    register_instead(recorder)
    model.set_attn_implementation(integration.NAME)
    results = model.generate_batch(
        [request.prompt for request in requests],
        generation_config=transformers.GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=0),
        continuous_batching_config=batching(block_size=16, max_batch_tokens=48),
    )
    said = {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}
    assert [said[tuple(request.prompt)] for request in requests] == [request.generated for request in requests]
    assert len(set(recorder.calls.values())) == 1
    assert set(recorder.calls) == set(range(6))
    texts = [decode(request.generated) for request in requests]
    assert all(text.isascii() for text in texts)
    assert len(set(texts)) == len(texts)


def test_a_model_outside_of_continuous_batching_says_what_to_do() -> None:
    model = model_of("llama")
    model.set_attn_implementation(integration.NAME)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="cache: expected that of continuous batching, got None; call"),
    ):
        model(torch.tensor([[1, 2, 3]]))
