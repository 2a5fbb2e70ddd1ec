"""What every worker process of vLLM is given for a run: counts of the backend's calls, and a fault planted in it.

vLLM imports this module in each worker, by the name in `worker_extension_cls`, and mixes the class into its worker, so
that `LLM.collective_rpc` reaches it.
"""

import collections
import os
from typing import Any

from vllm_environment import FAULT, NO_CONTEXT

from jaxpaged.backends.functional import flash_attn_varlen_func
from jaxpaged.integrations.vllm.layer import AttentionLayer

_calls: collections.Counter[str] = collections.Counter()
_writes: collections.Counter[str] = collections.Counter()


class Counts:
    """A method that each worker gets."""

    def attention_calls(self) -> dict[str, Any]:
        """This process, and by layer how often the backend attended to a batch and wrote to the cache."""
        return {"pid": os.getpid(), "calls": dict(_calls), "writes": dict(_writes)}


def _counted(forward: Any) -> Any:
    def call(self: Any, layer: Any, q: Any, k: Any, v: Any, kv_cache: Any, meta: Any, *args: Any, **kwargs: Any) -> Any:
        if meta is not None:
            _calls[layer.layer_name] += 1
        return forward(self, layer, q, k, v, kv_cache, meta, *args, **kwargs)

    return call


def _counted_write(write: Any) -> Any:
    def call(self: Any, layer: Any, *args: Any) -> None:
        _writes[layer.layer_name] += 1
        write(self, layer, *args)

    return call


def _without_context(forward: Any) -> Any:
    """Attention of each request to its new tokens alone, as if nothing had ever been put into the cache."""

    def call(
        self: Any, layer: Any, q: Any, k: Any, v: Any, kv_cache: Any, meta: Any, output: Any, **kwargs: Any
    ) -> Any:
        if meta is None:
            return forward(self, layer, q, k, v, kv_cache, meta, output, **kwargs)
        new, starts = slice(0, meta.num_actual_tokens), meta.query_start_loc
        rows = output[new].view(q[new].shape)
        rows.copy_(
            flash_attn_varlen_func(q[new], k[new], v[new], starts, starts, softmax_scale=self.scale, causal=True)
        )
        return output

    return call


if os.environ.get(FAULT) == NO_CONTEXT:
    AttentionLayer.forward = _without_context(AttentionLayer.forward)  # type: ignore[method-assign]
AttentionLayer.forward = _counted(AttentionLayer.forward)  # type: ignore[method-assign]
AttentionLayer.do_kv_cache_update = _counted_write(AttentionLayer.do_kv_cache_update)  # type: ignore[method-assign]
