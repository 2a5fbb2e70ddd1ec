"""The small models that vLLM is run with, as Hugging Face directories, and their prompts.

python benchmarks/vllm_models.py DIRECTORY, in an environment with transformers, writes them.
"""

import random
import sys
from pathlib import Path

MODELS = {
    "demo": "the shipped demo model",
    "llama": "Llama, 4 heads on 2",
    "qwen2": "Qwen2, 7 heads on 1, biases",
    "gemma2": "Gemma 2, soft cap 5, window 40 in every second layer",
    "gptoss": "gpt-oss, sinks, window 40 in every second layer, experts",
}
ENCODERS = {"bert": "BERT, an encoder"}
NUM_PROMPTS, MAX_TOKENS = 20, 40
"""And how many tokens answer each."""
SHARED = 70
"""Tokens with which every second prompt begins."""

_DEMO_START = '''import collections
import dataclasses
import os


class Cache:
    """Blocks of keys and values, and who holds them."""

    def __init__(self, num_blocks):
        self.free = list(range(num_blocks))
'''
_DEMO_ENDS = (
    "def main():",
    "class Node:",
    "for i in range(",
    "import sys\n",
    "    return self.",
    "try:\n    ",
    "if __name__ ==",
    "with open(",
    "raise ValueError(",
    "@property\n    def ",
)
_SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    # Of small weights attention is nearly uniform, and faults in it don't show.
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_models(directory: Path) -> None:
    """Write all models under `directory`, random ones in float32 and with fixed seeds."""
    import torch
    import transformers

    from jaxpaged.demo.export import export_model

    export_model(directory / "demo")
    bert = {k: v for k, v in _SIZES.items() if k not in ("num_key_value_heads", "head_dim")} | {"pad_token_id": 0}
    configs = {
        "llama": transformers.LlamaConfig(**_SIZES),
        "qwen2": transformers.Qwen2Config(
            **_SIZES | {"hidden_size": 224, "num_attention_heads": 7, "num_key_value_heads": 1}
        ),
        "gemma2": transformers.Gemma2Config(
            **_SIZES, sliding_window=40, attn_logit_softcapping=5.0, query_pre_attn_scalar=32
        ),
        "gptoss": transformers.GptOssConfig(
            **_SIZES | {"max_position_embeddings": 131072, "intermediate_size": 128},
            sliding_window=40,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        "bert": transformers.BertConfig(**bert),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        kind = transformers.AutoModel if name in ENCODERS else transformers.AutoModelForCausalLM
        model = kind.from_config(config)
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name:
                torch.nn.init.normal_(parameter, std=2.0)
            if name == "gemma2" and "embed_tokens" in parameter_name:
                # Gemma 2 scales embeddings up and shares them with its output: each token would be answered by itself.
                torch.nn.init.normal_(parameter, std=0.01)
        model.save_pretrained(directory / name)


def prompts(model: str) -> list[list[int]]:
    """Token ids of 20 prompts of ragged length, every second one with the same beginning."""
    rng = random.Random(0)
    if model == "demo":
        from jaxpaged.demo.text import encode

        ends = [_DEMO_ENDS[i % len(_DEMO_ENDS)] for i in range(NUM_PROMPTS)]
        starts = [_DEMO_START if i % 2 else f"# {'-' * rng.randrange(90)}\n" for i in range(NUM_PROMPTS)]
        return [list(encode(start + end)) for start, end in zip(starts, ends, strict=True)]
    shared = _tokens(rng, SHARED)
    return [(shared if i % 2 else []) + _tokens(rng, rng.randrange(3, 120)) for i in range(NUM_PROMPTS)]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 256) for _ in range(count)]


if __name__ == "__main__":
    save_models(Path(sys.argv[1]))
