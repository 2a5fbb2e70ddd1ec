"""Memory shared between PyTorch, NumPy and JAX: every function returns a view of the memory it got, or raises.

On a GPU, what PyTorch's current stream has to do is waited for by what uses the JAX array, and the other way round, by
the GPU itself.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.bridge.strides import axes_in_memory, compact_order, memory_layout, one_buffer
from jaxpaged.metadata.checks import shape_text
from jaxpaged.metadata.kv_cache import FLOAT8_DTYPES, KVCache
from jaxpaged.metadata.layout import KVLayout

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Bytes: XLA on the CPU copies memory that starts elsewhere than at a multiple."""
GPU_ALIGNMENT = 16
"""Bytes: XLA's programs on a GPU refuse memory that starts elsewhere than at a multiple."""

_SMALL_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "bool")
_X64_DTYPES = ("int64", "float64")
# NumPy knows these by their bits alone, so tensors pass through an integer type of their size.
_BITS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def to_jax(x: Any, name: str = "tensor") -> jax.Array:
    """A JAX array on the memory of `x`.

    The array is a view: what PyTorch or NumPy later writes to `x` shows in it, so nothing may write there while a
    computation that reads it runs.

    Args:
      x: tensor or NumPy array with compact strides, of float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8,
        uint8, int32 or bool, and of int64 or float64 where JAX has x64 enabled; it starts at a multiple of 64 bytes on
        the CPU, of 16 on a GPU. A JAX array is returned as it is.
      name: what messages call it.

    Raises:
      ValueError: the memory can't be shared; the message says what to change.
      RuntimeError: PyTorch captures a CUDA graph.
    """
    if isinstance(x, jax.Array):
        return x
    _check_kind(x, name)
    if _on_gpu(x):
        refuse_capture(x.device, name)
    x = _without_grad(x, name)
    check_shareable(x, name)
    try:
        array = _imported(x, name)
    except (BufferError, RuntimeError) as error:
        raise ValueError(f"{name}: JAX can't share its memory: {error}") from error
    if x.size != 0 if isinstance(x, np.ndarray) else x.numel() != 0:
        _check_pointer(name, array.unsafe_buffer_pointer(), _pointer(x))
    return array


def to_torch(array: Any, name: str = "array") -> "torch.Tensor":
    """A tensor on the memory of a NumPy array, or of a JAX array on one device.

    JAX takes its arrays for immutable: write to the tensor only when nothing uses the JAX array any more. On a GPU, JAX
    knows nothing of what PyTorch's streams still do with the tensor when it is freed: keep it until they are done.

    Raises:
      ValueError: the memory can't be shared.
      RuntimeError: PyTorch captures a CUDA graph.
    """
    import torch

    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, np.ndarray):
        bits = _BITS.get(array.dtype.name)
        if bits is None:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(bits)).view(getattr(torch, array.dtype.name))
    devices = array.devices()
    if len(devices) != 1:
        raise ValueError(f"{name}: expected an array on one device, got one on {len(devices)}")
    (device,) = devices
    if device.platform in ("gpu", "cuda"):
        refuse_capture(torch.device("cuda", device.local_hardware_id), name)
    try:
        tensor = torch.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name}: PyTorch can't share its memory: {error}") from error
    if tensor.numel():
        _check_pointer(name, array.unsafe_buffer_pointer(), tensor.data_ptr())
    return tensor


