"""The implementations that are measured beside ours, behind one interface; FlashAttention-3 is in `flash_peer.py`.

Each is a function of a case's inputs that returns calls by label: variants of the same computation, of which the
fastest counts. `Unavailable` says why there is none.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import torch
from attention_cases import FLASH, TRITON, Case
from attention_inputs import SOFT_CAP, Inputs

MULTIPROCESSORS = 132


class Unavailable(Exception):
    """A peer that can't run a case, or isn't installed."""


def shared(x: torch.Tensor) -> Any:
    """The same memory as a JAX array; float8 numbers as uint8."""
    return jax.dlpack.from_dlpack(x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x)


def as_torch(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)


@dataclasses.dataclass(frozen=True)
class Call:
    """What is timed, and what its result means.

    Attributes:
      run: launches the work and returns JAX or torch arrays.
      packed: from what `run` returned to the output [num_tokens, num_heads, head_size]; not timed.
    """

    run: Callable[[], Any]
    packed: Callable[[Any], torch.Tensor] = as_torch


def refuse_options(inputs: Inputs, supported: tuple[str | None, ...]) -> None:
    if inputs.case.option not in supported:
        raise Unavailable(f"no {inputs.case.option}")


def split_counts(case: Case) -> tuple[int, ...]:
    """Into how many parts a peer's context is worth splitting: more the fewer tiles of 128 rows there are."""
    group = case.num_heads // case.num_kv_heads
    tiles = case.num_kv_heads * sum(math.ceil(n * group / 128) for n in case.query_lens)
    if tiles >= 8 * MULTIPROCESSORS:
        return (1,)
    if tiles >= 2 * MULTIPROCESSORS:
        return (1, 2, 4)
    return (1, 2, 4, 8, 16, 32)


SEGMENTS = 16
"""Parts of the context in the decode kernel of both Triton peers."""


def triton_unified(inputs: Inputs) -> dict[str, Call]:
    """vLLM's unified attention; for decode both with its split context and without."""
    case = inputs.case
    refuse_options(inputs, (None, "soft_cap", "alibi", "sinks"))
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.v1.kv_cache_interface import KVQuantMode
    except Exception as error:
        raise Unavailable(f"not installed: {type(error).__name__}: {error}") from error
    out = torch.empty_like(inputs.query)
    left, right = case.window or (None, None)
    per_token = case.cache == "int8"
    arguments: dict[str, Any] = {
        "q": inputs.query,
        "k": inputs.key,
        "v": inputs.value,
        "out": out,
        "cu_seqlens_q": inputs.query_starts,
        "max_seqlen_q": max(case.query_lens),
        "seqused_k": inputs.seq_lens,
        "max_seqlen_k": max(case.seq_lens),
        "softmax_scale": inputs.scale,
        "causal": case.causal,
        "window_size": (-1 if left is None else left, -1 if right is None else right),
        "block_table": inputs.block_table,
        "softcap": SOFT_CAP if case.option == "soft_cap" else 0,
        "q_descale": None,
        "k_descale": None if per_token or inputs.k_scale is None else inputs.k_scale.view(1),
        "v_descale": None if per_token or inputs.v_scale is None else inputs.v_scale.view(1),
        "alibi_slopes": inputs.alibi_slopes if case.option == "alibi" else None,
        "sinks": inputs.sinks if case.option == "sinks" else None,
        "kv_quant_mode": {
            "bfloat16": KVQuantMode.NONE,
            "float8_e4m3fn": KVQuantMode.FP8_PER_TENSOR,
            "int8": KVQuantMode.INT8_PER_TOKEN_HEAD,
        }[case.cache],
        "k_scale_cache": inputs.k_scale if per_token else None,
        "v_scale_cache": inputs.v_scale if per_token else None,
    }

    def call(**more: Any) -> torch.Tensor:
        unified_attention(**arguments, **more)
        return out

    calls = {"2D": Call(call)}
    if max(case.query_lens) == 1:
        padded = 1 << (case.head_size - 1).bit_length()
        rows = (case.num_tokens, case.num_heads, SEGMENTS)
        device = inputs.query.device
        segmented = functools.partial(
            call,
            seq_threshold_3D=case.num_tokens,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=torch.empty(*rows, padded, dtype=torch.float32, device=device),
            softmax_segm_max=torch.empty(rows, dtype=torch.float32, device=device),
            softmax_segm_expsum=torch.empty(rows, dtype=torch.float32, device=device),
        )
        calls["3D"] = Call(segmented)
    return calls


def ejkernel(inputs: Inputs) -> dict[str, Call]:
    """ejkernel's unified attention: of its paged kernels the one that takes our layout and packed queries."""
    case = inputs.case
    refuse_options(inputs, (None, "soft_cap", "alibi", "sinks"))
    if not case.causal:
        raise Unavailable("causal alone")
    if case.cache != "bfloat16":
        raise Unavailable("no 8-bit cache")
    compilation_cache = jax.config.jax_compilation_cache_dir
    try:
        from ejkernel.kernels._triton.unified_attention import unified_attention
    except Exception as error:
        raise Unavailable(f"not installed: {type(error).__name__}: {error}") from error
    finally:
        jax.config.update("jax_compilation_cache_dir", compilation_cache)  # importing it turns the cache on, for all
    tensors = (inputs.query, inputs.key, inputs.value, inputs.seq_lens, inputs.block_table, inputs.query_starts)
    arrays = [shared(x) for x in tensors]
    optional = {
        "alibi": {"alibi_slopes": shared(inputs.alibi_slopes)},
        "sinks": {"softmax_aux": shared(inputs.sinks)},
    }.get(case.option or "", {})
    attend = functools.partial(
        unified_attention,
        softmax_scale=inputs.scale,
        sliding_window=None if case.window is None or case.window[0] is None else case.window[0] + 1,
        logits_soft_cap=SOFT_CAP if case.option == "soft_cap" else None,
    )
    calls = {"2D": Call(functools.partial(jax.jit(attend), *arrays, **optional))}
    if max(case.query_lens) == 1:
        segmented = functools.partial(attend, seq_threshold_3d=case.num_tokens, num_par_softmax_segments=SEGMENTS)
        calls["3D"] = Call(functools.partial(jax.jit(segmented), *arrays, **optional))
    return calls


def variants(name: str, inputs: Inputs) -> dict[str, Call]:
    """A peer's calls."""
    if name == FLASH:
        from flash_peer import flash_attention_3

        return flash_attention_3(inputs)
    return {TRITON: triton_unified, "ejkernel": ejkernel}[name](inputs)
