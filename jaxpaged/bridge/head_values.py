"""ALiBi's slopes and sinks as the kernels take them, made once for each tensor of a layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from jaxpaged.bridge.decode_calls import by_column

_made: Any = WeakIdKeyDictionary()


def compact(x: torch.Tensor | None) -> torch.Tensor | None:
    """Values as compact float32: the tensor itself if it is that."""
    return x if x is None or (x.dtype == torch.float32 and x.is_contiguous()) else _once(x, "compact", _as_float32)


def by_column_once(x: torch.Tensor | None, *, num_kv_heads: int, max_query_len: int, name: str) -> torch.Tensor | None:
    """`decode_calls.by_column`, remembered until the tensor is written to."""
    if x is None:
        return None
    how: dict[str, Any] = {"num_kv_heads": num_kv_heads, "max_query_len": max_query_len, "name": name}
    return _once(x, (num_kv_heads, max_query_len), lambda x: by_column(x, **how))


def on_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values where kernels read them, copied there once: the tensor itself if it is there."""
    return x if x.device == device else _once(x, device, lambda x: x.to(device))


def _as_float32(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous()


def _once(x: torch.Tensor, key: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if x.is_inference():  # these don't tell when they are written to
        return make(x)
    found = _made.get(x)
    if found is None or found[0] != x._version:
        found = (x._version, {})
    made = found[1].get(key)
    if made is None:
        made = make(x)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return made  # it is computed when the graph is replayed, and not before
        found[1][key] = made
        _made[x] = found
    return made