def on_cpu() -> Any:
    """A context in which NumPy arrays stay on the CPU: where JAX has a GPU as well, they would go there."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def to_numpy(x: Any, name: str = "tensor") -> np.ndarray:
    """A NumPy array on the memory of a CPU tensor, of any strides, or of a JAX array on the CPU (then read-only).

    Raises:
      ValueError: the memory can't be shared.
    """
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, jax.Array):
        view = np.asarray(x)
        if view.size:
            _check_pointer(name, x.unsafe_buffer_pointer(), view.ctypes.data)
        return view
    _check_kind(x, name)
    x = _without_grad(x, name)
    if x.device.type != "cpu":
        raise ValueError(
            f"{name}: NumPy shares memory of the CPU alone, got a tensor on {x.device}; copy it with .cpu()"
        )
    bits = _BITS.get(_dtype_name(x))
    if bits is None:
        return x.numpy()
    import torch

    return x.view(getattr(torch, bits)).numpy().view(jnp.dtype(_dtype_name(x)))


def physical_order(tensor: Any) -> tuple[Any, tuple[int, ...]]:
    """The tensor with its axes in the order in which they lie in memory, outermost first, and that permutation.

    A transposition of a compact tensor becomes compact. Axes of size 1 stay next to their neighbours.

    Returns:
      `tensor.permute(permutation)`, a view, and `permutation`.
    """
    permutation = compact_order(tensor)
    return tensor.permute(permutation), permutation


def int64_words(tensor: "torch.Tensor", name: str = "tensor") -> "torch.Tensor":
    """An int64 tensor [...] seen as int32 [..., 2], low word first: JAX without x64 can share this, but no int64."""
    import torch

    if tensor.dtype != torch.int64:
        raise ValueError(f"{name}: expected int64, got {_dtype_name(tensor)}")
    return tensor.unsqueeze(-1).view(torch.int32)


def words_to_slots(words: Any) -> Any:
    """Slots (or blocks) [...] int32 from the words [..., 2] of an int64 array, for use under `jit`.

    Numbers that int32 can't hold become -1: they are out of any cache's range, and negative ones are skipped.
    """
    low, high = words[..., 0], words[..., 1]
    return jnp.where((high == 0) & (low >= 0), low, -1)


def share_kv_cache(
    key_cache: "torch.Tensor",
    value_cache: "torch.Tensor | None" = None,
    *,
    layout: str | KVLayout = "NHD",
    k_scale: Any = None,
    v_scale: Any = None,
    head_size: int | None = None,
    dtype: Any = None,
) -> KVCache:
    """A KVCache on the memory of an engine's cache tensors.

    The tensors may be any transposition of what lies in memory, and keys and values may be views of one buffer that
    holds both, say the halves of `[n, 2, s, h, d]` or of rows `[n, h, s, 2 * d]`: this is seen from their strides, and
    then the whole buffer is shared, once. The result's layout says how the memory is ordered, so it may differ from
    `layout`. float8 buffers are kept as uint8 with the cache's `dtype` float8.

    Args:
      key_cache: the keys, or with `value_cache=None` the tensor that holds both.
      value_cache: the values.
      layout: the axes of the tensors as given, a `KVLayout` or its name.
      k_scale, v_scale: numbers, or float32 tensors of one element, [num_kv_heads] (copied where they are not aligned)
        or [num_blocks, block_size, num_kv_heads].
      head_size: needed for a `(2d)` row whose key and value heads differ in size.
      dtype: float8_e4m3fn or float8_e5m2 for tensors of uint8 that hold such numbers.

    Raises:
      TypeError, ValueError: the tensors don't fit the layout, or their memory can't be shared.
    """
    how = {"layout": layout, "k_scale": k_scale, "v_scale": v_scale, "head_size": head_size, "dtype": dtype}
    cache = tensor_cache(key_cache, value_cache, **how)
    return dataclasses.replace(
        cache,
        key=to_jax(cache.key, "key_cache"),
        value=None if cache.value is None else to_jax(cache.value, "value_cache"),
        k_scale=share_scale("k_scale", cache.k_scale),
        v_scale=share_scale("v_scale", cache.v_scale),
    )


def tensor_cache(
    key_cache: "torch.Tensor",
    value_cache: "torch.Tensor | None" = None,
    *,
    layout: str | KVLayout = "NHD",
    k_scale: Any = None,
    v_scale: Any = None,
    head_size: int | None = None,
    dtype: Any = None,
) -> KVCache:
    """`share_kv_cache` before JAX has seen the memory: a KVCache whose buffers and scales are tensors.

    They are views of those given, in the order in which they lie in memory, so that XLA need not transpose them. Such a
    cache is an argument for `jaxpaged.bridge.torch_call.torch_call`; JAX's own functions don't take it.
    """
    layout = KVLayout.of(layout)
    for name, x in (("key_cache", key_cache), ("value_cache", value_cache)):
        if name == "key_cache" or x is not None:
            _check_kind(x, name)
    if value_cache is None and not layout.combined:
        raise ValueError(f"value_cache: layout {layout.name} keeps values in a tensor of their own, got None")
    if value_cache is not None and layout.combined:
        raise ValueError(f"value_cache: layout {layout.name} holds keys and values in key_cache, expected None")
    dims = layout.dims(tuple(key_cache.shape), None if value_cache is None else tuple(value_cache.shape), head_size)
    key_cache, stored_dtype = _as_stored("key_cache", key_cache, dtype)
    if value_cache is not None:
        value_cache, value_dtype = _as_stored("value_cache", value_cache, dtype)
        if (value_cache.dtype, value_dtype) != (key_cache.dtype, stored_dtype):
            raise TypeError(f"value_cache: expected dtype {_dtype_name(key_cache)}, got {_dtype_name(value_cache)}")
    key, value, memory = _buffers(key_cache, value_cache, layout)
    leaves = {"k_scale": _scale_leaf(k_scale), "v_scale": _scale_leaf(v_scale)}
    shapes = KVCache.from_arrays(
        _shape(key),
        _shape(value),
        layout=memory,
        **{name: _shape(scale) for name, scale in leaves.items()},
        head_size=dims.head_size,
        dtype=stored_dtype,
    )
    return dataclasses.replace(shapes, key=key, value=value, **leaves)


def _buffers(key: Any, value: Any, layout: KVLayout) -> tuple[Any, Any, KVLayout]:
    """The tensors of one buffer or two in the order of memory, and how they lie there."""
    key_axes, value_axes = layout.axes("key"), layout.axes("value")
    if value is not None:
        whole = one_buffer(key, value, key_axes, value_axes)
        if whole is not None:
            return _checked("key_cache, value_cache", whole[0]), None, memory_layout(whole[1], None)
    key, key_axes = axes_in_memory(key, key_axes)
    if value is None:
        return _checked("key_cache", key), None, memory_layout(key_axes, None)
    value, value_axes = axes_in_memory(value, value_axes)
    return _checked("key_cache", key), _checked("value_cache", value), memory_layout(key_axes, value_axes)


def _checked(name: str, tensor: Any) -> Any:
    check_shareable(tensor, name)
    return tensor


def _scale_leaf(scale: Any) -> Any:
    """A scale as an array or a tensor; numbers and tensors of one element are per tensor."""
    if isinstance(scale, int | float):
        return np.asarray(scale, np.float32)
    if scale is None or isinstance(scale, np.ndarray):
        return scale
    return scale.reshape(()) if scale.numel() == 1 and scale.ndim < 3 else scale


def _shape(x: Any) -> Any:
    return None if x is None else jax.ShapeDtypeStruct(tuple(map(int, x.shape)), _dtype_name(x))


def _as_stored(name: str, tensor: Any, dtype: Any) -> tuple[Any, Any]:
    """The tensor, float8 as uint8, and the dtype of its numbers where that is float8."""
    tensor_dtype = _dtype_name(tensor)
    dtype = None if dtype is None else jnp.dtype(str(dtype).removeprefix("torch."))
    if tensor_dtype not in [d.name for d in FLOAT8_DTYPES]:
        return tensor, dtype
    import torch

    if dtype not in (None, jnp.dtype(tensor_dtype)):
        raise TypeError(f"{name}: expected {dtype.name} numbers, as dtype says, got {tensor_dtype}")
    return tensor.view(torch.uint8), jnp.dtype(tensor_dtype)


def share_scale(name: str, scale: Any) -> Any:
    """A scale of a cache as an array on the engine's memory; numbers and tensors of one element are per tensor."""
    scale = _scale_leaf(scale)
    if scale is None or isinstance(scale, np.ndarray):
        return scale
    if scale.ndim > 1 or scale.device.type != "cpu":
        return to_jax(scale, name)
    view = to_numpy(scale, name)
    if view.ndim == 0:
        return view
    aligned = scale.is_contiguous() and scale.data_ptr() % ALIGNMENT == 0
    return to_jax(scale, name) if aligned else jnp.array(view)  # the only copy here: of one number a head


