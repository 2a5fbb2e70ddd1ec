"""Arrays on memory that is known by its address alone."""

from typing import Any

import numpy as np


class _Memory:
    """What `np.asarray` makes an array of; the array keeps this object, and so the owner."""

    def __init__(self, address: int, length: int, typestr: str, owner: Any):
        self.__array_interface__ = {"data": (address, False), "shape": (length,), "typestr": typestr, "version": 3}
        self.owner = owner


class _CudaMemory:
    """What `torch.as_tensor` makes a tensor of bytes of, without a copy."""

    def __init__(self, address: int, length: int):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (length,), "typestr": "|u1", "version": 2}


def array_at(address: int, length: int, typestr: str, owner: Any = None) -> np.ndarray:
    """`length` numbers from an address on.

    Args:
      typestr: their type as NumPy's array interface writes it, such as "<i4".
      owner: kept alive by the array; with None the caller sees to it that the memory outlives its use.
    """
    return np.asarray(_Memory(address, length, typestr, owner))


def cuda_memory_at(address: int, length: int) -> Any:
    """Bytes of a GPU's memory, as `torch.as_tensor` takes them; the caller sees to it that they outlive their use."""
    return _CudaMemory(address, length)
