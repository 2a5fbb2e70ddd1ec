"""Attention of few new tokens a request for PyTorch's tensors on a GPU: by a step's plan, two launches a layer."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from jaxpaged.bridge import kernel_functions
from jaxpaged.bridge.alike import Alike, alike, never
from jaxpaged.bridge.cache_shapes import check_one_device, places_of, refuse_addresses, tensor_names
from jaxpaged.bridge.decode_shapes import DecodeShapes, ScoreOptions, decode_arguments, decode_shapes, heads_apart
from jaxpaged.bridge.dlpack import refuse_grad
from jaxpaged.bridge.launch import ALIGNMENT, Launches, moved, program
from jaxpaged.bridge.plan_calls import Planner
from jaxpaged.bridge.process import forget_after_fork
from jaxpaged.metadata.checks import check_shape
from jaxpaged.pallas.decode_shape import DecodeShape, columns_length

_MISALIGNED = ALIGNMENT - 1
_ALIGNED = ("query", "key_cache", "value_cache", "out", "workspace")
_address = torch.Tensor.data_ptr
_last: dict[Any, "_Decoder"] = {}
_decoders: dict[Any, "_Decoder"] = {}
forget_after_fork(_last.clear)
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
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of a layer by the plan of its step, to `out` [num_tokens, num_heads, v_head_size] of the query's dtype.

    Args:
      query: [num_tokens, num_heads, head_size] bfloat16 or float16; tokens may be a multiple of `head_size` apart, as
        where queries, keys and values come from one product.
      key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size] of the query's dtype, float8_e4m3fn,
        float8_e5m2 or int8; an engine's uint8 is to be viewed as what it holds.
      block_table: as for the plan.
      requests, shares, workspace: the plan.
      slopes, sinks: see `by_column`, or None.
      k_scale, v_scale: what 8-bit numbers are multiplied by, float32, of one element, [num_kv_heads] or [num_blocks,
        block_size, num_kv_heads]; None for 1, but int8 needs both.
      lse: compact [num_tokens, num_heads] float32, to which each row's natural lse is written, without sinks, and -inf
        for a row that attends to nothing; or None. `lse.T` is what engines call `softmax_lse`.
      others: as for the plan.

    Raises:
      TypeError, ValueError: an argument doesn't fit; nothing has been written.
      NotImplementedError: the kernels don't take such a call.
    """
    tensors = (query, key_cache, value_cache, out, workspace, block_table, requests, shares)
    how = (max_query_len, batch_invariant, scale, causal, window_left, window_right, soft_cap)
    optional = _NOTHING
    if not (slopes is sinks is k_scale is v_scale is lse is None):
        optional = _Optional(slopes, sinks, k_scale, v_scale, lse)
        how, tensors = optional.asked(how, tensors)
    decoder = _last.get(how)
    if decoder is None or not decoder.alike(*tensors):
        decoder = _last[how] = _decoder_of(how, tensors, optional)
    addresses = tuple(map(_address, tensors))
    q, k_cache, v_cache, o, parts = addresses[:5]
    distance = decoder.distance
    if (q | k_cache | v_cache | o | parts) & _MISALIGNED or (distance is not None and v_cache - k_cache != distance):
        refuse_addresses(distance, **dict(zip(_ALIGNED, addresses[:5], strict=True)))
    decoder.launch(addresses)


