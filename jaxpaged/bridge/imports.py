"""JAX arrays on PyTorch's memory, made once and found again while it lives, without keeping it alive."""

import atexit
import weakref
from typing import Any, NamedTuple

import jax
import torch

from jaxpaged.bridge.dlpack import to_jax
from jaxpaged.bridge.memory import array_at, cuda_memory_at
from jaxpaged.bridge.process import forget_after_fork


class _Import(NamedTuple):
    """An array, and the memory that it lies on."""

    storage: "weakref.ref[Any]"
    array: jax.Array


_imports: dict[Any, _Import] = {}
forget_after_fork(_imports.clear)
atexit.register(_imports.clear)  # before JAX's backends go


def find(tensor: torch.Tensor, name: str = "tensor") -> jax.Array:
    """`to_jax` of a tensor, remembered by its memory, shape, strides, dtype and device.

    The array doesn't keep the memory from being freed, and is forgotten when that happens: whoever uses it sees to it
    that the memory lives until what reads it is done. What PyTorch has queued is waited for in the first call alone.

    Raises:
      ValueError: the memory can't be shared.
    """
    found = _imports.get(_key(tensor))
    if found is not None and _is_of(found, tensor):
        return found.array
    array = to_jax(unowned(tensor), name)
    keep(tensor, array)
    return array


def take(tensor: torch.Tensor, name: str = "tensor") -> jax.Array:
    """`find` of an array that is going to be donated: it is forgotten, and nobody else will find it."""
    found = _imports.pop(_key(tensor), None)
    return found.array if found is not None and _is_of(found, tensor) else to_jax(unowned(tensor), name)


def keep(tensor: torch.Tensor, array: jax.Array) -> None:
    """Remember an array on the memory of a tensor, such as what became of a donated one."""
    key = _key(tensor)

    def forget(storage: Any) -> None:
        found = _imports.get(key)
        if found is not None and found.storage is storage:
            _imports.pop(key, None)

    # PyTorch keeps the object for as long as the memory that it stands for.
    _imports[key] = _Import(weakref.ref(tensor.untyped_storage(), forget), array)


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory that does not keep it from being freed."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return tensor
    where = (storage.data_ptr(), storage.nbytes())
    if tensor.device.type == "cuda":
        bytes_there = torch.as_tensor(cuda_memory_at(*where), device=tensor.device)
    else:
        bytes_there = torch.from_numpy(array_at(*where, "|u1"))
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(bytes_there.untyped_storage(), *place)


def _key(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _is_of(found: _Import, tensor: torch.Tensor) -> bool:
    """Whether it is this memory, and no other that was allocated at its address later."""
    return found.storage() is tensor.untyped_storage() and not found.array.is_deleted()
