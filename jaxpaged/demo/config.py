"""The demo model's shape, and where its files are."""

import json
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from jaxpaged.demo.text import DOCUMENT_BOUNDARY

WEIGHTS = resources.files("jaxpaged.demo") / "weights"
"""The folder of the shipped files."""


@dataclass(frozen=True)
class DemoConfig:
    """The model's shape, under the names that Hugging Face's Llama configuration uses."""

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 624
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048

    @classmethod
    def from_json(cls, path: str | Path) -> "DemoConfig":
        """Read a ``config.json``; keys that say nothing about the shape are ignored."""
        return cls._from_text(Path(path).read_text(encoding="utf-8"))

    @classmethod
    def shipped(cls) -> "DemoConfig":
        """The shape of the shipped model."""
        return cls._from_text((WEIGHTS / "config.json").read_text(encoding="utf-8"))

    @classmethod
    def _from_text(cls, text: str) -> "DemoConfig":
        values = json.loads(text)
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of a ``config.json`` that ``LlamaForCausalLM`` and vLLM read."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": DOCUMENT_BOUNDARY,
            "eos_token_id": DOCUMENT_BOUNDARY,
            "torch_dtype": "bfloat16",
        }
