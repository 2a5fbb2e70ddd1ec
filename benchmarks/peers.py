"""The implementations that are measured beside ours, behind one interface, and ours.

Each is a function of a case's inputs that returns calls by label: variants of the same computation, of which the
fastest counts. A call takes no arguments and returns the output [num_tokens, num_heads, head_size], or a pair of it and
of the lse, as JAX or torch arrays. `Unavailable` says why there is none.
"""

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from attention_cases import FLASH, TRITON
from attention_inputs import SOFT_CAP, Inputs, score_mod

Call = Callable[[], Any]
MULTIPROCESSORS = 132


class Unavailable(Exception):
    """A peer that can't run a case, or isn't installed."""


def shared(x: torch.Tensor) -> Any:
    """The same memory as a JAX array; float8 numbers as uint8."""
    return jax.dlpack.from_dlpack(x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x)


def as_torch(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)


def jaxpaged(inputs: Inputs, implementation: str | None = "mosaic_gpu") -> dict[str, Call]:
    """Ours, in one `jit` whose arguments are the arrays."""
    from jaxpaged import KVCache, PagedBatch, paged_attention

    case = inputs.case
    cache = KVCache.from_arrays(
        shared(inputs.key),
        shared(inputs.value),
        k_scale=None if inputs.k_scale is None else shared(inputs.k_scale),
        v_scale=None if inputs.v_scale is None else shared(inputs.v_scale),
        dtype=jnp.float8_e4m3fn if case.cache == "float8_e4m3fn" else None,
    )
    batch = PagedBatch.create(inputs.garbage_table, list(case.seq_lens), query_lens=list(case.query_lens))
    arrays: dict[str, Any] = {}
    options: dict[str, Any] = {}
    match case.option:
        case "alibi":
            arrays["alibi_slopes"] = shared(inputs.alibi_slopes)
        case "sinks":
            arrays["sinks"] = shared(inputs.sinks)
        case "soft_cap":
            options["soft_cap"] = SOFT_CAP
        case "lse":
            options["return_lse"] = True
        case "score_mod":
            options["score_mod"] = score_mod

    @jax.jit
    def attend(query: Any, cache: KVCache, batch: PagedBatch, arrays: dict[str, Any]) -> Any:
        return paged_attention(
            query,
            cache,
            batch,
            causal=case.causal,
            window=case.window,
            implementation=implementation,
            **arrays,
            **options,
        )

    return {"": functools.partial(attend, shared(inputs.query), cache, batch, arrays)}


def _refuse_options(inputs: Inputs, supported: tuple[str | None, ...]) -> None:
    if inputs.case.option not in supported:
        raise Unavailable(f"no {inputs.case.option}")


def split_counts(inputs: Inputs) -> tuple[int, ...]:
    """Into how many parts a peer's context is worth splitting: more the fewer tiles of 128 rows there are."""
    case = inputs.case
    group = case.num_heads // case.num_kv_heads
    tiles = case.num_kv_heads * sum(math.ceil(n * group / 128) for n in case.query_lens)
    if tiles >= 8 * MULTIPROCESSORS:
        return (1,)
    if tiles >= 2 * MULTIPROCESSORS:
        return (1, 2, 4)
    return (1, 2, 4, 8, 16, 32)


def flash_attention_3(inputs: Inputs) -> dict[str, Call]:
    """flash-attn3-jax: batches with one length of query by its public function, others by the function under it."""
    case = inputs.case
    _refuse_options(inputs, (None, "lse"))
    if case.head_size != 128:
        raise Unavailable("its wheel is built for head size 128")
    if case.cache != "bfloat16":
        raise Unavailable("its binding takes no 8-bit cache")
    try:
        importlib.import_module("flash_attn3_jax")  # it registers the function that XLA calls
    except Exception as error:
        raise Unavailable(f"not installed: {type(error).__name__}: {error}") from error
    arrays = [shared(x) for x in (inputs.query, inputs.key, inputs.value, inputs.block_table, inputs.seq_lens)]
    arrays.append(shared(inputs.query_starts))
    calls: dict[str, Call] = {}
    for splits in split_counts(inputs):
        # With one query and no window "causal" changes nothing but the tiles.
        for causal in (True, False) if max(case.query_lens) == 1 and case.window is None else (case.causal,):
            label = f"{splits} splits" if splits > 1 else "1 split"
            label += "" if causal == case.causal else " full"
            attend = _flash_uniform if case.uniform_queries else _flash_ragged
            function = jax.jit(functools.partial(attend, inputs, causal, splits))
            calls[label] = functools.partial(function, *arrays)
    return calls


