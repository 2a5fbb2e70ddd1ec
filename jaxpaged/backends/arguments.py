"""What the attention functions for PyTorch share: their arguments, checked and turned into those of the calls."""

from typing import Any

import torch

from jaxpaged.backends.checks import (
    check_activation,
    check_heads,
    check_slopes,
    check_tensors,
    checked_scale,
    checked_soft_cap,
    checked_window,
)
from jaxpaged.backends.padded_calls import Options
from jaxpaged.bridge.torch_cache import QUANTIZED_DTYPES
from jaxpaged.metadata.checks import check_shape, shape_text

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def refuse(**arguments: Any) -> None:
    """Raise NotImplementedError for an argument that asks for something that no implementation has."""
    for name, value in arguments.items():
        if value:
            raise NotImplementedError(f"{name}: not supported, expected {type(value)()!r}, got {value!r}")


def refuse_descale(q_descale: Any) -> None:
    if q_descale is not None:
        raise NotImplementedError("q_descale: 8-bit queries are not supported, expected None")


def attention_options(
    q: torch.Tensor,
    num_reqs: int,
    *,
    softmax_scale: Any,
    causal: bool,
    window_size: Any,
    softcap: Any,
    alibi_slopes: torch.Tensor | None,
    s_aux: torch.Tensor | None,
) -> Options:
    """Options from the arguments of a FlashAttention function; `q` is [.., num_heads, head_size]."""
    num_heads, head_size = q.shape[-2:]
    check_slopes(alibi_slopes, num_reqs, num_heads)
    if s_aux is not None:
        check_activation("s_aux", s_aux, (num_heads,))
    return Options(
        scale=checked_scale(softmax_scale, head_size),
        causal=bool(causal),
        window=checked_window(window_size),
        soft_cap=checked_soft_cap(softcap),
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
    )


def check_caches(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, str]) -> None:
    """Raise unless `k` and `v` are caches [num_blocks, block_size, num_kv_heads, head_size] for these queries."""
    check_shape(names[0], k.shape, ("num_blocks", "block_size", "num_kv_heads", q.shape[-1]))
    check_shape(names[1], v.shape, (*k.shape[:3], "v_head_size"))
    check_heads(q, k.shape[2])
    if k.dtype == torch.uint8:
        raise TypeError(
            f"{names[0]}: uint8 doesn't say which 8-bit numbers it holds; view it as torch.float8_e4m3fn or float8_e5m2"
        )
    for name, x in zip(names, (k, v), strict=True):
        if x.dtype not in (q.dtype, torch.float32, *QUANTIZED_DTYPES) or x.dtype != k.dtype:
            raise TypeError(
                f"{name}: expected {q.dtype}, as q is, torch.float32 or an 8-bit dtype, the same for both, "
                f"got {x.dtype}"
            )


def cache_scale(name: str, descale: Any, cache: torch.Tensor, num_reqs: int) -> Any:
    """The scale of a cache [num_blocks, block_size, num_kv_heads, ..] from an engine's descale.

    Engines give per-tensor scales expanded to [num_reqs, num_kv_heads], and give 1 for caches of no 8-bit dtype.
    """
    if descale is None:
        return None
    if not isinstance(descale, int | float):
        check_tensors(**{name: descale})
        if descale.dtype != torch.float32:
            raise TypeError(f"{name}: expected torch.float32, got {descale.dtype}")
    if cache.dtype not in QUANTIZED_DTYPES:
        if not (descale == 1 if isinstance(descale, int | float) else bool((descale == 1).all())):
            raise ValueError(f"{name}: it belongs to 8-bit caches, expected None or 1 for a cache of {cache.dtype}")
        return None
    if isinstance(descale, int | float) or descale.numel() == 1:
        return descale
    if tuple(descale.shape) == (num_reqs, cache.shape[2]) and num_reqs:
        if descale.stride(0) != 0 and not torch.equal(descale, descale[:1].expand_as(descale)):
            raise NotImplementedError(f"{name}: a scale per request is not supported, expected equal rows")
        return descale[0]
    shapes = [(cache.shape[2],), tuple(cache.shape[:3])]
    if tuple(descale.shape) not in shapes:
        expected = " or ".join(map(shape_text, ((), (num_reqs, cache.shape[2]), *shapes)))
        raise ValueError(f"{name}: expected shape {expected}, got {shape_text(descale.shape)}")
    return descale


def finished(result: torch.Tensor, lse: torch.Tensor | None, out: torch.Tensor | None) -> Result:
    """The result, in `out` where there is one, with the lse where there is one."""
    if out is not None:
        result = out.copy_(result)
    return result if lse is None else (result, lse)
