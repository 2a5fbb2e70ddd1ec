"""Attention of many new tokens a request for PyTorch's tensors on a GPU: by a step's plan, some launches a layer.

Requests of one new token go to decode where that is faster, as in `jaxpaged.pallas.attention`; each kernel writes its
own rows of the output.
"""

import math
from typing import Any

import torch

from jaxpaged.bridge import kernel_functions
from jaxpaged.bridge.cache_shapes import check_one_device, places_of, refuse_addresses, scale_names
from jaxpaged.bridge.decode_calls import columns_shape
from jaxpaged.bridge.decode_shapes import ScoreOptions, decode_arguments
from jaxpaged.bridge.dlpack import refuse_grad
from jaxpaged.bridge.launch import ALIGNMENT, program
from jaxpaged.bridge.lse_rows import decoded_rows, prefilled_lse, row_requests
from jaxpaged.bridge.prefill_shapes import (
    Field,
    addresses_in,
    plan_numbers,
    prefill_arguments,
    prefill_shape,
    prefill_shapes,
)
from jaxpaged.bridge.process import forget_after_fork
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.metadata.checks import check_shape
from jaxpaged.pallas.prefill_plan import most_tiles
from jaxpaged.pallas.prefill_shape import WG_ROWS

_MISALIGNED = ALIGNMENT - 1
_prefillers: dict[Any, "_Prefiller"] = {}
forget_after_fork(_prefillers.clear)


def prefill_on_gpu(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    plan: torch.Tensor,
    workspace: torch.Tensor,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    decode_slopes: torch.Tensor | None,
    decode_sinks: torch.Tensor | None,
    batch_invariant: bool,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    out: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of a layer by the plan of its step, to `out` [num_tokens, num_heads, v_head_size] of the query's dtype.

    Rows of no request become 0. Queries are copied to a larger tensor first if there are not as many as the program has
    room for, a power of two, and the memory they are part of ends behind them.

    Args:
      query: [num_tokens, num_heads, head_size] bfloat16 or float16; tokens may be a multiple of `head_size` apart.
      key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size] of the query's dtype, float8_e4m3fn,
        float8_e5m2 or int8; an engine's uint8 is to be viewed as what it holds.
      block_table, query_start_loc: as for the plan.
      plan, workspace: the plan.
      slopes: [1 or num_reqs, num_heads] float32, or None.
      sinks: [num_heads] float32, or None.
      decode_slopes, decode_sinks: the same by `decode_calls.by_column` for one new token.
      k_scale, v_scale: what 8-bit numbers are multiplied by, float32, of one element or [num_kv_heads]; None for 1, but
        int8 needs both.
      lse: [num_heads, num_tokens] float32, written by PyTorch; None where it isn't needed.
      others: as for the plan.

    Raises:
      TypeError, ValueError: an argument doesn't fit; nothing has been written.
      NotImplementedError: the kernels don't take such a call; among others, scales per token and head, and 8-bit heads
        for which shared memory has no room.
    """
    for name, x in (("query", query), ("slopes", slopes), ("sinks", sinks)):
        if x is not None and x.requires_grad:
            refuse_grad(x, name)
    num_reqs, num_tokens = block_table.shape[0], query.shape[0]
    tokens = next_bucket(num_tokens)
    rows = query if _has_rows(query, tokens) else _with_rows(query, tokens)
    key = (
        tokens, rows.shape[1:], rows.stride(), rows.dtype, key_cache.shape, key_cache.stride(), key_cache.dtype,
        value_cache.shape, value_cache.stride(), value_cache.dtype, next_bucket(num_reqs), block_table.shape[1],
        block_table.stride(), block_table.dtype, plan.shape, workspace.shape, out.shape[1:], out.stride(), out.dtype,
        query.get_device(), key_cache.get_device(), value_cache.get_device(), block_table.get_device(),
        plan.get_device(), out.get_device(), batch_invariant, scale, causal, window_left, window_right, soft_cap,
        *(None if x is None else (x.shape[-1], x.shape[0] == 1, x.ndim) for x in (slopes, sinks, decode_slopes)),
        decode_sinks is None, lse is None, scale_names(k_scale, v_scale),
    )  # fmt: skip
    prefiller = _prefillers.get(key)
    by_head = (slopes, sinks, decode_slopes, decode_sinks)
    if prefiller is None:
        scores = ScoreOptions(scale, causal, window_left, window_right, soft_cap)
        tensors = (rows, key_cache, value_cache, block_table, plan, workspace, *by_head, out, k_scale, v_scale)
        prefiller = _prefillers[key] = _Prefiller(*tensors, batch_invariant, scores, return_lse=lse is not None)
    check_shape("out", out.shape, (num_tokens, *out.shape[1:]))
    prefiller.check_by_head(num_reqs, *by_head)
    q, k_cache, v_cache, o = rows.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), out.data_ptr()
    if (q | k_cache | v_cache | o) & _MISALIGNED or (
        prefiller.distance is not None and v_cache - k_cache != prefiller.distance
    ):
        refuse_addresses(prefiller.distance, query=q, key_cache=k_cache, value_cache=v_cache, out=o)
    caches = (k_cache, v_cache, *(0 if x is None else x.data_ptr() for x in (k_scale, v_scale)))
    tile_lse, row_lse = prefiller.launch(caches, (q, block_table.data_ptr()), plan, workspace, by_head, out)
    if lse is not None:
        check_shape("lse", lse.shape, (query.shape[1], num_tokens))
        prefiller.write_lse(lse, plan, tile_lse, row_lse, row_requests(query_start_loc, num_tokens), num_reqs)


def _has_rows(query: torch.Tensor, tokens: int) -> bool:
    """Whether the query's memory goes on for so many tokens: what lies there is loaded, and nothing made of it."""
    if query.shape[0] == tokens:
        return True
    end = query.storage_offset() + (tokens - 1) * query.stride(0) + math.prod(query.shape[1:])
    return query.stride(0) > 0 and bool(end * query.element_size() <= query.untyped_storage().nbytes())


