"""Logits on transformers' continuous batching: in float32 those of its own attention, in bfloat16 as near to them.

On a GPU all families are run, with CUDA graphs and without.
"""

import copy
import functools

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the engine, of the extra jaxpaged[transformers]")

from forced_logits import forced_logits, relative_error  # noqa: E402
from transformers_decode import TOLERANCE, decode_rate  # noqa: E402
from transformers_families import FAMILIES, generate, model_of, prompts  # noqa: E402

from jaxpaged.integrations import transformers as integration  # noqa: E402

EAGER = "paged|eager"


@pytest.fixture(autouse=True)
def registered():
    integration.register()


@functools.cache
def logits(name: str, implementation: str, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    model = copy.deepcopy(model_of(name)).to(device=device, dtype=dtype)
    # Blocks of one size on every device: the prefixes that requests share, and so the steps, depend on it.
    return forced_logits(model, implementation, prompts(), 6, block_size=32, num_blocks=256, max_batch_tokens=32)


def error_in_bfloat16(name: str) -> float:
    """Of transformers' own attention. It has no soft cap: its error then is of a model without one."""
    return relative_error(logits(name, EAGER, torch.bfloat16), logits(name, EAGER, torch.float32))


def test_float32_logits_are_those_of_transformers() -> None:
    ours, theirs = (logits("llama", name, torch.float32) for name in (integration.NAME, EAGER))
    assert ours.shape[0] >= 6 * len(prompts())
    assert relative_error(ours, theirs) < 1e-5


def test_a_wrong_option_shows_in_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits("llama", EAGER, torch.float32)

    def wrong(*args, **kwargs):
        return integration.attention_forward(*args, **kwargs | {"scaling": 0.2})

    transformers.AttentionInterface.register("paged|wrong", wrong)
    assert relative_error(logits("llama", "paged|wrong", torch.float32), expected) > 4 * error_in_bfloat16("llama")


def test_bfloat16_logits_are_as_near_as_those_of_transformers() -> None:
    ours = logits("llama", integration.NAME, torch.bfloat16)
    assert relative_error(ours, logits("llama", EAGER, torch.float32)) < TOLERANCE * error_in_bfloat16("llama")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_logits_on_a_gpu(hopper, name: str) -> None:
    expected = logits(name, integration.NAME, torch.float32)
    ours = logits(name, integration.NAME, torch.bfloat16, "cuda")
    assert relative_error(ours, expected) < TOLERANCE * error_in_bfloat16(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_cuda_graphs_give_the_tokens_of_eager_steps(hopper, name: str) -> None:
    """All but the few where padding rounds two near tokens the other way."""
    model = copy.deepcopy(model_of(name)).to(device="cuda", dtype=torch.bfloat16)
    sizes = {"block_size": 32, "num_blocks": 256}
    eager = generate(model, integration.NAME, use_cuda_graph=False, **sizes)
    for graphs in ((False, True), (True, True)):
        tokens = generate(model, integration.NAME, use_cuda_graph=graphs, **sizes)
        assert sum(a == b for a, b in zip(tokens, eager, strict=True)) > 0.6 * len(prompts())


def test_the_rate_of_decode_counts_what_all_requests_did_at_once() -> None:
    assert decode_rate([[0.0, 1.0, 2.0, 3.0, 4.0], [1.5, 2.5, 3.5, 4.5]]) == pytest.approx(5 / 2.5)
    with pytest.raises(ValueError, match="decode at the same time"):
        decode_rate([[0.0, 1.0], [1.5, 2.5]])