def _flash_window(inputs: Inputs) -> tuple[int, int]:
    left, right = (-1 if side is None else side for side in inputs.case.window or (None, None))
    return left, right


def _flash_uniform(
    inputs: Inputs, causal: bool, splits: int, query: Any, key: Any, value: Any, table: Any, seq_lens: Any, _: Any
) -> Any:
    from flash_attn3_jax import flash_mha_with_kvcache

    case = inputs.case
    out = flash_mha_with_kvcache(
        query.reshape(len(case.query_lens), -1, *query.shape[1:]),
        key,
        value,
        cache_seqlens=seq_lens,
        page_table=table,
        softmax_scale=inputs.scale,
        is_causal=causal,
        window_size=_flash_window(inputs),
        num_splits=splits,
    )
    return out.reshape(query.shape)


def _flash_ragged(
    inputs: Inputs, causal: bool, splits: int, query: Any, key: Any, value: Any, table: Any, seq_lens: Any, starts: Any
) -> Any:
    case = inputs.case
    num_tokens, num_heads, head_size = query.shape
    longest = max(case.query_lens)
    partial = (splits, num_heads, num_tokens, head_size) if splits > 1 else (1, 1, 1, 1)
    ints, floats, numbers = (jnp.zeros((0,), dtype) for dtype in (jnp.int32, jnp.float32, query.dtype))
    left, right = _flash_window(inputs)
    # Positions of the arguments as in flash_attn3_jax/kvcache.py, with the starts of the queries besides.
    return jax.ffi.ffi_call(
        "flash_mha_fwd",
        [
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((len(case.query_lens), num_heads, longest), jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct(partial[:3], jnp.float32),
        ],
        has_side_effect=False,
        input_layouts=[None] * 21,
        output_layouts=[None] * 4,
    )(
        query,
        key,
        value,
        numbers,  # new keys
        numbers,  # new values
        numbers,  # q_v
        starts,
        ints,  # cu_seqlens_k
        ints,  # cu_seqlens_k_new
        ints,  # seqused_q
        seq_lens,
        table,
        ints,  # kv_batch_idx
        ints,  # leftpad_k
        numbers,  # rotary_cos
        numbers,  # rotary_sin
        ints,  # seqlens_rotary
        floats,  # q_descale
        floats,  # k_descale
        floats,  # v_descale
        ints,  # scheduler_metadata
        max_seqlen_q=longest,
        max_seqlen_q_has_value=True,
        max_seqlen_k=0,
        max_seqlen_k_has_value=False,
        softmax_scale_val=inputs.scale,
        softmax_scale_has_value=True,
        pack_gqa_val=False,
        pack_gqa_has_value=False,
        is_causal=causal,
        window_size_left=left,
        window_size_right=right,
        attention_chunk=0,
        softcap=0.0,
        is_rotary_interleaved=True,
        num_splits=splits,
        sm_margin=0,
    )[0]


SEGMENTS = 16
"""Parts of the context in the decode kernel of both Triton peers."""


def triton_unified(inputs: Inputs) -> dict[str, Call]:
    """vLLM's unified attention; for decode both with its split context and without."""
    case = inputs.case
    _refuse_options(inputs, (None, "soft_cap", "alibi", "sinks"))
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

    calls: dict[str, Call] = {"2D": call}
    if max(case.query_lens) == 1:
        padded = 1 << (case.head_size - 1).bit_length()
        rows = (case.num_tokens, case.num_heads, SEGMENTS)
        device = inputs.query.device
        calls["3D"] = functools.partial(
            call,
            seq_threshold_3D=case.num_tokens,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=torch.empty(*rows, padded, dtype=torch.float32, device=device),
            softmax_segm_max=torch.empty(rows, dtype=torch.float32, device=device),
            softmax_segm_expsum=torch.empty(rows, dtype=torch.float32, device=device),
        )
    return calls


def ejkernel(inputs: Inputs) -> dict[str, Call]:
    """ejkernel's unified attention: of its paged kernels the one that takes our layout and packed queries."""
    case = inputs.case
    _refuse_options(inputs, (None, "soft_cap", "alibi", "sinks"))
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
    calls: dict[str, Call] = {"2D": functools.partial(jax.jit(attend), *arrays, **optional)}
    if max(case.query_lens) == 1:
        segmented = functools.partial(attend, seq_threshold_3d=case.num_tokens, num_par_softmax_segments=SEGMENTS)
        calls["3D"] = functools.partial(jax.jit(segmented), *arrays, **optional)
    return calls


PEERS: Mapping[str, Callable[[Inputs], dict[str, Call]]] = {
    FLASH: flash_attention_3,
    TRITON: triton_unified,
    "ejkernel": ejkernel,
}
