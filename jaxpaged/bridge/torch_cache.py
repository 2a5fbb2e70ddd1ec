"""Writes to KV caches that PyTorch owns, in place and by PyTorch: on the CPU JAX can't write to memory it has imported.

The definitions are those of `jaxpaged.write_kv`, `copy_blocks` and `swap_blocks`, to the bit.
"""

import dataclasses
from typing import Any, Self

import numpy as np
import torch

from jaxpaged.bridge.dlpack import refuse_grad
from jaxpaged.metadata.checks import check_shape, shape_text
from jaxpaged.metadata.kv_cache import scale_ranks
from jaxpaged.metadata.layout import CacheDims, KVLayout, Which

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTIZED_DTYPES = (*FLOAT8_DTYPES, torch.int8)
_STORED = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
_ENGINE_NAMES = {dtype: name for name, dtype in _STORED.items()}
CACHE_DTYPE_NAMES = ", ".join(map(repr, _STORED))
"""What engines call the dtypes of 8-bit caches."""
Scale = float | torch.Tensor | None
_INT8_MAX = 127.0
_WHICH: tuple[Which, Which] = ("key", "value")


@dataclasses.dataclass(frozen=True)
class TorchCache:
    """The tensors of a KV cache, of any strides, with their layout and scales. Build it with `of`, which checks them.

    Attributes:
      key: the keys, or the tensor that holds both.
      value: the values; None when the layout is combined.
      dtype: of the numbers stored; float8 numbers may lie in tensors of uint8.
      k_scale, v_scale: float32 [], [num_kv_heads] or [num_blocks, block_size, num_kv_heads]; None stands for 1.
    """

    key: torch.Tensor
    value: torch.Tensor | None
    layout: KVLayout
    dims: CacheDims
    dtype: torch.dtype
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @classmethod
    def of(
        cls,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor | None = None,
        *,
        layout: str | KVLayout = "NHD",
        k_scale: Scale = None,
        v_scale: Scale = None,
        head_size: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """A cache over tensors; see `jaxpaged.bridge.dlpack.share_kv_cache` for the arguments."""
        layout = KVLayout.of(layout)
        _check_tensors(key_cache=key_cache, value_cache=value_cache)
        if value_cache is not None and layout.combined:
            raise ValueError(f"value_cache: layout {layout.name} holds keys and values in key_cache, expected None")
        dims = layout.dims(tuple(key_cache.shape), None if value_cache is None else tuple(value_cache.shape), head_size)
        stored = _stored_dtype(key_cache.dtype, dtype)
        if value_cache is not None and value_cache.dtype != key_cache.dtype:
            raise TypeError(f"value_cache: expected {key_cache.dtype}, the dtype of key_cache, got {value_cache.dtype}")
        scales = [_checked_scale(n, s, dims, stored) for n, s in (("k_scale", k_scale), ("v_scale", v_scale))]
        if stored == torch.int8 and any(scale is None for scale in scales):
            raise ValueError("k_scale, v_scale: an int8 cache needs both scales, got None")
        return cls(key_cache, value_cache, layout, dims, stored, scales[0], scales[1])

    @property
    def num_slots(self) -> int:
        return self.dims.num_blocks * self.dims.block_size

    def buffer(self, which: Which) -> torch.Tensor:
        """The tensor that holds the keys or the values; float8 as uint8, which torch can index."""
        tensor = self.key if which == "key" or self.value is None else self.value
        return tensor.view(torch.uint8) if tensor.dtype in FLOAT8_DTYPES else tensor

    def scale(self, which: Which) -> torch.Tensor | None:
        return self.k_scale if which == "key" else self.v_scale


def write_kv_(cache: TorchCache, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write new tokens' keys and values to their slots, in place.

    Args:
      cache: written in its own dtype: that of `key`, float32, or an 8-bit one; scales per token and head are renewed.
      key: [num_tokens, num_kv_heads, head_size] float32, bfloat16 or float16, of any strides.
      value: [num_tokens, num_kv_heads, v_head_size], the dtype of `key`.
      slot_mapping: [num_slots] int32 or int64. Negative slots and slots past the cache are skipped; the first min of
        `num_tokens` and `num_slots` tokens are written, the last of tokens with the same slot.

    Raises:
      TypeError, ValueError: an argument doesn't fit; nothing has been written then.
    """
    check_new_tokens(cache, key, value, slot_mapping)
    num_tokens = min(key.shape[0], slot_mapping.shape[0])
    slots = slot_mapping[:num_tokens]
    kept = _last_in_range(slots, cache.num_slots)
    if kept is not None:
        slots = slots[kept]
    blocks, offsets = (torch.from_numpy(x) for x in np.divmod(slots.numpy(), np.int64(cache.dims.block_size)))
    with torch.no_grad():
        for which, x in zip(_WHICH, (key, value), strict=True):
            stored, new_scale = _stored(cache, which, x[:num_tokens] if kept is None else x[kept])
            index = cache.layout.index(which, cache.dims, blocks, offsets)
            cache.buffer(which)[index] = _to_buffer_axes(stored, cache, which)
            scale = cache.scale(which)
            if new_scale is not None and scale is not None:
                scale[blocks, offsets] = new_scale


def copy_blocks_(cache: TorchCache, src_to_dst: torch.Tensor) -> None:
    """Copy blocks within a cache, in place, their scales included; see `swap_blocks_`."""
    swap_blocks_(cache, cache, src_to_dst)


def swap_blocks_(src: TorchCache, dst: TorchCache, src_to_dst: torch.Tensor) -> None:
    """Copy blocks of `src` into `dst`, in place, their scales included.

    Args:
      src, dst: caches of one layout and dtype whose blocks have the same shape.
      src_to_dst: [n, 2] int32 or int64 pairs of a source and a target block. All sources are read before any target is
        written; pairs with a block out of range are skipped; of pairs with the same target the last one counts.

    Raises:
      TypeError, ValueError: an argument doesn't fit; nothing has been written then.
    """
    for what, ours, theirs in (
        ("layout", src.layout.name, dst.layout.name),
        ("dtype", (src.dtype, src.key.dtype), (dst.dtype, dst.key.dtype)),
        ("block shape", dataclasses.replace(src.dims, num_blocks=0), dataclasses.replace(dst.dims, num_blocks=0)),
        ("x", src.key.shape[-1], dst.key.shape[-1]),
        ("scale shapes", scale_ranks(src), scale_ranks(dst)),
    ):
        if ours != theirs:
            raise ValueError(f"dst: expected the {what} of src, {ours}, got {theirs}")
    pairs = valid_pairs(src_to_dst, src.dims.num_blocks, dst.dims.num_blocks)
    with torch.no_grad():
        for which in _WHICH:
            old, new = (c.layout.index(which, c.dims, pairs[:, i]) for i, c in enumerate((src, dst)))
            dst.buffer(which)[new] = src.buffer(which)[old]
            source_scale, target_scale = src.scale(which), dst.scale(which)
            if source_scale is not None and target_scale is not None and source_scale.ndim == 3:
                target_scale[pairs[:, 1]] = source_scale[pairs[:, 0]]


def swap_tensor_(src: torch.Tensor, dst: torch.Tensor, src_to_dst: torch.Tensor) -> None:
    """`swap_blocks_` for tensors [num_blocks, ...], whatever a block holds; `src` and `dst` may be one tensor."""
    _check_tensors(src=src, dst=dst)
    if src.ndim == 0:
        raise ValueError("src: expected shape [num_blocks, ...], got []")
    check_shape("dst", dst.shape, ("num_blocks", *src.shape[1:]))
    if src.dtype != dst.dtype:
        raise TypeError(f"dst: expected {src.dtype}, the dtype of src, got {dst.dtype}")
    pairs = valid_pairs(src_to_dst, src.shape[0], dst.shape[0])
    if src.dtype in FLOAT8_DTYPES:  # torch can't index float8
        src, dst = src.view(torch.uint8), dst.view(torch.uint8)
    with torch.no_grad():
        dst[pairs[:, 1]] = src[pairs[:, 0]]


def valid_pairs(src_to_dst: torch.Tensor, num_src: int, num_dst: int) -> torch.Tensor:
    """The pairs [m, 2] int64 whose blocks exist, with one pair, the last, for each target."""
    _check_tensors(src_to_dst=src_to_dst)
    check_ints("src_to_dst", src_to_dst)
    check_shape("src_to_dst", src_to_dst.shape, ("n", 2))
    src = src_to_dst[:, 0]
    pairs = src_to_dst[(src >= 0) & (src < num_src)]
    kept = _last_in_range(pairs[:, 1], num_dst)
    return (pairs if kept is None else pairs[kept]).long()


def check_new_tokens(cache: TorchCache, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Raise unless `write_kv_` can write these tokens to the cache."""
    _check_tensors(key=key, value=value, slot_mapping=slot_mapping)
    if key.dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"key: expected one of {_names(ACTIVATION_DTYPES)}, got {key.dtype}")
    if value.dtype != key.dtype:
        raise TypeError(f"value: expected {key.dtype}, the dtype of key, got {value.dtype}")
    heads = cache.dims.num_kv_heads
    check_shape("key", key.shape, ("num_tokens", heads, cache.dims.head_size))
    check_shape("value", value.shape, (key.shape[0], heads, cache.dims.v_head_size))
    if cache.dtype not in (*QUANTIZED_DTYPES, key.dtype, torch.float32):
        raise TypeError(f"key: a cache of {cache.dtype} takes keys and values of its own dtype, got {key.dtype}")
    check_ints("slot_mapping", slot_mapping)
    check_shape("slot_mapping", slot_mapping.shape, ("num_slots",))


def quantize(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | float) -> torch.Tensor:
    """`jaxpaged.reference.quantize.quantize`, bit for bit; float8 as uint8."""
    scaled = x.float() / scale
    limit = _largest(dtype)
    if dtype == torch.int8:
        scaled = scaled.nan_to_num(nan=0.0, posinf=limit, neginf=-limit).round()
    stored = scaled.clamp(-limit, limit).to(dtype)
    if dtype == torch.int8:
        return stored
    bits = stored.view(torch.uint8)
    # torch writes NaN of float8_e5m2 as 0x7F or 0xFF, XLA as 0x7E or 0xFE.
    return bits - scaled.isnan().to(torch.uint8) if dtype == torch.float8_e5m2 else bits


def _row_scale(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Per row (last axis) the scale that makes its largest magnitude the largest of `dtype`; 1 for a row of zeros."""
    peak = x.float().abs().amax(-1)
    # XLA compiles a division by a constant to a product.
    scale = peak * float(np.float32(1) / np.float32(_largest(dtype)))
    return torch.where(peak > 0, scale.clamp_min(torch.finfo(torch.float32).tiny), 1.0)


def _largest(dtype: torch.dtype) -> float:
    return _INT8_MAX if dtype == torch.int8 else torch.finfo(dtype).max


def _stored(cache: TorchCache, which: Which, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [n, num_kv_heads, head_size] as the cache stores them, and their scales where each row has its own."""
    if cache.dtype not in QUANTIZED_DTYPES:
        return rows.to(cache.dtype), None
    scale = cache.scale(which)
    if scale is not None and scale.ndim == 3:
        new_scale = _row_scale(rows, cache.dtype)
        return quantize(rows, cache.dtype, new_scale[..., None]), new_scale
    if scale is None:
        return quantize(rows, cache.dtype, 1.0), None
    return quantize(rows, cache.dtype, scale[:, None] if scale.ndim == 1 else scale), None


def _to_buffer_axes(rows: torch.Tensor, cache: TorchCache, which: Which) -> torch.Tensor:
    """Rows [n, num_kv_heads, head_size] in the axis order that `layout.index(which, dims, blocks, slots)` selects."""
    axes = cache.layout.rest(which, "ns")
    order = ["h", "d"]
    if "x" in axes:
        order = ["h", "d", "x"]
        rows = rows.unflatten(-1, (-1, cache.buffer(which).shape[cache.layout.axes(which).index("x")]))
    return rows.permute(0, *(1 + order.index(axis) for axis in axes))


def _last_in_range(ids: torch.Tensor, size: int) -> torch.Tensor | None:
    """Positions of the ids in [0, size), of equal ones the last; None when that is all of them.

    With each id left once the order of writing doesn't matter, which torch doesn't define. NumPy is faster at this.
    """
    values = ids.numpy()
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    kept = (ordered >= 0) & (ordered < size)
    kept[:-1] &= ordered[1:] != ordered[:-1]
    return None if kept.all() else torch.from_numpy(order[kept])


def _stored_dtype(buffer_dtype: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    if buffer_dtype == torch.uint8:
        if dtype not in FLOAT8_DTYPES:
            raise TypeError(f"dtype: a cache of uint8 holds numbers of {_names(FLOAT8_DTYPES)}, got {dtype}")
        return dtype
    if buffer_dtype not in (*ACTIVATION_DTYPES, *QUANTIZED_DTYPES):
        expected = _names((*ACTIVATION_DTYPES, *QUANTIZED_DTYPES))
        raise TypeError(f"key_cache: expected one of {expected}, got {buffer_dtype}")
    if dtype not in (None, buffer_dtype):
        raise TypeError(f"key_cache: expected {dtype}, got {buffer_dtype}")
    return buffer_dtype


def _checked_scale(name: str, scale: Scale, dims: CacheDims, dtype: torch.dtype) -> torch.Tensor | None:
    if scale is None:
        return None
    if dtype not in QUANTIZED_DTYPES:
        raise ValueError(f"{name}: scales belong to 8-bit caches, expected None for a cache of {dtype}")
    if isinstance(scale, int | float):
        return torch.tensor(float(scale), dtype=torch.float32, device="cpu")
    _check_tensors(**{name: scale})
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: expected torch.float32, got {scale.dtype}")
    if scale.numel() == 1 and scale.ndim < 3:
        return scale.reshape(())
    shapes = [(dims.num_kv_heads,), (dims.num_blocks, dims.block_size, dims.num_kv_heads)]
    if tuple(scale.shape) not in shapes:
        expected = " or ".join(map(shape_text, ((), *shapes)))
        raise ValueError(f"{name}: expected shape {expected}, got {shape_text(scale.shape)}")
    return scale


def _check_tensors(**tensors: Any) -> None:
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x.device.type != "cpu":
            raise ValueError(f"{name}: expected a tensor on the CPU, got one on {x.device}")
        refuse_grad(x, name)


def stored_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    """The dtype of the numbers in a cache, by an engine's name; None for "auto", which is that of the activations."""
    if kv_cache_dtype == "auto":
        return None
    if kv_cache_dtype not in _STORED:
        raise ValueError(f"kv_cache_dtype: expected 'auto', {CACHE_DTYPE_NAMES}, got {kv_cache_dtype!r}")
    return _STORED[kv_cache_dtype]


def engine_name(dtype: torch.dtype) -> str:
    """What an engine calls a cache of a dtype: one name whose `stored_dtype` it is, or "auto"."""
    return _ENGINE_NAMES.get(dtype, "auto")


def check_ints(name: str, x: torch.Tensor) -> None:
    """Raise TypeError unless `x` is of int32 or int64."""
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected torch.int32 or torch.int64, got {x.dtype}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