class _Optional(NamedTuple):
    """See `decode_on_gpu`."""

    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    lse: torch.Tensor | None = None

    def given(self) -> dict[str, torch.Tensor]:
        return {name: x for name, x in zip(self._fields, self, strict=True) if x is not None}

    def asked(self, how: Any, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        """What is asked for, besides shapes, and the tensors that it takes, with those that are given here."""
        given = self.given()
        return how + tuple(given), tensors + tuple(given.values())


_NOTHING = _Optional()


def decode_launches(*arguments: Any) -> Launches:
    """What a call of `decode_on_gpu` with these arguments launched just now."""
    places = [0, 1, 2, 16, 6, 3, 4, 5]  # of the tensors in their order there
    optional = dict(zip(_Optional._fields, (7, 8, 17, 18, 19), strict=True))
    given = _Optional(**{name: arguments[i] for name, i in optional.items()})
    how, tensors = given.asked(tuple(arguments[9:16]), tuple(arguments[i] for i in places))
    decoder = _decoders[how, tensor_names(tensors)]
    places += [optional[name] for name in given.given()]
    apart = None if decoder.distance is None else (1, 2, decoder.distance)
    kernels = tuple(moved(decoder.launch.kernels, places))
    return Launches(kernels, arguments[1].get_device(), tuple(places[:5]), ALIGNMENT, apart)


def _decoder_of(how: Any, tensors: tuple[torch.Tensor, ...], optional: _Optional) -> "_Decoder":
    """What attends with tensors like these, made at the first call."""
    refuse_grad(tensors[0], "query")
    name = how, tensor_names(tensors)
    decoder = _decoders.get(name)
    if decoder is None:
        max_query_len, batch_invariant, *scores = how[:7]
        arguments: tuple[Any, ...] = (*tensors[:8], max_query_len, batch_invariant, ScoreOptions(*scores), optional)
        decoder = _decoders[name] = _Decoder(*arguments)
    if not decoder.alike(*tensors):
        decoder.alike = alike(*tensors)
    return decoder


def by_column(x: torch.Tensor, *, num_kv_heads: int, max_query_len: int, name: str = "sinks") -> torch.Tensor:
    """Values per query head [num_heads] or [num_reqs, num_heads] as [1 or num_reqs, 2, columns_length] float32.

    In the order of the kernel's rows: kv head by kv head, token by token; see `decode_shape.per_column`. Made once for
    each layer's sinks or slopes, not in every call.
    """
    num_heads = x.shape[-1]
    if x.ndim not in (1, 2) or num_heads % num_kv_heads:
        raise ValueError(f"{name}: expected a multiple of {num_kv_heads} heads, [num_reqs,] num_heads, got {x.shape}")
    group = num_heads // num_kv_heads
    rows = x.float().reshape(-1, num_kv_heads, group).tile(max_query_len).flatten(1)
    more = columns_length(rows.shape[1]) - rows.shape[1]
    return torch.stack([torch.nn.functional.pad(rows[:, i:], (0, more + i)) for i in range(2)], dim=1)


def by_query_head(
    x: torch.Tensor | None, *, num_heads: int, num_kv_heads: int, max_query_len: int
) -> torch.Tensor | None:
    """What `by_column` was made of, [1 or num_reqs, num_heads]; None of None."""
    if x is None:
        return None
    rows = x[:, 0, : num_heads * max_query_len].reshape(len(x), num_kv_heads, max_query_len, -1)
    return rows[:, :, 0].reshape(len(x), -1)


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
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
) -> None:
    """Compile ahead what the plans and layers of batches with these numbers of requests need.

    Args:
      num_reqs: such as those of CUDA graphs; each request with `max_query_len` new tokens.
      return_lse: whether the calls will give `lse`.

    The other arguments are those of `decode_on_gpu`, for any number of requests. Nothing is launched.
    """
    head_size, v_head_size = query.shape[2], value_cache.shape[3]
    for n in num_reqs:
        tokens = n * max_query_len
        rows = query.new_empty(tokens, heads_apart(query), head_size)[:, : query.shape[1]]
        table = block_table.new_empty(n, block_table.stride(0))[:, : block_table.shape[1]]
        lens, starts = (block_table.new_empty(size) for size in (n, n + 1))
        requests, shares, workspace = Planner(
            rows, key_cache, value_cache, table, lens, starts, max_query_len, batch_invariant, scores, k_scale, v_scale
        ).empty_plan()
        out = query.new_empty(tokens, query.shape[1], v_head_size)
        lse = out.new_empty(tokens, query.shape[1], dtype=torch.float32) if return_lse else None
        each = slopes if slopes is None or slopes.shape[0] == 1 else slopes[:1].expand(n, -1, -1).contiguous()
        tensors = (rows, key_cache, value_cache, out, workspace, table, requests, shares)
        _Decoder(*tensors, max_query_len, batch_invariant, scores, _Optional(each, sinks, k_scale, v_scale, lse))


