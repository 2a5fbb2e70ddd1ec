"""The demo model: that its files agree with each other, that it predicts Python, and that it is a Llama."""

import json
import math
import sysconfig
from importlib import resources
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from torch.nn import functional  # noqa: E402

from jaxpaged.demo.config import DemoConfig  # noqa: E402
from jaxpaged.demo.model import DemoModel, dense_attend, load_demo_model  # noqa: E402
from jaxpaged.demo.text import decode, encode  # noqa: E402

WEIGHTS = resources.files("jaxpaged.demo") / "weights"


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return load_demo_model()


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    return safetensors_torch.load((WEIGHTS / "model.safetensors").read_bytes())


def dense_logits(model: DemoModel, tokens: list[int]) -> torch.Tensor:
    """Logits of one request, ``[num_tokens, vocab_size]``."""
    return model(torch.tensor(tokens), torch.arange(len(tokens)), dense_attend())


def expected_names(config: DemoConfig) -> set[str]:
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"]
    parts += ["mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    layers = {f"model.layers.{i}.{part}.weight" for i in range(config.num_hidden_layers) for part in parts}
    return layers | {"model.embed_tokens.weight", "model.norm.weight"}


def test_the_weights_are_small_bfloat16_and_as_recorded(stored: dict[str, torch.Tensor]) -> None:
    training = json.loads((WEIGHTS / "training.json").read_text())
    assert len((WEIGHTS / "model.safetensors").read_bytes()) <= 8_000_000
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in stored.values()) == training["parameters"]
    assert 3_500_000 <= training["parameters"] <= 3_950_000
    assert "PSF-2.0" in (WEIGHTS / "LICENSE.md").read_text()


def test_names_are_those_of_hugging_face(model: DemoModel, stored: dict[str, torch.Tensor]) -> None:
    assert set(stored) == expected_names(model.config)
    assert set(model.state_dict()) == set(stored)


def test_the_configuration_describes_the_weights(stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    text = (WEIGHTS / "config.json").read_text()
    (tmp_path / "config.json").write_text(text)
    config = DemoConfig.from_json(tmp_path / "config.json")
    assert config.to_dict() == json.loads(text)
    assert {name: value.shape for name, value in DemoModel(config).state_dict().items()} == {
        name: value.shape for name, value in stored.items()
    }
    assert config.max_position_embeddings >= 2048


def test_loading_in_another_dtype_keeps_the_values(stored: dict[str, torch.Tensor]) -> None:
    state = load_demo_model(dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("name", ["textwrap.py", "statistics.py"])  # The second was held out from training.
def test_it_predicts_python(model: DemoModel, name: str) -> None:
    data = Path(sysconfig.get_paths()["stdlib"], name).read_bytes()[:2000]
    targets = torch.tensor(list(data))
    logits = dense_logits(model, [0, *data[:-1]])
    assert functional.cross_entropy(logits, targets).item() / math.log(2) < 1.6


def test_a_greedy_completion_is_printable_ascii(model: DemoModel) -> None:
    tokens = encode("def __init__(self, ")
    for _ in range(16):
        tokens.append(int(dense_logits(model, tokens)[-1].argmax()))
    text = decode(tokens)
    assert len(text) == len("def __init__(self, ") + 16
    assert text.isascii()
    assert all(character.isprintable() or character in "\n\t" for character in text)


def test_packed_requests_equal_each_alone(model: DemoModel) -> None:
    requests = [encode("import os\n\n\ndef walk(top):\n"), encode("class Counter(dict):\n    def most_common")]
    lengths = [len(tokens) for tokens in requests]
    one_at_a_time = dense_attend()

    def attend(layer_index: int, *packed: torch.Tensor) -> torch.Tensor:
        query, key, value = (heads.split(lengths) for heads in packed)
        parts = zip(query, key, value, strict=True)
        return torch.cat([one_at_a_time(layer_index, *part) for part in parts])

    positions = torch.cat([torch.arange(length) for length in lengths])
    packed_logits = model(torch.tensor(requests[0] + requests[1]), positions, attend)
    assert packed_logits.dtype == torch.float32
    for tokens, logits in zip(requests, packed_logits.split(lengths), strict=True):
        torch.testing.assert_close(logits, dense_logits(model, tokens), rtol=1e-4, atol=1e-4)


def test_sequences_side_by_side_equal_each_alone(model: DemoModel) -> None:
    first, second = encode("import sys\n"), encode("return 1.0\n")
    tokens = torch.tensor(first + second)
    logits = model(tokens, torch.arange(len(first)).repeat(2), dense_attend(2))
    alone = torch.cat((dense_logits(model, first), dense_logits(model, second)))
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


def test_encode_and_decode_are_inverse() -> None:
    text = "naïve = '→'\n"
    assert encode(text)[0] == 0
    assert decode(encode(text)) == text
    assert decode(encode(text)[1:]) == text
    assert decode([*encode("done"), 0, *encode("next")]) == "done"
    assert decode("→".encode()[:2]) == "\ufffd"
    assert decode([]) == ""


def test_logits_equal_those_of_hugging_face(model: DemoModel) -> None:
    transformers = pytest.importorskip("transformers")
    with resources.as_file(WEIGHTS) as folder:
        reference = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = encode("def quicksort(items):\n    if len(items) <= 1:\n        return items\n" * 4)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(dense_logits(model, tokens), expected, rtol=1e-4, atol=1e-4)
