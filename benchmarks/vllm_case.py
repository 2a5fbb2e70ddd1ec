"""One run of vLLM in a process of its own: a model, an attention backend, and what came out of it.

python benchmarks/vllm_case.py CASE RESULT: the arguments of `run` as JSON, and the file for what it returns.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm_models import ENCODERS, MAX_TOKENS, prompts

BLOCK_SIZE = 32
NUM_BLOCKS = 24
"""Too few for all requests at once: 20 prompts with their answers need more than 60."""
MAX_BATCHED_TOKENS = 48
"""Fewer than most prompts have, so they come in chunks, beside decodes."""


def run(models: str, model: str, backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run a model on all prompts, an encoder for embeddings and any other for tokens.

    Args:
      models: the directory that `vllm_models.py` has written.
      options: further arguments of `vllm.LLM`.
    """
    from vllm import LLM
    from vllm.inputs import TokensPrompt

    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 1 << 28,
        "disable_log_stats": False,
        "worker_extension_cls": "vllm_worker.Counts",
        "tokenizer": str(Path(models) / "demo"),
    }
    if model not in ENCODERS:
        arguments |= {
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": NUM_BLOCKS,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "max_num_seqs": 16,
            "enable_prefix_caching": True,
        }
    llm = LLM(str(Path(models) / model), attention_backend=backend, **arguments | options)
    asked = [TokensPrompt(prompt_token_ids=ids) for ids in prompts(model)]
    start = time.perf_counter()
    found = _embeddings(llm, asked) if model in ENCODERS else _tokens(llm, asked)
    return found | {
        "seconds": time.perf_counter() - start,
        "pid": os.getpid(),
        "workers": llm.collective_rpc("attention_calls"),
        "preemptions": _metric(llm, "vllm:num_preemptions"),
        "prefix_hits": _metric(llm, "vllm:prefix_cache_hits"),
    }


def _tokens(llm: Any, asked: list[Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, detokenize=False, ignore_eos=True)
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}


def _embeddings(llm: Any, asked: list[Any]) -> dict[str, Any]:
    return {"embeddings": [list(output.outputs.embedding) for output in llm.embed(asked, use_tqdm=False)]}


def _metric(llm: Any, name: str) -> int:
    return int(sum(metric.value for metric in llm.get_metrics() if metric.name == name))


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(**json.loads(sys.argv[1]))), encoding="utf-8")
