"""FlashAttention-3 by the flash-attn3-jax wheel.

Its binding can't take packed queries of several lengths with a paged cache: given cu_seqlens_q it reads V's head size
from the axis after the block's tokens, where the heads lie, and no other shape of V gives it the right strides. What it
can take besides is measured: a batch padded to the longest query, with the lengths in seqused_q, for which the kernel
and its schedule are those of packed queries (no tile of padding is worked on); a call for each length of query; and,
where all tokens are new, packed queries with packed, not paged, keys and values. Bringing inputs and outputs into these
forms is not timed.
"""

import dataclasses
import functools
import importlib
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from attention_inputs import Inputs
from peers import Call, Unavailable, as_torch, refuse_options, shared, split_counts

ARGUMENTS = (
    *("query", "key", "value", "new_key", "new_value", "q_v"),
    *("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table"),
    *("kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary"),
    *("q_descale", "k_descale", "v_descale", "scheduler_metadata"),
)
"""What the wheel's function takes, in order, as flash_attn3_jax/kvcache.py passes it."""
MOST_PARTIAL = 8 * 2**30
"""Bytes of partial results, which splits multiply, that a padded batch may have."""


def flash_attention_3(inputs: Inputs) -> dict[str, Call]:
    """Variants by how the context is split and, for queries of several lengths, how they are passed."""
    case = inputs.case
    refuse_options(inputs, (None, "lse"))
    if case.head_size != 128:
        raise Unavailable("its wheel is built for head size 128")
    if case.cache != "bfloat16":
        raise Unavailable("its binding takes no 8-bit cache")
    try:
        importlib.import_module("flash_attn3_jax")  # it registers the function that XLA calls
    except Exception as error:
        raise Unavailable(f"not installed: {type(error).__name__}: {error}") from error
    if case.uniform_queries:
        return _uniform(inputs)
    calls = _padded(inputs)
    if len(set(case.query_lens)) == 2:
        calls |= _by_length(inputs)
    if case.query_lens == case.seq_lens:
        calls |= _dense(inputs)
    return calls


def _splits(count: int) -> str:
    return f"{count} splits" if count > 1 else "1 split"


def _window(inputs: Inputs) -> tuple[int, int]:
    left, right = (-1 if side is None else side for side in inputs.case.window or (None, None))
    return left, right


def _batch(
    inputs: Inputs, causal: bool, splits: int, query: Any, key: Any, value: Any, table: Any, seq_lens: Any
) -> Any:
    """Queries [num_reqs, query_len, num_heads, head_size], by the wheel's public function."""
    from flash_attn3_jax import flash_mha_with_kvcache

    return flash_mha_with_kvcache(
        query,
        key,
        value,
        cache_seqlens=seq_lens,
        page_table=table,
        softmax_scale=inputs.scale,
        is_causal=causal,
        window_size=_window(inputs),
        num_splits=splits,
    )


def _uniform(inputs: Inputs) -> dict[str, Call]:
    case = inputs.case
    query = inputs.query.view(len(case.query_lens), -1, *inputs.query.shape[1:])
    arrays = [shared(x) for x in (query, inputs.key, inputs.value, inputs.block_table, inputs.seq_lens)]
    calls = {}
    for splits in split_counts(case):
        # With one query and no window "causal" changes nothing but the tiles.
        for causal in (True, False) if max(case.query_lens) == 1 and case.window is None else (case.causal,):
            label = _splits(splits) + ("" if causal == case.causal else " full")
            function = jax.jit(functools.partial(_batch, inputs, causal, splits))
            calls[label] = Call(
                functools.partial(function, *arrays), lambda out: as_torch(out).reshape(inputs.query.shape)
            )
    return calls


