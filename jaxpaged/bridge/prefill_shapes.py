"""What the attention of many new tokens is compiled for, read off PyTorch's tensors: sizes, and how a plan lies.

Tokens and requests change in every step, so programs have room for powers of two of both, and learn on the device how
many there are.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from jaxpaged.bridge import kernel_functions
from jaxpaged.bridge.cache_shapes import CacheShapes, array_shape
from jaxpaged.bridge.decode_shapes import (
    DecodeShapes,
    ScoreOptions,
    checked_cache,
    decode_cut,
    decode_shapes,
    heads_apart,
    refuse_call,
    workspace_bytes,
)
from jaxpaged.bridge.kernel_functions import PrefillCut
from jaxpaged.bridge.launch import gpu, lowered_calls, offsets_in_workspace
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.pallas.attention import cache_refusal, decoded_lens
from jaxpaged.pallas.decode_plan_kernel import DecodeCut
from jaxpaged.pallas.plans import prefill_refusal
from jaxpaged.pallas.prefill_plan import NUM_FIELDS, PrefillPlan, PrefillTiling, most_items
from jaxpaged.pallas.prefill_shape import PrefillShape
from jaxpaged.reference.attention import AttentionOptions

_ALIGNMENT = 4
"""Numbers: where an array of a plan may begin."""
Field = tuple[int, tuple[int, ...]]
"""Where an array begins in a plan, in numbers, and its shape."""


class PrefillShapes(NamedTuple):
    """What a step's plan and its layers are compiled for.

    Attributes:
      rows, tokens: requests and tokens that programs have room for.
      num_heads, query_dtype: of the query; the output has its dtype, too.
      decode: for requests of one new token, if another kernel takes them, which starts where prefill's last CTAs have
        ended.
      options: of the scores.
    """

    cache: CacheShapes
    rows: int
    tokens: int
    num_heads: int
    query_dtype: Any
    tiling: PrefillTiling
    decode: DecodeShapes | None
    options: AttentionOptions
    batch_invariant: bool

    @property
    def cut(self) -> PrefillCut:
        shortest = 1 if self.decode is None else 2
        return PrefillCut(self.options, self.tiling, self.tokens, self.num_heads, shortest)

    @property
    def decode_cut(self) -> DecodeCut:
        assert self.decode is not None
        cut = decode_cut(self.decode, self.tokens, self.batch_invariant)
        return dataclasses.replace(cut, others_elsewhere=True)

    def fields(self) -> dict[str, Field]:
        """The arrays of a plan, which lie in one tensor of int32."""
        heads = self.cache.cache.num_kv_heads if self.tiling.packed else self.num_heads
        room = most_items(self.tokens, self.rows, self.tiling, heads)
        shapes: dict[str, tuple[int, ...]] = {
            "work": (self.tiling.num_ctas, room, NUM_FIELDS),
            "counts": (self.tiling.num_ctas,),
            "tile_starts": (self.rows + 1,),
            "parts": (),
        }
        if self.decode is not None:
            shapes["requests"], shapes["shares"] = self.decode.plan
        found, end = {}, 0
        for name, shape in shapes.items():
            found[name] = (end, shape)
            end += -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        return found


def plan_numbers(fields: Mapping[str, Field]) -> int:
    """Numbers in a plan."""
    begin, shape = list(fields.values())[-1]
    return begin + math.prod(shape)


def addresses_in(plan: torch.Tensor, fields: Mapping[str, Field]) -> dict[str, int]:
    """Where the arrays of a plan begin."""
    base = plan.data_ptr()
    return {name: base + 4 * begin for name, (begin, _) in fields.items()}


def prefill_shapes(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    batch_invariant: bool,
    scores: ScoreOptions,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> PrefillShapes:
    """Checks the tensors of a call, too.

    Raises:
      TypeError, ValueError: they don't fit each other.
      NotImplementedError: the kernels don't take them.
    """
    found = checked_cache(query, key_cache, value_cache, block_table, k_scale, v_scale)
    cache, options = found.cache, scores.options()
    num_reqs, columns = map(int, block_table.shape)  # torch.compile has numbers of its own
    num_tokens, num_heads, _ = map(int, query.shape)
    query_dtype = array_shape(query).dtype
    refuse_call(cache, query, num_reqs, columns, None, options)
    _refuse(cache_refusal(query_dtype, cache, query_dtype))
    rows, tokens = next_bucket(num_reqs), next_bucket(num_tokens)
    table, lens, starts = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((rows, columns), (rows,), (rows + 1,)))
    batch = PagedBatch(table, lens, starts, None, None)
    padded = jax.ShapeDtypeStruct((tokens, num_heads, cache.head_size), query_dtype)
    decode = None
    if decoded_lens(padded, cache, batch, batch_invariant):
        decode = decode_shapes(query, key_cache, value_cache, block_table, 1, batch_invariant, scores, k_scale, v_scale)
        decode = decode._replace(shape=dataclasses.replace(decode.shape, overlaps=True))
    shape = kernel_functions.prefill_shape(
        cache,
        options,
        query_dtype=query_dtype,
        num_tokens=tokens,
        num_heads=num_heads,
        num_reqs=rows,
        return_lse=False,
        batch_invariant=batch_invariant,
        gpu=gpu(key_cache.device),
    )
    result = PrefillShapes(found, rows, tokens, num_heads, query_dtype, shape.tiling, decode, options, batch_invariant)
    how = {"num_tokens": tokens, "num_heads": num_heads, "shortest": result.cut.shortest}
    _refuse(prefill_refusal(cache, batch, options, shape.tiling, **how))
    return result


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise NotImplementedError(reason)


def prefill_shape(
    found: PrefillShapes, return_lse: bool, slopes: torch.Tensor | None, device: torch.device
) -> PrefillShape:
    """The shape of the kernel for a layer."""
    options = dataclasses.replace(found.options, alibi_slopes=None if slopes is None else array_shape(slopes))
    cache = found.cache.cache
    return kernel_functions.prefill_shape(
        cache,
        options,
        query_dtype=found.query_dtype,
        num_tokens=found.tokens,
        num_heads=found.num_heads,
        num_reqs=found.rows,
        return_lse=return_lse,
        batch_invariant=found.batch_invariant,
        gpu=gpu(device),
    )


def plan_shapes(found: PrefillShapes) -> PrefillPlan:
    """Shapes of the arrays of a plan of prefill."""
    fields = found.fields()
    names = ("work", "counts", "tile_starts", "parts")
    return PrefillPlan(*(jax.ShapeDtypeStruct(fields[name][1], jnp.int32) for name in names))


def prefill_arguments(
    found: PrefillShapes,
    block_table: torch.Tensor,
    query: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Shapes of what `kernel_functions.prefill` takes."""
    cache = found.cache.cache
    rows = jax.ShapeDtypeStruct((found.tokens, heads_apart(query), cache.head_size), found.query_dtype)
    out = jax.ShapeDtypeStruct((found.tokens, found.num_heads, cache.v_head_size), found.query_dtype)
    table = jax.ShapeDtypeStruct((found.rows, int(block_table.stride(0))), jnp.int32)
    by_head = [None if x is None else array_shape(x) for x in (slopes, sinks)]
    if slopes is not None and slopes.shape[0] > 1:
        by_head[0] = jax.ShapeDtypeStruct((found.rows, found.num_heads), jnp.float32)
    return rows, cache, table, plan_shapes(found), *by_head, out


def prefill_workspace_bytes(found: PrefillShapes, block_table: torch.Tensor, query: torch.Tensor) -> int:
    """Of what one kernel of a layer leaves to the next, whatever its options."""
    decoded = 0 if found.decode is None else workspace_bytes(found.decode, block_table, query)
    if found.tiling.most_parts == 1:
        return decoded
    shape = prefill_shape(found, False, None, query.device)
    how: dict[str, Any] = {"options": found.options, "shape": shape, "return_lse": False}
    arguments = prefill_arguments(found, block_table, query, None, None)
    return max(decoded, offsets_in_workspace(lowered_calls(kernel_functions.prefill, *arguments, **how))[1])
