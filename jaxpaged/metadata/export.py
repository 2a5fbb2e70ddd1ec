"""How `jax.export` writes down the package's pytrees: so a step over a cache can be reloaded in another process."""

import json
from typing import Any

import jax.numpy as jnp
from jax import export

from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.metadata.layout import KVLayout


def _write_cache(static: tuple[KVLayout, int, Any]) -> bytes:
    layout, head_size, dtype = static
    return json.dumps([layout.key, layout.value, head_size, dtype.name]).encode()


def _read_cache(data: bytes | bytearray) -> tuple[KVLayout, int, Any]:
    key, value, head_size, dtype = json.loads(bytes(data))
    return KVLayout(key, value), head_size, jnp.dtype(dtype)


def _write_batch(static: tuple[int | None, bool]) -> bytes:
    return json.dumps(static).encode()


def _read_batch(data: bytes | bytearray) -> tuple[int | None, bool]:
    max_query_len, shares_prefix = json.loads(bytes(data))
    return max_query_len, shares_prefix


def register() -> None:
    """Tell `jax.export`; called once, when the package is imported."""
    export.register_pytree_node_serialization(
        KVCache, serialized_name="jaxpaged.KVCache", serialize_auxdata=_write_cache, deserialize_auxdata=_read_cache
    )
    export.register_pytree_node_serialization(
        PagedBatch,
        serialized_name="jaxpaged.PagedBatch",
        serialize_auxdata=_write_batch,
        deserialize_auxdata=_read_batch,
    )
