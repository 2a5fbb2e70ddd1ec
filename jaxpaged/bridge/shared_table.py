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

_WORD_BYTES = 4
_PAGE_WORDS = 4096 // _WORD_BYTES  # no system maps memory in smaller units


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedTable:
    """A table of ints on PyTorch's memory, for a jitted function to read.

    JAX shares memory of the CPU only from a multiple of 64 bytes on, and a part of a table, say
    `tables[num_prefills:]`, may start anywhere. So `head` and `tail` cover the whole pages of memory around the table,
    all of which the process may read; `read` touches the table alone. How many pages a table lies on depends on its
    address, but the length of two windows, which may overlap, does not: the next step's table needs no other program.

    Attributes:
      head, tail: [n] int32, the first and the last of the pages. n is a power of two of pages.
      place: [7] int32: the table's first and last word, counted from the start of `head`; the first word of `tail`; the
        table's two strides in words, its rows and its columns.
      words_per_int: 1 for int32, 2 for int64.
    """

    head: Any
    tail: Any
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
            nothing = np.zeros(_PAGE_WORDS, np.int32)
            return cls(nothing, nothing, np.zeros(7, np.int32), words_per_int)
        strides = [words_per_int * stride for stride in table.stride()]
        num_words = sum(stride * (size - 1) for stride, size in zip(strides, table.shape, strict=True)) + words_per_int
        page, first = divmod(table.data_ptr() // _WORD_BYTES, _PAGE_WORDS)
        num_pages = -(-(first + num_words) // _PAGE_WORDS)
        # The table needs so many pages, or one more: twice the power of two that is not above them is enough.
        window = 1 << (-(-num_words // _PAGE_WORDS)).bit_length() - 1
        skipped = num_pages - window
        place = [first, first + num_words - words_per_int, skipped * _PAGE_WORDS, *strides, *table.shape]
        head, tail = (
            array_at(start * _PAGE_WORDS * _WORD_BYTES, window * _PAGE_WORDS, "<i4", owner=table)
            for start in (page, page + skipped)
        )
        return cls(head, tail, np.array(place, np.int32), words_per_int)

    def read(self, rows: int, columns: int) -> Any:
        """The table as [rows, columns] int32, cut or filled up with -1; int64 that int32 can't hold is -1 as well."""
        first, last, tail_start, row_stride, column_stride, num_rows, num_columns = self.place
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        column = jnp.arange(columns, dtype=jnp.int32)[None, :]
        inside = (row < num_rows) & (column < num_columns)
        at = jnp.where(inside, first + row * row_stride + column * column_stride, first)
        in_head = at < len(self.head)
        from_head = self._numbers(self.head, jnp.where(in_head, at, first))
        from_tail = self._numbers(self.tail, jnp.where(in_head, last, at) - tail_start)
        return jnp.where(inside, jnp.where(in_head, from_head, from_tail), -1)

    def _numbers(self, words: Any, at: Any) -> Any:
        return words[at] if self.words_per_int == 1 else words_to_slots(words[jnp.stack([at, at + 1], -1)])
