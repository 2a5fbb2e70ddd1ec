"""What decode is compiled for, read off PyTorch's tensors: the checks, the sizes and the arguments of its kernels."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from jaxpaged.bridge import kernel_functions
from jaxpaged.bridge.cache_shapes import CacheShapes, array_shape, cache_shapes, check_one_device
from jaxpaged.bridge.launch import gpu, lowered_calls, offsets_in_workspace
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.metadata.checks import check_shape
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.attention import DTYPES, most_decoded_lens, refusal
from jaxpaged.pallas.decode_plan import DecodePlan, plan_shapes
from jaxpaged.pallas.decode_plan_kernel import DecodeCut
from jaxpaged.pallas.decode_shape import DecodeShape
from jaxpaged.reference.attention import AttentionOptions


class ScoreOptions(NamedTuple):
    """What scores go through, as operators take it: numbers alone. See `jaxpaged.paged_attention`.

    Attributes:
      window_left, window_right: -1 for no bound.
      soft_cap: 0 for none.
    """

    scale: float
    causal: bool
    window_left: int
    window_right: int
    soft_cap: float

    def options(self) -> AttentionOptions:
        if not math.isfinite(self.scale):
            raise ValueError(f"scale: expected a finite number, got {self.scale}")
        if not (math.isfinite(self.soft_cap) and self.soft_cap >= 0):
            raise ValueError(f"soft_cap: expected a number above 0, or 0 for none, got {self.soft_cap}")
        left, right = (None if side < 0 else side for side in (self.window_left, self.window_right))
        return AttentionOptions(self.scale, self.causal, (left, right), self.soft_cap or None)


class DecodeShapes(NamedTuple):
    """What a step's plan and its layers are compiled for.

    Attributes:
      rows: requests that programs are compiled for, at least those there are.
      shape: of the kernel.
      options: of the scores.
    """

    cache: CacheShapes
    rows: int
    shape: DecodeShape
    options: AttentionOptions

    @property
    def plan(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of the plan."""
        return plan_shapes(self.rows, self.shape.num_shares)


