"""Attention of few new tokens a request for PyTorch's tensors on a GPU: by a step's plan, two launches a layer."""

from collections.abc import Iterable
from typing import Any

import torch

from jaxpaged.bridge import kernel_functions
from jaxpaged.bridge.cache_shapes import check_one_device, places_of, refuse_addresses
from jaxpaged.bridge.decode_shapes import ScoreOptions, decode_arguments, decode_shapes, heads_apart
from jaxpaged.bridge.dlpack import refuse_grad
from jaxpaged.bridge.launch import ALIGNMENT, program
from jaxpaged.bridge.plan_calls import Planner
from jaxpaged.bridge.process import forget_after_fork
from jaxpaged.metadata.checks import check_shape
from jaxpaged.pallas.decode import DecodeShape
from jaxpaged.pallas.decode_plan import NUM_FIELDS

_MISALIGNED = ALIGNMENT - 1
_decoders: dict[Any, "_Decoder"] = {}
forget_after_fork(_decoders.clear)


def decode_on_gpu(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    requests: torch.Tensor,
    shares: torch.Tensor,
    workspace: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_query_len: int,
    batch_invariant: bool,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    out: torch.Tensor,
) -> None:
    """Attention of a layer by the plan of its step, to `out` [num_tokens, num_heads, v_head_size] of the query's dtype.

    Args:
      query: [num_tokens, num_heads, head_size] bfloat16 or float16; tokens may be a multiple of `head_size` apart, as
        where queries, keys and values come from one product.
      key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size] in the query's dtype.
      block_table: as for the plan.
      requests, shares, workspace: the plan.
      slopes, sinks: see `by_column`, or None.
      others: as for the plan.
    """
    name = (
        query.shape, query.stride(), query.dtype, key_cache.shape, key_cache.stride(), key_cache.dtype,
        value_cache.shape, value_cache.stride(), value_cache.dtype, block_table.shape, block_table.stride(),
        requests.shape, shares.shape, workspace.shape, out.shape, out.stride(), out.dtype,
        query.get_device(), key_cache.get_device(), value_cache.get_device(), block_table.get_device(),
        requests.get_device(), out.get_device(), max_query_len, batch_invariant, scale, causal, window_left,
        window_right, soft_cap, None if slopes is None else slopes.shape, None if sinks is None else sinks.shape,
    )  # fmt: skip
    decoder = _decoders.get(name)
    if decoder is None:
        tensors = (query, key_cache, value_cache, block_table, requests, shares, workspace, slopes, sinks, out)
        scores = ScoreOptions(scale, causal, window_left, window_right, soft_cap)
        decoder = _decoders[name] = _Decoder(*tensors, max_query_len, batch_invariant, scores)
    if query.requires_grad:
        refuse_grad(query, "query")
    q, k_cache, v_cache, o = query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), out.data_ptr()
    if (q | k_cache | v_cache | o) & _MISALIGNED or (
        decoder.distance is not None and v_cache - k_cache != decoder.distance
    ):
        refuse_addresses(decoder.distance, query=q, key_cache=k_cache, value_cache=v_cache, out=o)
    slope = 0 if slopes is None else slopes.data_ptr()
    sink = 0 if sinks is None else sinks.data_ptr()
    plan = (requests.data_ptr(), shares.data_ptr(), workspace.data_ptr())
    decoder.launch((k_cache, v_cache, 0, 0, q, block_table.data_ptr(), *plan, slope, sink, o))


def by_column(x: torch.Tensor, *, num_kv_heads: int, max_query_len: int, name: str = "sinks") -> torch.Tensor:
    """Values per query head [num_heads] or [num_reqs, num_heads] in the order of the kernel's rows, float32.

    Made once for each layer's sinks or slopes, not in every call.
    """
    num_heads = x.shape[-1]
    if x.ndim not in (1, 2) or num_heads % num_kv_heads:
        raise ValueError(f"{name}: expected a multiple of {num_kv_heads} heads, [num_reqs,] num_heads, got {x.shape}")
    group = num_heads // num_kv_heads
    rows = x.float().reshape(-1, num_kv_heads, group).tile(max_query_len)
    return torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 8)).contiguous()


