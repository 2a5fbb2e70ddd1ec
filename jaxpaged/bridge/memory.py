"""NumPy arrays on memory that is known by its address alone."""

from typing import Any

import numpy as np


class _Memory:
    """What `np.asarray` makes an array of; the array keeps this object, and so the owner."""

    def __init__(self, address: int, length: int, typestr: str, owner: Any):
        self.__array_interface__ = {"data": (address, False), "shape": (length,), "typestr": typestr, "version": 3}
        self.owner = owner


def array_at(address: int, length: int, typestr: str, owner: Any = None) -> np.ndarray:
    """`length` numbers from an address on.

    Args:
      typestr: their type as NumPy's array interface writes it, such as "<i4".
      owner: kept alive by the array; with None the caller sees to it that the memory outlives its use.
    """
    return np.asarray(_Memory(address, length, typestr, owner))
