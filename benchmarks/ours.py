"""Our attention as programs that are measured: of one layer, and of two layers that share what they can."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from attention_inputs import SOFT_CAP, Inputs, score_mod
from peers import shared

ROOM = 4 * 2**30
"""Bytes left free for workspaces when a second layer is made."""
NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 2**30}
"""Options of XLA under which it makes no CUDA graph of a program's kernels."""


class Ours:
    """`paged_attention` in one `jit` whose arguments are the arrays; a second layer has its own query and cache."""

    def __init__(self, inputs: Inputs, implementation: str | None = "mosaic_gpu"):
        from jaxpaged import KVCache, PagedBatch, paged_attention

        self.inputs = inputs
        case = inputs.case
        self._batch = PagedBatch.create(inputs.garbage_table, list(case.seq_lens), query_lens=list(case.query_lens))
        self._arrays: dict[str, Any] = {}
        options: dict[str, Any] = {}
        match case.option:
            case "alibi":
                self._arrays["alibi_slopes"] = shared(inputs.alibi_slopes)
            case "sinks":
                self._arrays["sinks"] = shared(inputs.sinks)
            case "soft_cap":
                options["soft_cap"] = SOFT_CAP
            case "lse":
                options["return_lse"] = True
            case "score_mod":
                options["score_mod"] = score_mod

        @functools.partial(jax.jit, compiler_options=None if case.command_buffers else NO_GRAPHS)
        def attend(queries: Any, caches: tuple[KVCache, ...], batch: PagedBatch, arrays: dict[str, Any]) -> Any:
            return tuple(
                paged_attention(
                    query,
                    cache,
                    batch,
                    causal=case.causal,
                    window=case.window,
                    implementation=implementation,
                    **arrays,
                    **options,
                )
                for query, cache in zip(queries, caches, strict=True)
            )

        self._attend = attend
        self._layers = [(shared(inputs.query), self._cache(inputs.key, inputs.value))]

    def _cache(self, key: torch.Tensor, value: torch.Tensor) -> Any:
        from jaxpaged import KVCache

        inputs = self.inputs
        return KVCache.from_arrays(
            shared(key),
            shared(value),
            k_scale=None if inputs.k_scale is None else shared(inputs.k_scale),
            v_scale=None if inputs.v_scale is None else shared(inputs.v_scale),
            dtype=jnp.float8_e4m3fn if inputs.case.cache == "float8_e4m3fn" else None,
        )

    def add_layer(self) -> bool:
        """Make the second layer, whose cache is a copy: were it the same one, it would be in the L2 in part.

        Returns:
          Whether there is memory for it.
        """
        query, key, value = self.inputs.query, self.inputs.key, self.inputs.value
        if query.is_cuda and key.nbytes + value.nbytes + 3 * query.nbytes + ROOM > torch.cuda.mem_get_info()[0]:
            return False
        self._layers.append((shared(query.flip(1)), self._cache(key.clone(), value.clone())))
        return True

    def _arguments(self, first: int, end: int) -> tuple[Any, ...]:
        queries, caches = zip(*self._layers[first:end], strict=True)
        return queries, caches, self._batch, self._arrays

    def _run(self, first: int, end: int) -> Any:
        return self._attend(*self._arguments(first, end))

    def compiled(self) -> Callable[[], Any]:
        """`one` as a program that is compiled now, and not anew whatever changes."""
        arguments = self._arguments(0, 1)
        program = self._attend.lower(*arguments).compile()
        return lambda: program(*arguments)[0]

    def one(self) -> Any:
        """The first layer."""
        return self._run(0, 1)[0]

    def second(self) -> Any:
        """The second layer, by the program of one layer."""
        return self._run(1, 2)[0]

    def two(self) -> tuple[Any, ...]:
        """Both layers in one program: their outputs, and lses if they have any, side by side."""
        return tuple(jax.tree.leaves(self._run(0, 2)))
