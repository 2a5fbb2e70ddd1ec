"""The demo model as a directory that Hugging Face transformers and vLLM load."""

import json
from pathlib import Path
from typing import Any

from jaxpaged.demo.config import WEIGHTS, DemoConfig
from jaxpaged.demo.text import DOCUMENT_BOUNDARY

_BOUNDARY = chr(DOCUMENT_BOUNDARY)


def export_model(directory: str | Path) -> Path:
    """Write the demo model as a Hugging Face directory, a ``LlamaForCausalLM`` with its byte-level tokenizer.

    The files are ``config.json``, ``generation_config.json``, ``model.safetensors`` (the shipped bfloat16 weights, byte
    for byte; pass ``dtype=torch.float32`` to the loader for others), ``tokenizer.json`` and ``tokenizer_config.json``.
    Neither transformers nor torch is needed. Prompts get the document boundary in front, as `jaxpaged.demo.text.encode`
    puts it there, and generation stops at one.

    Args:
      directory: made if it is missing; files of these names are replaced.

    Returns:
      The directory.

    Raises:
      NotADirectoryError: there is a file of that name.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"directory: expected a directory or a new path, got the file {directory}")
    directory.mkdir(parents=True, exist_ok=True)
    config = DemoConfig.shipped()
    for name, contents in (
        ("config.json", config.to_dict()),
        ("generation_config.json", {"bos_token_id": DOCUMENT_BOUNDARY, "eos_token_id": DOCUMENT_BOUNDARY}),
        ("tokenizer.json", _tokenizer()),
        ("tokenizer_config.json", _tokenizer_config(config)),
    ):
        (directory / name).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    (directory / "model.safetensors").write_bytes((WEIGHTS / "model.safetensors").read_bytes())
    return directory


def _tokenizer() -> dict[str, Any]:
    """A BPE without merges: each byte is the token of its value, and the document boundary comes first."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    boundary = {"SpecialToken": {"id": _BOUNDARY, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    more_text = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_boundary()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [boundary, text],
            "pair": [boundary, text, boundary, more_text],
            "special_tokens": {_BOUNDARY: {"id": _BOUNDARY, "ids": [DOCUMENT_BOUNDARY], "tokens": [_BOUNDARY]}},
        },
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _tokenizer_config(config: DemoConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BOUNDARY,
        "eos_token": _BOUNDARY,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }


def _added_boundary() -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": DOCUMENT_BOUNDARY, "content": _BOUNDARY, **flags, "special": True}


def _byte_characters() -> list[str]:
    """What byte-level tokenizers write for each byte, since GPT-2: itself where it can be seen, else one from 256 on.

    The document boundary, which is no byte of any text, is written as itself.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(256 + i) for i, byte in enumerate(hidden)} | {byte: chr(byte) for byte in visible}
    characters[DOCUMENT_BOUNDARY] = _BOUNDARY
    return [characters[byte] for byte in range(256)]
