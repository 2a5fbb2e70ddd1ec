"""SharedTable: block tables that JAX reads where PyTorch keeps them, whatever their address and strides."""

import dataclasses
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.bridge.dlpack import words_to_slots
from jaxpaged.bridge.memory import array_at
from jaxpaged.metadata.checks import shape_text

if TYPE_CHECKING:
    import torch

_PAGE_BYTES = 4096  # no system maps memory in smaller units
_WORD_BYTES = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedTable:
    """A table of ints on PyTorch's memory, for a jitted function to read.

    JAX shares memory of the CPU only from a multiple of 64 bytes on, and a part of a table, say
    `tables[num_prefills:]`, may start anywhere. So `words` covers the whole pages of memory around the table, all of
    which the process may read; `read` touches the table alone.

    Attributes:
      words: [n] int32, the pages.
      place: [5] int32: the table's first word, its two strides in words, its rows and its columns.
      words_per_int: 1 for int32, 2 for int64.
    """

    words: Any
    place: Any
    words_per_int: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, table: "torch.Tensor", name: str = "table") -> Self:
        """The table [rows, columns] int32 or int64 on the CPU.

        Raises:
          ValueError: it is something else.
        """
        dtype = str(table.dtype).removeprefix("torch.")
        if dtype not in ("int32", "int64") or table.device.type != "cpu" or table.ndim != 2:
            raise ValueError(
                f"{name}: expected a table [rows, columns] of int32 or int64 on the CPU, got {shape_text(table.shape)} "
                f"{dtype} on {table.device}"
            )
        words_per_int = table.element_size() // _WORD_BYTES
        if table.numel() == 0:
            return cls(np.zeros(1, np.int32), np.zeros(5, np.int32), words_per_int)
        strides = [words_per_int * stride for stride in table.stride()]
        num_words = sum(stride * (size - 1) for stride, size in zip(strides, table.shape, strict=True)) + words_per_int
        address = table.data_ptr()
        start = address // _PAGE_BYTES * _PAGE_BYTES
        end = -(-(address + num_words * _WORD_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        place = np.array([(address - start) // _WORD_BYTES, *strides, *table.shape], np.int32)
        return cls(array_at(start, (end - start) // _WORD_BYTES, "<i4", owner=table), place, words_per_int)

    def read(self, rows: int, columns: int) -> Any:
        """The table as [rows, columns] int32, cut or filled up with -1; int64 that int32 can't hold is -1 as well."""
        first, row_stride, column_stride, num_rows, num_columns = self.place
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        column = jnp.arange(columns, dtype=jnp.int32)[None, :]
        inside = (row < num_rows) & (column < num_columns)
        at = jnp.where(inside, first + row * row_stride + column * column_stride, first)
        if self.words_per_int == 1:
            return jnp.where(inside, self.words[at], -1)
        return jnp.where(inside, words_to_slots(self.words[jnp.stack([at, at + 1], -1)]), -1)