def refuse_capture(device: "torch.device", name: str) -> None:
    """Raise RuntimeError while PyTorch captures a CUDA graph on the current stream of a device."""
    import torch

    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name}: JAX runs its programs on streams of XLA's, which no CUDA graph of PyTorch's can capture; "
                f"call it outside of the graph, or use torch.ops.jaxpaged inside"
            )


def _imported(x: Any, name: str) -> jax.Array:
    """From a GPU by DLPack: PyTorch shares memory of its current device alone, and orders it after the current stream.

    From the CPU as a NumPy array, which JAX releases in a thread of Python's. A tensor of DLPack's may be released by a
    thread of XLA's, and where Python is about to end just then, the process ends with an abort.
    """
    if not _on_gpu(x):
        return jax.device_put(to_numpy(x, name), jax.local_devices(backend="cpu")[0])
    import torch

    with torch.cuda.device(x.device):
        return jax.dlpack.from_dlpack(x, copy=False)


def _check_kind(x: Any, name: str) -> None:
    if not isinstance(x, np.ndarray) and not (hasattr(x, "data_ptr") and hasattr(x, "requires_grad")):
        raise TypeError(f"{name}: expected a tensor or an array, got {type(x).__name__}")


def refuse_grad(x: "torch.Tensor", name: str) -> None:
    """Raise ValueError for a tensor whose gradient PyTorch keeps track of."""
    import torch

    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: it requires grad, and gradients are not supported; call under torch.no_grad() or pass .detach()"
        )


