"""paged_attention: check the arguments, pick an implementation, call it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpaged.implementations import choose, gpu_of_call, static_options
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.checks import check_dtype, check_shape, shape_text
from jaxpaged.metadata.head_sharding import HeadSharding, head_sharding, local
from jaxpaged.metadata.kv_cache import QUANTIZED_DTYPES, KVCache
from jaxpaged.operation import operation, refuse_vmap
from jaxpaged.reference import attention as reference
from jaxpaged.reference.attention import AttentionOptions

QUERY_DTYPES = tuple(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16))
Window = tuple[int | None, int | None]
_UNBOUNDED = 2**30


def paged_attention(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: Window | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attention of each request's new tokens to its keys and values in a paged cache.

    Prefill, decode, chunked prefill and several new tokens a request may be mixed in a batch. Scores are
    `scale * q·k`, then capped, then changed by `score_mod`, then given the ALiBi bias, then masked; accumulation is in
    float32. Query i of a request sits at position `seq_len - query_len + i`. A row with nothing to attend gives 0, and
    so do rows of `query` that belong to no request. A block out of the cache's range is not attended to.

    Where the cache's kv heads are sharded over a mesh, each device attends with its own, and nothing is communicated;
    the output's heads are sharded likewise. See `jaxpaged.sharding` for requests and blocks over devices.

    Args:
      query: [num_tokens, num_heads, head_size] float32, bfloat16 or float16, packed as `batch.query_start_loc` says.
      cache: the keys and values, those of the new tokens included. Its dtype is the query's, float32, or an 8-bit one;
        `num_heads` is a multiple of its `num_kv_heads`.
      batch: the requests.
      scale: factor of the scores, a number; `head_size ** -0.5` when None.
      causal: a query attends to no position after its own. False for encoder and cross attention.
      window: (left, right), the positions to each side that a query attends to, besides its own; None on a side for no
        bound. An engine's `sliding_window=w` is `(w - 1, 0)` in a decoder.
      soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
      alibi_slopes: [num_heads] or [num_reqs, num_heads] float32; `slope * (kv_pos - q_pos)` is added (Press et al.,
        2022).
      sinks: [num_heads] float; a logit per head that takes part in the softmax's denominator alone (Xiao et al., 2024).
      mask_mod: `(b, h, q_pos, kv_pos) -> bool`, true where a score takes part, and
      score_mod: `(score, b, h, q_pos, kv_pos) -> score`: JAX functions of a request's index, a query head, and two
        logical positions. They are traced once, on int32 arrays that broadcast against each other, and must work
        element by element. A function that is a pytree (see `jaxpaged.metadata.masks`) may hold arrays; a plain one is
        compiled anew for each new function object.
      return_lse: return the lse, too.
      out_dtype: float dtype of the output; the query's when None.
      batch_invariant: a request's result has the same bits whatever else is in the batch.
      implementation: "reference", "mosaic_gpu" (a Hopper GPU), or None for the best one that has what is asked for.

    Returns:
      The output [num_tokens, num_heads, v_head_size]; with `return_lse` a pair of it and of the lse
      [num_heads, num_tokens] float32, the natural logarithm of the sum of the exponentials of a row's scores, without
      the sinks, -inf for a row with nothing to attend.

    Raises:
      TypeError, ValueError: an argument doesn't fit; the message names it.
    """
    _check_query(query, cache, batch)
    if scale is None:
        scale = cache.head_size**-0.5
    out_dtype = jnp.dtype(query.dtype if out_dtype is None else out_dtype)
    check_dtype("out_dtype", out_dtype, QUERY_DTYPES)
    options = make_options(
        num_heads=query.shape[1],
        num_reqs=batch.num_reqs,
        scale=scale,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        mask_mod=mask_mod,
        score_mod=score_mod,
    )
    heads = head_sharding(cache)
    implementation = choose(
        implementation, (query, cache, batch), lambda: _refusal(query, cache, batch, options, out_dtype, heads)
    )
    arrays, static = split_options(options)
    if implementation == "mosaic_gpu":
        interpret, gpu = static_options(implementation)["interpret"], gpu_of_call((query, cache, batch))
        called = (query, cache, batch, arrays, static, heads, out_dtype, bool(batch_invariant), bool(return_lse))
        out, lse = _mosaic_gpu(*called, interpret, gpu)
    else:
        out, lse = _reference(query, cache, batch, arrays, static, heads, out_dtype, bool(batch_invariant))
    return (out, lse) if return_lse else out


