"""Logits of a model on transformers' continuous batching, of the same tokens whatever the attention.

In bfloat16 two implementations soon choose different tokens, and have nothing to compare from there on. So every step's
token is forced, by its number, and the logits are taken before that.
"""

from collections.abc import Sequence
from typing import Any

import torch


@torch.no_grad()
def forced_logits(
    model: Any, implementation: str, prompts: Sequence[Sequence[int]], new_tokens: int, **batching: Any
) -> torch.Tensor:
    """The logits [num_steps * requests in them, vocab_size] float32, on the CPU, of every token to be chosen.

    Args:
      model: a causal language model of transformers with an `lm_head`.
      batching: of `ContinuousBatchingConfig`. CUDA graphs and asynchronous batching are turned off: they would replay
        one token for ever, and change what is in a step.

    Raises:
      RuntimeError: a request failed.
    """
    import transformers

    seen: list[torch.Tensor] = []

    def force(head: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.float().reshape(-1, logits.shape[-1]).cpu())
        forced = torch.zeros_like(logits)
        forced[..., 1 + len(seen) * 7919 % (logits.shape[-1] - 1)] = 1e4
        return forced

    model.set_attn_implementation(implementation)
    hook = model.lm_head.register_forward_hook(force)
    try:
        manager = model.init_continuous_batching(
            transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
            transformers.ContinuousBatchingConfig(use_cuda_graph=False, use_async_batching=False, **batching),
        )
        manager.add_requests([list(prompt) for prompt in prompts])  # before it starts: steps don't depend on the time
        results = results_of(manager, len(prompts))
    finally:
        hook.remove()
    errors = [result.error for result in results if result.error is not None]
    if errors or len(results) != len(prompts):
        raise RuntimeError(f"{implementation}: {len(results)} of {len(prompts)} requests came back, errors: {errors}")
    return torch.cat(seen)


def results_of(manager: Any, requests: int) -> list[Any]:
    """What became of the requests that a manager waits to begin; fewer of them if it dies."""
    results = []
    manager.start()
    try:
        while len(results) < requests and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is not None:
                results.append(result)
    finally:
        manager.stop(block=True)
        manager.destroy()
    return results


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the error over the norm of what was expected."""
    return float((logits - expected).norm() / expected.norm())