def _without_grad(x: Any, name: str) -> Any:
    if isinstance(x, np.ndarray) or not x.requires_grad:
        return x
    refuse_grad(x, name)
    return x.detach()


def check_shareable(x: Any, name: str) -> None:
    """Raise ValueError for a tensor or a NumPy array whose memory JAX can't share."""
    dtype = _dtype_name(x)
    if dtype in _X64_DTYPES and not jax.config.jax_enable_x64:
        hint = "view it with int64_words, " if dtype == "int64" else ""
        raise ValueError(f"{name}: JAX has no {dtype} while x64 is off; {hint}convert it, or set jax_enable_x64")
    if dtype not in (*_SMALL_DTYPES, *_X64_DTYPES):
        raise ValueError(f"{name}: expected one of {', '.join(_SMALL_DTYPES)}, got {dtype}")
    contiguous = x.flags.c_contiguous if isinstance(x, np.ndarray) else x.is_contiguous()
    if not contiguous:
        strides = x.strides if isinstance(x, np.ndarray) else x.stride()
        raise ValueError(
            f"{name}: JAX shares only compact memory, got shape {shape_text(x.shape)} with strides "
            f"{shape_text(strides)}; undo a transposition with physical_order, or pass the whole tensor that this is a "
            f"part of"
        )
    place, alignment = ("a GPU", GPU_ALIGNMENT) if _on_gpu(x) else ("the CPU", ALIGNMENT)
    if _pointer(x) % alignment:
        raise ValueError(
            f"{name}: JAX shares memory of {place} only from a multiple of {alignment} bytes on, got an address "
            f"{_pointer(x) % alignment} bytes past one; pass the whole tensor that this is a part of, or allocate "
            f"it aligned (torch.empty does)"
        )


def _check_pointer(name: str, got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(f"{name}: its memory was copied instead of shared (at {got:#x}, expected {expected:#x})")


def _on_gpu(x: Any) -> bool:
    return not isinstance(x, np.ndarray) and x.device.type == "cuda"


def _pointer(x: Any) -> int:
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()


def _dtype_name(x: Any) -> str:
    return x.dtype.name if isinstance(x, np.ndarray) else str(x.dtype).removeprefix("torch.")