def decode_shapes(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    batch_invariant: bool,
    scores: ScoreOptions,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> DecodeShapes:
    cache = checked_cache(query, key_cache, value_cache, block_table, k_scale, v_scale)
    num_reqs, columns = map(int, block_table.shape)  # torch.compile has numbers of its own
    num_tokens, num_heads, _ = map(int, query.shape)
    options = scores.options()
    refuse_call(cache.cache, query, num_reqs, columns, max_query_len, options)
    most = most_decoded_lens(cache.cache, num_heads)
    if not 1 <= max_query_len <= most:
        raise ValueError(f"max_query_len: expected 1 to {most} with these heads, got {max_query_len}")
    rows = next_bucket(num_reqs) if key_cache.device.type == "cuda" else num_reqs
    shape = kernel_functions.decode_shape(
        cache.cache,
        query_dtype=array_shape(query).dtype,
        num_tokens=next_bucket(num_tokens),
        num_heads=num_heads,
        num_reqs=rows,
        columns=columns,
        max_query_len=max_query_len,
        batch_invariant=batch_invariant,
        gpu=gpu(key_cache.device),
    )
    return DecodeShapes(cache, rows, shape, options)


def checked_cache(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> CacheShapes:
    """The cache of a layer, checked together with its queries and the block table."""
    found = cache_shapes(key_cache, value_cache, k_scale, v_scale)
    cache = found.cache
    check_shape("query", query.shape, ("num_tokens", "num_heads", cache.head_size))
    check_one_device(key_cache, query=query, block_table=block_table)
    check_shape("block_table", block_table.shape, ("num_reqs", "max_blocks_per_req"))
    if block_table.dtype != torch.int32:
        raise TypeError(f"block_table: expected torch.int32, got {block_table.dtype}")
    if block_table.stride(1) != 1 or block_table.stride(0) < block_table.shape[1]:
        raise ValueError(f"block_table: expected rows of blocks side by side, got strides {block_table.stride()}")
    if query.shape[1] % cache.num_kv_heads or not query.shape[1]:
        raise ValueError(f"query: expected a multiple of {cache.num_kv_heads} kv heads, got {query.shape[1]} heads")
    return found


def refuse_call(
    cache: KVCache,
    query: torch.Tensor,
    num_reqs: int,
    columns: int,
    max_query_len: int | None,
    options: AttentionOptions,
) -> None:
    """Raise NotImplementedError for what the kernels don't take."""
    query_shape = array_shape(query)
    table, lens = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((num_reqs, columns), (num_reqs,)))
    batch = PagedBatch(table, lens, None, None, max_query_len)
    reason = refusal(
        query_shape, cache, batch, options, query_shape.dtype if query_shape.dtype in DTYPES else DTYPES[0]
    )
    if reason is not None:
        raise NotImplementedError(reason)


def plan_sizes(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    batch_invariant: bool,
    scores: ScoreOptions,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Shapes of the tensors of a plan, and bytes of its workspace."""
    how = (max_query_len, batch_invariant, scores, k_scale, v_scale)
    found = decode_shapes(query, key_cache, value_cache, block_table, *how)
    return *found.plan, 0 if key_cache.device.type == "cpu" else workspace_bytes(found, block_table, query)


def decode_cut(found: DecodeShapes, num_tokens: int, batch_invariant: bool) -> DecodeCut:
    shape = found.shape
    return DecodeCut(
        options=found.options,
        num_tokens=num_tokens,
        max_query_len=shape.max_query_len,
        tile=shape.tile,
        num_shares=shape.num_shares,
        min_tiles=shape.fewest_tiles,
        others_elsewhere=False,
        batch_invariant=batch_invariant,
    )


def workspace_bytes(found: DecodeShapes, block_table: torch.Tensor, query: torch.Tensor) -> int:
    """Of what decode's CTAs leave to each other: the same with and without slopes, sinks and lses."""
    arguments = decode_arguments(found, block_table, query, None, None)
    calls = lowered_calls(kernel_functions.decode, *arguments, options=found.options, shape=found.shape)
    return offsets_in_workspace(calls)[1]


def decode_arguments(
    found: DecodeShapes,
    block_table: torch.Tensor,
    query: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """Shapes of what `kernel_functions.decode` takes."""
    cache, shape = found.cache.cache, found.shape
    rows = jax.ShapeDtypeStruct((shape.num_tokens, heads_apart(query), cache.head_size), shape.query_dtype)
    out = jax.ShapeDtypeStruct((shape.num_tokens, query.shape[1], cache.v_head_size), shape.out_dtype)
    sizes = (*found.plan, (found.rows, int(block_table.stride(0))))
    requests, shares, table = (jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes)
    by_head = [None if x is None else array_shape(x) for x in (slopes, sinks)]
    if slopes is not None and slopes.shape[0] > 1:
        by_head[0] = jax.ShapeDtypeStruct((found.rows, *slopes.shape[1:]), jnp.float32)
    lses = [] if lse is None else [jax.ShapeDtypeStruct((shape.num_tokens, query.shape[1]), jnp.float32)]
    return rows, cache, table, DecodePlan(requests, shares), *by_head, out, *lses


def heads_apart(query: torch.Tensor) -> int:
    """How many heads of memory lie between two tokens of the query, its own included."""
    head_size = query.shape[2]
    token, head, element = map(int, query.stride())
    if query.shape[0] == 1:
        token = query.shape[1] * head_size
    if element != 1 or head != head_size or token % head_size or token < query.shape[1] * head_size:
        raise ValueError(
            f"query: expected the heads of a token side by side, and tokens a multiple of {head_size} elements apart, "
            f"got strides {query.stride()} for shape {tuple(query.shape)}"
        )
    return token // head_size