def _with_rows(query: torch.Tensor, tokens: int) -> torch.Tensor:
    larger = query.new_empty((tokens, *query.shape[1:]))
    larger[: query.shape[0]].copy_(query)
    return larger


class _Prefiller:
    """Launches a layer's attention for tensors of certain shapes.

    Attributes:
      distance: see `CacheShapes`.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        plan: torch.Tensor,
        workspace: torch.Tensor,
        slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        decode_slopes: torch.Tensor | None,
        decode_sinks: torch.Tensor | None,
        out: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        batch_invariant: bool,
        scores: ScoreOptions,
        *,
        return_lse: bool,
    ):
        asked: Any = (batch_invariant, scores, k_scale, v_scale)
        self._found = found = prefill_shapes(query, key_cache, value_cache, block_table, *asked)
        cache, self.distance = found.cache
        by_head = {"slopes": slopes, "sinks": sinks, "decode_slopes": decode_slopes, "decode_sinks": decode_sinks}
        check_one_device(key_cache, plan=plan, workspace=workspace, out=out, **by_head)
        self._fields = found.fields()
        _check_plan(plan, plan_numbers(self._fields))
        check_shape("out", out.shape, ("num_tokens", found.num_heads, cache.v_head_size))
        if out.dtype != query.dtype or not out.is_contiguous():
            raise TypeError(f"out: expected a compact tensor of {query.dtype}, got {out.dtype}, strides {out.stride()}")
        self.check_by_head(block_table.shape[0], slopes, sinks, decode_slopes, decode_sinks)
        self._device, self._return_lse = key_cache.device, return_lse
        self._shape = prefill_shape(found, return_lse, slopes, key_cache.device)
        how: dict[str, Any] = {"options": found.options, "shape": self._shape, "return_lse": return_lse}
        arguments = prefill_arguments(found, block_table, query, slopes, sinks)
        made = program(kernel_functions.prefill, *arguments, device=key_cache.get_device(), **how)
        given = [10] * (slopes is not None) + [11] * (sinks is not None)
        places = (4, *places_of(cache), 5, 6, 7, 8, 9, *given, 12)
        self._prefill = made.bind(*places, workspace=13, results=(14,) * return_lse)
        self._decode = None
        needed = made.workspace_bytes
        if found.decode is not None:
            lse = query.new_empty(0) if return_lse else None  # that there is one is all that counts
            decoding = decode_arguments(found.decode, block_table, query, decode_slopes, decode_sinks, lse)
            options: dict[str, Any] = {"options": found.options, "shape": found.decode.shape}
            made = program(kernel_functions.decode, *decoding, device=key_cache.get_device(), **options)
            given = [8] * (slopes is not None) + [9] * (sinks is not None)
            places = (4, *places_of(cache), 5, 6, 7, *given, 10, *[12] * return_lse)
            self._decode = made.bind(*places, workspace=11)
            needed = max(needed, made.workspace_bytes)
        if workspace.numel() * workspace.element_size() < needed:
            raise ValueError(f"workspace: expected {needed} bytes, as the plan has, got {workspace.numel()}")

    def check_by_head(
        self,
        num_reqs: int,
        slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        decode_slopes: torch.Tensor | None,
        decode_sinks: torch.Tensor | None,
    ) -> None:
        """Raise unless values per head fit the batch, and each other."""
        heads, decode = self._found.num_heads, self._found.decode
        for name, x, shapes in (
            ("slopes", slopes, ((1, heads), (num_reqs, heads))),
            ("sinks", sinks, ((heads,),)),
        ):
            if x is not None and (tuple(x.shape) not in shapes or x.dtype != torch.float32 or not x.is_contiguous()):
                raise ValueError(f"{name}: expected a compact float32 tensor {shapes}, got {x.dtype} {tuple(x.shape)}")
        for name, x, same in (("decode_slopes", decode_slopes, slopes), ("decode_sinks", decode_sinks, sinks)):
            if decode is None:
                continue
            if (x is None) != (same is None):
                raise ValueError(f"{name}: expected what by_column makes of {name[7:]}, or None where there are none")
            if x is None or same is None:
                continue
            rows = same.shape[0] if same.ndim == 2 else 1
            expected = (rows, *columns_shape(decode.shape))
            if tuple(x.shape) != expected or x.dtype != torch.float32 or not x.is_contiguous():
                raise ValueError(f"{name}: expected what by_column makes, float32 {expected}, got {tuple(x.shape)}")

    def launch(
        self,
        caches: tuple[int, ...],
        query_and_table: tuple[int, int],
        plan: torch.Tensor,
        workspace: torch.Tensor,
        by_head: tuple[torch.Tensor | None, ...],
        out: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Launch the kernels; return the lses of tiles, and of the rows that decode takes by token, if asked for.

        Args:
          caches: addresses of keys, values and their scales; 0 for what there isn't.
        """
        at = addresses_in(plan, self._fields)
        slopes, sinks, decode_slopes, decode_sinks = (0 if x is None else x.data_ptr() for x in by_head)
        memory, o = workspace.data_ptr(), out.data_ptr()
        given = (*caches, *query_and_table)
        planned = (at["work"], at["counts"], at["tile_starts"], at["parts"])
        tile_lse = self._new_tile_lse() if self._return_lse else None
        results: tuple[int, ...] = () if tile_lse is None else (tile_lse.data_ptr(),)
        self._prefill((*given, *planned, slopes, sinks, o, memory, *results))
        if self._decode is None:
            return tile_lse, None
        row_lse = out.new_empty(out.shape[:2], dtype=torch.float32) if self._return_lse else None
        results = () if row_lse is None else (row_lse.data_ptr(),)
        planned_decode = (at["requests"], at["shares"])
        self._decode((*given, *planned_decode, decode_slopes, decode_sinks, o, memory, *results))
        return tile_lse, row_lse

    def write_lse(
        self,
        lse: torch.Tensor,
        plan: torch.Tensor,
        tile_lse: torch.Tensor | None,
        row_lse: torch.Tensor | None,
        rows: tuple[torch.Tensor, torch.Tensor],
        num_reqs: int,
    ) -> None:
        """Write the lses of a launch to `lse` [num_heads, num_tokens]."""
        assert tile_lse is not None
        found = prefilled_lse(tile_lse, _array(plan, self._fields["tile_starts"]), rows, self._shape)
        if row_lse is not None:
            requests = _array(plan, self._fields["requests"])[: num_reqs + 1]
            found = torch.where(decoded_rows(requests, rows)[:, None], row_lse, found)
        lse.copy_(found.T)

    def _new_tile_lse(self) -> torch.Tensor:
        found, shape = self._found, self._shape
        heads = shape.dims.num_kv_heads * (1 if shape.tiling.packed else shape.group)
        tiles = most_tiles(found.tokens, found.rows, shape.tiling)
        return torch.empty(tiles, heads, 2 * WG_ROWS, dtype=torch.float32, device=self._device)


def _array(plan: torch.Tensor, field: Field) -> torch.Tensor:
    begin, shape = field
    return plan[begin : begin + math.prod(shape)].view(shape)


def _check_plan(plan: torch.Tensor, size: int) -> None:
    if tuple(plan.shape) != (size,) or plan.dtype != torch.int32 or not plan.is_contiguous():
        raise ValueError(f"plan: expected one for these shapes and options, {size} of torch.int32, got {plan.shape}")