def kernels_refuse(query: Any, cache: KVCache, batch: PagedBatch, *, out_dtype: Any = None, **given: Any) -> str | None:
    """Why `implementation="mosaic_gpu"` can't take these arguments of `paged_attention` on this machine, or None."""
    defaults = dict.fromkeys(("window", "soft_cap", "alibi_slopes", "sinks", "mask_mod", "score_mod"))
    given = {"scale": cache.head_size**-0.5, "causal": True, **defaults, **given}
    options = make_options(num_heads=query.shape[1], num_reqs=batch.num_reqs, **given)
    out_dtype = jnp.dtype(query.dtype if out_dtype is None else out_dtype)
    try:
        choose("mosaic_gpu", (query, cache, batch), lambda: _refusal(query, cache, batch, options, out_dtype, None))
    except ValueError as error:
        return str(error)
    return None


def _refusal(
    query: Any, cache: KVCache, batch: PagedBatch, options: AttentionOptions, out_dtype: Any, heads: HeadSharding | None
) -> str | None:
    from jaxpaged.pallas.attention import refusal

    if heads is not None:
        if options.mask_mod is not None or options.score_mod is not None:
            return "the kernels don't take mask_mod and score_mod where heads are sharded"
        query, cache = local((query, cache), (heads.rows, heads.cache(cache)), heads.mesh)
    return refusal(query, cache, batch, options, out_dtype)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
@operation("paged_attention")
def _reference(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    arrays: Any,
    static: Any,
    heads: HeadSharding | None,
    out_dtype: Any,
    batch_invariant: bool,
) -> tuple[Any, Any]:
    attend = functools.partial(reference.paged_attention, out_dtype=out_dtype, batch_invariant=batch_invariant)
    return _over_heads(attend, heads, query, cache, batch, arrays, static)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8, 9, 10))
@operation("paged_attention")
def _mosaic_gpu(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    arrays: Any,
    static: Any,
    heads: HeadSharding | None,
    out_dtype: Any,
    batch_invariant: bool,
    return_lse: bool,
    interpret: Any,
    gpu: Any,
) -> tuple[Any, Any]:
    from jaxpaged.pallas.attention import paged_attention

    chosen = {"out_dtype": out_dtype, "batch_invariant": batch_invariant, "return_lse": return_lse}
    attend = functools.partial(paged_attention, interpret=interpret, gpu=gpu, **chosen)
    query, cache, batch = refuse_vmap("paged_attention", (query, cache, batch))
    return _over_heads(attend, heads, query, cache, batch, arrays, static)


def _over_heads(
    attend: Callable[..., Any],
    heads: HeadSharding | None,
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    arrays: Any,
    static: Any,
) -> tuple[Any, Any]:
    """`attend(query, cache, batch, options)`, by each device for its own heads where they are sharded."""
    options = join_options(arrays, static)
    if heads is None:
        return attend(query, cache, batch, options)

    def attend_to_own(query: Any, cache: KVCache, batch: PagedBatch, arrays: Any) -> Any:
        first = jax.lax.axis_index(heads.axes) * query.shape[1]
        return attend(query, cache, batch, _with_global_heads(join_options(arrays, static), first))

    per_head = [id(options.alibi_slopes), id(options.sinks)]
    of_arrays = [
        None
        if x is None
        else PartitionSpec(*[None] * (x.ndim - 1), heads.axes)
        if id(x) in per_head
        else PartitionSpec()
        for x in arrays
    ]
    in_specs = (heads.rows, heads.cache(cache), PartitionSpec(), of_arrays)
    return heads.map(attend_to_own, in_specs, (heads.rows, PartitionSpec(heads.axes)))(query, cache, batch, arrays)


def _with_global_heads(options: AttentionOptions, first: Any) -> AttentionOptions:
    """Options whose functions see a device's head 0 as head `first`."""
    mask, score = options.mask_mod, options.score_mod
    return dataclasses.replace(
        options,
        mask_mod=None if mask is None else lambda b, h, q, kv: mask(b, h + first, q, kv),
        score_mod=None if score is None else lambda s, b, h, q, kv: score(s, b, h + first, q, kv),
    )