def warm_up_decode(
    num_reqs: Iterable[int],
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    batch_invariant: bool,
    scores: ScoreOptions,
    *,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compile ahead what the plans and layers of batches with these numbers of requests need.

    Args:
      num_reqs: such as those of CUDA graphs; each request with `max_query_len` new tokens.

    The other arguments are those of `decode_on_gpu`, for any number of requests. Nothing is launched.
    """
    head_size, v_head_size = query.shape[2], value_cache.shape[3]
    for n in num_reqs:
        tokens = n * max_query_len
        rows = query.new_empty(tokens, heads_apart(query), head_size)[:, : query.shape[1]]
        table = block_table.new_empty(n, block_table.stride(0))[:, : block_table.shape[1]]
        lens, starts = (block_table.new_empty(size) for size in (n, n + 1))
        planner = Planner(rows, key_cache, value_cache, table, lens, starts, max_query_len, batch_invariant, scores)
        plan = planner.empty_plan()
        out = query.new_empty(tokens, query.shape[1], v_head_size)
        given = slopes if slopes is None or slopes.shape[0] == 1 else slopes[:1].expand(n, -1, -1).contiguous()
        tensors = (rows, key_cache, value_cache, table, *plan, given, sinks, out)
        _Decoder(*tensors, max_query_len, batch_invariant, scores)


class _Decoder:
    """Launches a layer's attention for tensors of certain shapes.

    Attributes:
      distance: see `CacheShapes`.
      launch: takes addresses in the order of `decode_on_gpu`.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        requests: torch.Tensor,
        shares: torch.Tensor,
        workspace: torch.Tensor,
        slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        max_query_len: int,
        batch_invariant: bool,
        scores: ScoreOptions,
    ):
        found = decode_shapes(query, key_cache, value_cache, block_table, max_query_len, batch_invariant, scores)
        cache, self.distance = found.cache
        plan = {"requests": requests, "shares": shares, "workspace": workspace}
        check_one_device(key_cache, **plan, slopes=slopes, sinks=sinks, out=out)
        sizes = ((found.rows + 1, NUM_FIELDS), (found.shape.num_shares, 4))
        for name, x, size in zip(("requests", "shares"), (requests, shares), sizes, strict=True):
            if tuple(x.shape) != size or x.dtype != torch.int32 or not x.is_contiguous():
                raise ValueError(f"{name}: expected a plan for these shapes and options, {size}, got {tuple(x.shape)}")
        _check_columns(found.shape, block_table.shape[0], slopes=slopes, sinks=sinks)
        expected = (query.shape[0], query.shape[1], cache.v_head_size)
        check_shape("out", out.shape, expected)
        if out.dtype != query.dtype or not out.is_contiguous():
            raise TypeError(f"out: expected a compact tensor of {query.dtype}, got {out.dtype}, strides {out.stride()}")
        arguments = decode_arguments(found, block_table, query, slopes, sinks)
        how: dict[str, Any] = {"options": found.options, "shape": found.shape}
        made = program(kernel_functions.decode, *arguments, device=key_cache.get_device(), **how)
        if workspace.numel() * workspace.element_size() < made.workspace_bytes:
            raise ValueError(
                f"workspace: expected {made.workspace_bytes} bytes, as the plan has, got {workspace.numel()}"
            )
        given = [9] * (slopes is not None) + [10] * (sinks is not None)
        places = (4, *places_of(cache), 5, 6, 7, *given, 11)
        self.launch = made.bind(*places, workspace=8)


def _check_columns(shape: DecodeShape, num_reqs: int, **tensors: torch.Tensor | None) -> None:
    for name, x in tensors.items():
        if x is None:
            continue
        rows = (1, num_reqs) if name == "slopes" else (1,)
        expected = (shape.dims.num_kv_heads, shape.columns)
        if x.ndim != 3 or x.shape[0] not in rows or tuple(x.shape[1:]) != expected or x.dtype != torch.float32:
            raise ValueError(
                f"{name}: expected what by_column makes, float32 [{rows}, *{expected}], got {tuple(x.shape)}"
            )
        if not x.is_contiguous():
            raise ValueError(f"{name}: expected a compact tensor, got strides {x.stride()}")
