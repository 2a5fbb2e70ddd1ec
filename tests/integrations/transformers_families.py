"""Tiny models of real families with random weights, prompts, and how they are generated from."""

import dataclasses
import functools
import random

import torch
import transformers

from jaxpaged.integrations.transformers import NAME

NEW_TOKENS = 10
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # with smaller weights wrong attention gives the same tokens
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model's architecture and what is special of it.

    Attributes:
      reference: the implementation to compare with; "eager" is outside of continuous batching, one prompt at a time.
      fault: arguments of the attention, made wrong; the tokens must differ then.
    """

    architecture: str
    special: dict
    reference: str = "paged|eager"
    fault: dict = dataclasses.field(default_factory=lambda: {"scaling": 0.02})


ALTERNATING = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": Family("Llama", {}, reference="paged|sdpa"),
    "mistral": Family("Mistral", {"sliding_window": 12}, reference="paged|sdpa"),
    "qwen2": Family("Qwen2", {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1}),
    # No paged attention of transformers' own applies a soft cap.
    "gemma2": Family(
        "Gemma2",
        {"head_dim": 16, "sliding_window": 10, "attn_logit_softcapping": 2.0, "layer_types": ALTERNATING},
        reference="eager",
        fault={"softcap": None},
    ),
    "gemma3": Family("Gemma3", {"head_dim": 16, "sliding_window": 10, "layer_types": ALTERNATING}),
    "gpt_oss": Family(
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ALTERNATING,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,  # of fewer, a rounding may choose others, and with them other logits
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        fault={"s_aux": None},
    ),
    "phi3": Family("Phi3", {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}),
}


@functools.cache
def model_of(name: str):
    family = FAMILIES[name]
    config_name = f"{family.architecture}{'Text' if name == 'gemma3' else ''}Config"
    config = getattr(transformers, config_name)(**SIZES | family.special)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.architecture}ForCausalLM")(config).eval()
    if name == "gpt_oss":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.normal_(2.0, 1.0)
    return model


@functools.cache
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    lengths = [1, 2, 3, 5, 8, 11, 12, 13, 16, 17, 20, 23, 25, 28, 31, 33, 37, 40, 44, 47]
    rng.shuffle(lengths)
    drawn = [[rng.randrange(1, 128) for _ in range(length)] for length in lengths]
    # Some begin alike: transformers finds the blocks of a prefix again.
    return [drawn[0][:8] + tokens[8:] if i % 4 == 0 else tokens for i, tokens in enumerate(drawn)]


def greedy(max_new_tokens: int = NEW_TOKENS):
    return transformers.GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )


def batching(**changes):
    sizes = {"block_size": 4, "num_blocks": 256, "max_batch_tokens": 32}
    return transformers.ContinuousBatchingConfig(**sizes | changes)


def generate(model, implementation: str, **changes) -> list[list[int]]:
    """New tokens of every prompt; all but the first seven arrive when one of those has finished."""
    model.set_attn_implementation(implementation)
    results = {}
    with model.continuous_batching_context_manager(
        generation_config=greedy(), continuous_batching_config=batching(**changes), block=True
    ) as manager:
        numbers = {manager.add_request(prompt): i for i, prompt in enumerate(prompts()[:7])}
        while len(results) < len(prompts()):
            result = manager.get_result(timeout=1)
            if result is None:
                assert manager.is_running(), "the generation thread has died"
                continue
            assert result.error is None, result.error
            results[numbers[result.request_id]] = result.generated_tokens
            if len(numbers) == 7:
                numbers |= {manager.add_request(prompt): 7 + i for i, prompt in enumerate(prompts()[7:])}
    return [results[i] for i in range(len(prompts()))]


@functools.cache
def reference(name: str) -> list[list[int]]:
    model, implementation = model_of(name), FAMILIES[name].reference
    if implementation != "eager":
        return generate(model, implementation)
    model.set_attn_implementation("eager")
    outputs = [model.generate(torch.tensor([p]), generation_config=greedy()) for p in prompts()]
    return [output[0, len(p) :].tolist() for output, p in zip(outputs, prompts(), strict=True)]


def register_instead(function) -> None:
    transformers.AttentionInterface.register(NAME, function)