def _check_query(query: Any, cache: KVCache, batch: PagedBatch) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache: expected a KVCache, got {type(cache).__name__}")
    if not isinstance(batch, PagedBatch):
        raise TypeError(f"batch: expected a PagedBatch, got {type(batch).__name__}")
    check_array_like("query", query)
    check_dtype("query", query.dtype, QUERY_DTYPES)
    check_shape("query", query.shape, ("num_tokens", "num_heads", cache.head_size))
    if query.shape[1] == 0 or query.shape[1] % cache.num_kv_heads:
        raise ValueError(
            f"query: num_heads must be a multiple of the cache's {cache.num_kv_heads} kv heads, got {query.shape[1]}"
        )
    check_dtype(
        "cache", cache.dtype, dict.fromkeys([jnp.dtype(query.dtype), jnp.dtype(jnp.float32), *QUANTIZED_DTYPES])
    )


def check_array_like(name: str, x: Any) -> None:
    """TypeError unless `x` is a JAX or NumPy array."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name}: expected a JAX or NumPy array, got {type(x).__name__}")


def make_options(*, num_heads: int, num_reqs: int, **options: Any) -> AttentionOptions:
    """Options from the arguments of `paged_attention`, checked."""
    scale, window, soft_cap = options.pop("scale"), options.pop("window"), options.pop("soft_cap")
    if isinstance(scale, jax.Array | np.ndarray) or not np.isfinite(scale):
        raise ValueError(f"scale: expected a finite Python number or None, got {scale!r}")
    if soft_cap is not None and not (np.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap: expected a number above 0 or None, got {soft_cap!r}")
    slopes, sinks = options.pop("alibi_slopes"), options.pop("sinks")
    if slopes is not None:
        check_array_like("alibi_slopes", slopes)
        check_dtype("alibi_slopes", slopes.dtype, [jnp.float32])
        if tuple(slopes.shape) not in ((num_heads,), (num_reqs, num_heads)):
            expected = f"{shape_text((num_heads,))} or {shape_text((num_reqs, num_heads))}"
            raise ValueError(f"alibi_slopes: expected shape {expected}, got {shape_text(slopes.shape)}")
    if sinks is not None:
        check_array_like("sinks", sinks)
        check_dtype("sinks", sinks.dtype, QUERY_DTYPES)
        check_shape("sinks", sinks.shape, (num_heads,))
    for name in ("mask_mod", "score_mod"):
        if options[name] is not None and not callable(options[name]):
            raise TypeError(f"{name}: expected a function or None, got {type(options[name]).__name__}")
    return AttentionOptions(
        scale=float(scale),
        causal=bool(options.pop("causal")),
        window=_checked_window(window),
        soft_cap=None if soft_cap is None else float(soft_cap),
        alibi_slopes=slopes,
        sinks=sinks,
        **options,
    )


def _checked_window(window: Any) -> Window:
    if window is None:
        return (None, None)
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"window: expected (left, right) or None, got {window!r}")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int | np.integer)):
            raise TypeError(f"window: expected an int or None on each side, got {window!r}")
        if side is not None and side < 0:
            raise ValueError(f"window: expected 0 or more, or None for no bound, got {window!r}")
    # A side that reaches past every position is no bound; added to a position it would overflow int32.
    left, right = (None if side is None or side >= _UNBOUNDED else int(side) for side in window)
    return left, right


def split_options(options: AttentionOptions) -> tuple[list[Any], tuple[Any, ...]]:
    """The arrays that the options hold (those inside functions that are pytrees included), and a hashable rest."""
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    pytrees = {name: fields.pop(name) for name in ("alibi_slopes", "sinks", "mask_mod", "score_mod")}
    leaves, treedef = jax.tree.flatten(pytrees)
    arrays = [leaf if isinstance(leaf, jax.Array | np.ndarray) else None for leaf in leaves]
    others = tuple(None if isinstance(leaf, jax.Array | np.ndarray) else leaf for leaf in leaves)
    return arrays, (tuple(fields.items()), treedef, others)


def join_options(arrays: list[Any], static: tuple[Any, ...]) -> AttentionOptions:
    """The options that `split_options` took apart."""
    fields, treedef, others = static
    leaves = [other if array is None else array for array, other in zip(arrays, others, strict=True)]
    return AttentionOptions(**dict(fields), **jax.tree.unflatten(treedef, leaves))