def token_places(query_lens: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of each packed token, its request and its index among the request's new tokens."""
    request = np.repeat(np.arange(len(query_lens)), query_lens)
    return request, np.concatenate([np.arange(n) for n in query_lens])


def _padded(inputs: Inputs) -> dict[str, Call]:
    case, device = inputs.case, inputs.query.device
    shape = (len(case.query_lens), max(case.query_lens), *inputs.query.shape[1:])
    places = tuple(torch.as_tensor(x).to(device) for x in token_places(case.query_lens))
    query = torch.zeros(shape, dtype=inputs.query.dtype, device=device)
    query[places] = inputs.query
    arrays = {
        "query": shared(query),
        "key": shared(inputs.key),
        "value": shared(inputs.value),
        "seqused_q": shared(torch.tensor(case.query_lens, dtype=torch.int32, device=device)),
        "seqused_k": shared(inputs.seq_lens),
        "page_table": shared(inputs.block_table),
    }
    calls = {}
    for splits in split_counts(case):
        if splits == 1 or splits * math.prod(shape) * 4 <= MOST_PARTIAL:
            function = jax.jit(functools.partial(_forward, inputs, splits))
            calls[f"padded, {_splits(splits)}"] = Call(
                functools.partial(function, arrays), lambda out: as_torch(out)[places]
            )
    return calls


def _by_length(inputs: Inputs) -> dict[str, Call]:
    """A call for each length of query, in one program, each split in all ways that are worth it."""
    case, device = inputs.case, inputs.query.device
    request_of_token = token_places(case.query_lens)[0]
    cache = (shared(inputs.key), shared(inputs.value))
    groups, tokens, splits = [], [], []
    for length in sorted(set(case.query_lens)):
        mine = [i for i, n in enumerate(case.query_lens) if n == length]
        rows = torch.as_tensor(mine).to(device)
        tokens.append(torch.as_tensor(np.flatnonzero(np.isin(request_of_token, mine))).to(device))
        query = inputs.query[tokens[-1]].view(len(mine), length, *inputs.query.shape[1:])
        groups.append((shared(query), *cache, shared(inputs.block_table[rows]), shared(inputs.seq_lens[rows])))
        lens = tuple(case.seq_lens[i] for i in mine)
        splits.append(split_counts(dataclasses.replace(case, query_lens=(length,) * len(mine), seq_lens=lens)))

    def packed(parts: Any) -> torch.Tensor:
        out = torch.empty_like(inputs.query)
        for part, place in zip(parts, tokens, strict=True):
            out[place] = as_torch(part).reshape(-1, *out.shape[1:])
        return out

    calls = {}
    for counts in itertools.product(*splits):
        function = jax.jit(functools.partial(_batches, inputs, counts))
        label = f"{len(groups)} calls, {'+'.join(map(str, counts))} splits"
        calls[label] = Call(functools.partial(function, groups), packed)
    return calls


def _batches(inputs: Inputs, splits: tuple[int, ...], groups: Any) -> Any:
    return [_batch(inputs, inputs.case.causal, n, *group) for n, group in zip(splits, groups, strict=True)]


def _dense(inputs: Inputs) -> dict[str, Call]:
    """Packed queries, keys and values; the wheel has it for one split alone."""
    case, device = inputs.case, inputs.query.device
    request, position = (torch.as_tensor(x).to(device) for x in token_places(case.query_lens))
    block = inputs.block_table[request, position // case.block_size].long()
    starts = shared(inputs.query_starts)
    arrays = {
        "query": shared(inputs.query),
        "key": shared(inputs.key[block, position % case.block_size]),
        "value": shared(inputs.value[block, position % case.block_size]),
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
    }
    function = jax.jit(functools.partial(_forward, inputs, 1))
    return {"dense varlen": Call(functools.partial(function, arrays))}


def _forward(inputs: Inputs, splits: int, arrays: Mapping[str, Any]) -> Any:
    """The wheel's function with such of its arguments, the others left out, which it knows by their length of 0."""
    case, query = inputs.case, arrays["query"]
    dtypes = dict.fromkeys(("new_key", "new_value", "q_v", "rotary_cos", "rotary_sin"), query.dtype)
    dtypes |= dict.fromkeys(("q_descale", "k_descale", "v_descale"), jnp.float32)
    longest, dense = max(case.query_lens), "cu_seqlens_k" in arrays
    rows = (len(case.query_lens), case.num_heads, longest)
    partial = (splits, *rows, case.head_size) if splits > 1 else (1, 1, 1, 1)
    left, right = _window(inputs)
    return jax.ffi.ffi_call(
        "flash_mha_fwd",
        [
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(rows, jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct(partial[:-1], jnp.float32),
        ],
        has_side_effect=False,
        input_layouts=[None] * len(ARGUMENTS),
        output_layouts=[None] * 4,
    )(
        *(arrays.get(name, jnp.zeros((0,), dtypes.get(name, jnp.int32))) for name in ARGUMENTS),
        max_seqlen_q=longest,
        max_seqlen_q_has_value=True,
        max_seqlen_k=longest if dense else 0,
        max_seqlen_k_has_value=dense,
        softmax_scale_val=inputs.scale,
        softmax_scale_has_value=True,
        pack_gqa_val=False,
        pack_gqa_has_value=False,
        is_causal=case.causal,
        window_size_left=left,
        window_size_right=right,
        attention_chunk=0,
        softcap=0.0,
        is_rotary_interleaved=True,
        num_splits=splits,
        sm_margin=0,
    )[0]
