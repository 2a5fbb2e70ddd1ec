"""The exported demo model: its files, and that Hugging Face's classes read them as the demo does."""

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from jaxpaged.demo.config import DemoConfig
from jaxpaged.demo.export import export_model
from jaxpaged.demo.text import decode, encode

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
TEXTS = ["def f(x):\n    return x  # naïve → ok\n", "", "a b\t\x7f\u0100Ā\r\n", "first\0second"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(tmp_path_factory.mktemp("models") / "demo" / "hf")


def test_files_are_the_shipped_model(folder: Path) -> None:
    weights = resources.files("jaxpaged.demo") / "weights"
    assert {path.name for path in folder.iterdir()} == FILES
    assert (folder / "model.safetensors").read_bytes() == (weights / "model.safetensors").read_bytes()
    assert json.loads((folder / "config.json").read_text()) == json.loads((weights / "config.json").read_text())
    assert DemoConfig.from_json(folder / "config.json") == DemoConfig.shipped()


def test_exporting_again_replaces_the_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("old")
    export_model(str(tmp_path))
    assert (tmp_path / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(NotADirectoryError, match="directory: expected a directory"):
        export_model(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


def test_export_imports_neither_torch_nor_transformers() -> None:
    program = "import sys, jaxpaged.demo.export; print({'torch', 'transformers'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_every_byte_has_a_character_of_its_own(folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert {byte: vocabulary[character] for byte, character in ((0x41, "A"), (0x20, "Ġ"), (0x0A, "Ċ"), (0, "\0"))} == {
        0x41: 0x41, 0x20: 0x20, 0x0A: 0x0A, 0: 0,
    }  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_encodes_and_decodes_as_the_demo(folder: Path, text: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the tokenizer's reader")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = encode(text)
    assert tokenizer(text)["input_ids"] == tokens
    assert tokenizer.decode(tokens[1:], skip_special_tokens=False) == text
    assert tokenizer.decode(tokens, skip_special_tokens=True).startswith(decode(tokens))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 0, 256)
