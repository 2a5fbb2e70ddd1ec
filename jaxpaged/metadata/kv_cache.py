"""KVCache: the buffers of a paged KV cache with their layout and scales, as a pytree."""

import dataclasses
import functools
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from jaxpaged.metadata.checks import check_dtype, check_positive, shape_text
from jaxpaged.metadata.layout import CacheDims, KVLayout

FLOAT8_DTYPES = tuple(jnp.dtype(d) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2))
QUANTIZED_DTYPES = (*FLOAT8_DTYPES, jnp.dtype(jnp.int8))
CACHE_DTYPES = (*(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16)), *QUANTIZED_DTYPES)
ScaleKind = Literal["tensor", "head", "token_head"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """A paged KV cache. Build it with `zeros` or `from_arrays`; all of its methods are pure.

    Attributes:
      key: the key buffer, or the one buffer that holds keys and values; shape by `layout`. float8 numbers may be kept
        as uint8: XLA works on arrays of float8 in another type, and so would copy the cache for each write on a CPU.
      value: the value buffer; None when `layout` is combined.
      k_scale, v_scale: float32 factors that turn stored 8-bit numbers into values: shape [] (per tensor),
        [num_kv_heads] (per head) or [num_blocks, block_size, num_kv_heads] (per token and head, renewed by each write).
        None stands for 1.
      layout: where keys and values lie.
      head_size: size of a key head; a `(2d)` row doesn't tell it.
      dtype: of the numbers stored.

    All other sizes are those of the buffers: within `shard_map` or `vmap` a cache is the part that is worked on there.
    """

    key: Any
    value: Any
    k_scale: Any
    v_scale: Any
    layout: KVLayout = dataclasses.field(metadata={"static": True})
    head_size: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: Any,
        *,
        layout: str | KVLayout = "NHD",
        v_head_size: int | None = None,
        scales: ScaleKind | None = None,
    ) -> Self:
        """An empty cache.

        Args:
          dtype: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 (both kept as uint8) or int8.
          layout: a `KVLayout` or its name.
          v_head_size: size of a value head; `head_size` when None.
          scales: for 8-bit dtypes, what a scale belongs to: "tensor", "head" or "token_head". Scales start at 1.
            int8 needs it.
        """
        sizes = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
            "v_head_size": head_size if v_head_size is None else v_head_size,
        }
        dims = CacheDims(**{name: check_positive(name, size) for name, size in sizes.items()})
        check_dtype("dtype", dtype, CACHE_DTYPES)
        layout = KVLayout.of(layout)
        key_shape, value_shape = layout.shapes(dims, x=max(1, 16 // jnp.dtype(dtype).itemsize))
        scale_shapes = {
            None: None,
            "tensor": (),
            "head": (num_kv_heads,),
            "token_head": (num_blocks, block_size, num_kv_heads),
        }
        if scales not in scale_shapes:
            raise ValueError(f"scales: expected 'tensor', 'head', 'token_head' or None, got {scales!r}")
        if scales is not None and jnp.dtype(dtype) not in QUANTIZED_DTYPES:
            raise ValueError(
                f"scales: they belong to 8-bit caches, expected None for {jnp.dtype(dtype).name}, got {scales!r}"
            )
        scale_shape = scale_shapes[scales]
        kept_as = jnp.uint8 if jnp.dtype(dtype) in FLOAT8_DTYPES else dtype
        return cls.from_arrays(
            jnp.zeros(key_shape, kept_as),
            None if value_shape is None else jnp.zeros(value_shape, kept_as),
            layout=layout,
            head_size=head_size,
            dtype=dtype,
            k_scale=None if scale_shape is None else jnp.ones(scale_shape, jnp.float32),
            v_scale=None if scale_shape is None else jnp.ones(scale_shape, jnp.float32),
        )

    @classmethod
    def from_arrays(
        cls,
        key_cache: Any,
        value_cache: Any = None,
        *,
        layout: str | KVLayout = "NHD",
        k_scale: Any = None,
        v_scale: Any = None,
        head_size: int | None = None,
        dtype: Any = None,
    ) -> Self:
        """A cache over buffers that exist: nothing is copied.

        Args:
          key_cache: the key buffer, or with `value_cache=None` the one buffer that holds both.
          layout: a `KVLayout` or its name; its axes give the buffers' shapes.
          k_scale, v_scale: see the class; floats are taken as per-tensor scales.
          head_size: needed for a `(2d)` row whose key and value heads differ in size.
          dtype: float8_e4m3fn or float8_e5m2 for buffers of uint8 that hold such numbers; else the buffers' own.
        """
        layout = KVLayout.of(layout)
        if value_cache is None and not layout.combined:
            raise ValueError(
                f"layout: value_cache=None means that one buffer holds keys and values, "
                f"but {layout.name} keeps them apart"
            )
        if value_cache is not None and layout.combined:
            raise ValueError(f"value_cache: layout {layout.name} holds keys and values in key_cache, expected None")
        for name, buffer in (("key_cache", key_cache), ("value_cache", value_cache)):
            if buffer is not None or name == "key_cache":
                _check_is_array(name, buffer)
        value_shape = None if value_cache is None else tuple(value_cache.shape)
        dims = layout.dims(tuple(key_cache.shape), value_shape, head_size)
        dtype = _stored_dtype(key_cache.dtype, dtype)
        if value_cache is not None:
            check_dtype("value_cache", value_cache.dtype, [key_cache.dtype])
        quantized = dtype in QUANTIZED_DTYPES
        scales = [
            _check_scale(name, scale, dims, quantized) for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
        ]
        if dtype == jnp.int8 and any(scale is None for scale in scales):
            raise ValueError("k_scale, v_scale: an int8 cache needs both scales, got None")
        return cls(key_cache, value_cache, scales[0], scales[1], layout, dims.head_size, dtype)

    @functools.cached_property
    def dims(self) -> CacheDims:
        """The sizes, read off the buffers."""
        value_shape = None if self.value is None else tuple(self.value.shape)
        return self.layout.dims(tuple(self.key.shape), value_shape, self.head_size)

    @property
    def quantized(self) -> bool:
        """Whether the cache holds 8-bit numbers to be multiplied by scales."""
        return self.dtype in QUANTIZED_DTYPES

    @property
    def num_blocks(self) -> int:
        return self.dims.num_blocks

    @property
    def block_size(self) -> int:
        return self.dims.block_size

    @property
    def num_kv_heads(self) -> int:
        return self.dims.num_kv_heads

    @property
    def v_head_size(self) -> int:
        return self.dims.v_head_size

    @property
    def num_slots(self) -> int:
        """Number of tokens that the cache has room for."""
        return self.num_blocks * self.block_size

    def buffer(self, which: Literal["key", "value"]) -> Any:
        """The buffer that holds the keys or the values."""
        return self.key if which == "key" or self.value is None else self.value

    def scale(self, which: Literal["key", "value"]) -> Any:
        return self.k_scale if which == "key" else self.v_scale


def _stored_dtype(buffer_dtype: Any, dtype: Any) -> Any:
    if buffer_dtype == jnp.uint8:
        if dtype is None:
            raise TypeError(
                "dtype: a cache of uint8 holds float8_e4m3fn or float8_e5m2 numbers, expected one, got None"
            )
        check_dtype("dtype", dtype, FLOAT8_DTYPES)
        return jnp.dtype(dtype)
    check_dtype("key_cache", buffer_dtype, CACHE_DTYPES)
    if dtype is not None:
        check_dtype("dtype", dtype, [buffer_dtype])
    return jnp.dtype(buffer_dtype)


def _check_is_array(name: str, x: Any) -> None:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}")


def _check_scale(name: str, scale: Any, dims: CacheDims, quantized: bool) -> Any:
    if scale is None:
        return None
    if not quantized:
        raise ValueError(f"{name}: scales belong to 8-bit caches, expected None for this cache's dtype")
    if isinstance(scale, int | float):
        return jnp.float32(scale)
    _check_is_array(name, scale)
    check_dtype(name, scale.dtype, [jnp.float32])
    shapes = [(), (dims.num_kv_heads,), (dims.num_blocks, dims.block_size, dims.num_kv_heads)]
    if tuple(scale.shape) not in shapes:
        raise ValueError(
            f"{name}: expected shape {' or '.join(map(shape_text, shapes))}, got {shape_text(scale.shape)}"
        )
    return scale


def scale_ranks(cache: Any) -> tuple[int | None, int | None]:
    """How many axes the scales of a KVCache, or of one that PyTorch owns, have: None for a scale that there isn't."""
    k, v = (None if scale is None else scale.ndim for scale in (cache.k_scale, cache.v_scale))
    return k, v