class _Decoder:
    """Launches a layer's attention for tensors of certain shapes.

    Attributes:
      alike: whether tensors are such: those of its arguments, in their order, and of the optional ones that are given.
      distance: see `CacheShapes`.
      launch: takes the addresses of these tensors.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        out: torch.Tensor,
        workspace: torch.Tensor,
        block_table: torch.Tensor,
        requests: torch.Tensor,
        shares: torch.Tensor,
        max_query_len: int,
        batch_invariant: bool,
        scores: ScoreOptions,
        optional: _Optional,
    ):
        slopes, sinks, k_scale, v_scale, lse = optional
        how: tuple[Any, ...] = (max_query_len, batch_invariant, scores, k_scale, v_scale)
        found = decode_shapes(query, key_cache, value_cache, block_table, *how)
        self.alike: Alike = never
        self.distance = found.cache.distance
        plan = {"requests": requests, "shares": shares, "workspace": workspace}
        check_one_device(key_cache, **plan, slopes=slopes, sinks=sinks, out=out, lse=lse)
        _check_plan(found, requests, shares)
        _check_columns(found.shape, block_table.shape[0], slopes=slopes, sinks=sinks)
        _check_written(query, found.cache.cache.v_head_size, out, lse)
        arguments = decode_arguments(found, block_table, query, slopes, sinks, lse)
        compiled_for: dict[str, Any] = {"options": found.options, "shape": found.shape}
        made = program(kernel_functions.decode, *arguments, device=key_cache.get_device(), **compiled_for)
        if workspace.nbytes < made.workspace_bytes or not workspace.is_contiguous():
            raise ValueError(
                f"workspace: expected {made.workspace_bytes} bytes in one piece, as the plan has, got "
                f"{workspace.nbytes}, strides {workspace.stride()}"
            )
        place = {name: 8 + i for i, name in enumerate(optional.given())}
        cache_places = {n: place[n] for n in ("k_scale", "v_scale") if n in place}
        columns = [place[n] for n in ("slopes", "sinks") if n in place]
        written = [3, *([] if lse is None else [place["lse"]])]
        arrays = places_of(found.cache.cache, key=1, value=2, **cache_places)
        self.launch = made.bind(0, *arrays, 5, 6, 7, *columns, *written, workspace=4)


def _check_plan(found: DecodeShapes, requests: torch.Tensor, shares: torch.Tensor) -> None:
    for name, x, size in zip(("requests", "shares"), (requests, shares), found.plan, strict=True):
        if tuple(x.shape) != size or x.dtype != torch.int32 or not x.is_contiguous():
            raise ValueError(f"{name}: expected a plan for these shapes and options, {size}, got {tuple(x.shape)}")


def _check_written(query: torch.Tensor, v_head_size: int, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    rows = tuple(query.shape[:2])
    for name, x, shape, dtype in (("out", out, (*rows, v_head_size), query.dtype), ("lse", lse, rows, torch.float32)):
        if x is None:
            continue
        check_shape(name, x.shape, shape)
        if x.dtype != dtype or not x.is_contiguous():
            raise TypeError(f"{name}: expected a compact tensor of {dtype}, got {x.dtype}, strides {x.stride()}")


def columns_shape(shape: DecodeShape) -> tuple[int, int]:
    """The last two axes of what `by_column` makes."""
    return 2, columns_length(shape.head_groups * shape.rows)


def _check_columns(shape: DecodeShape, num_reqs: int, **tensors: torch.Tensor | None) -> None:
    for name, x in tensors.items():
        if x is None:
            continue
        rows = (1, num_reqs) if name == "slopes" else (1,)
        expected = columns_shape(shape)
        if x.ndim != 3 or x.shape[0] not in rows or tuple(x.shape[1:]) != expected or x.dtype != torch.float32:
            raise ValueError(
                f"{name}: expected what by_column makes, float32 [{rows}, *{expected}], got {tuple(x.shape)}"
            )
        if not x.is_contiguous():
            raise ValueError(f"{name}: expected a compact tensor, got strides {x.stride()}")
