"""Tiles of keys' or values' rows in shared memory and registers, on their way into a cache."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.checks import INT32_MAX
from jaxpaged.metadata.layout import Which
from jaxpaged.pallas.fragments import tiled_layout

TMA_BYTES = 16
"""TMA moves rows of a multiple of this."""
TMA_BOX = 256
"""Most elements along one axis that one TMA moves."""
TMA_ALIGNMENT = 128
"""What a TMA's address in shared memory is a multiple of."""
WARPS, LANES = 4, 32


def pieces(width: int) -> list[tuple[int, int]]:
    """Start and width of the columns of a row that are moved by one TMA each."""
    count = pl.cdiv(width, TMA_BOX)
    return [(i * (width // count), width // count) for i in range(count)]


def rows_step(width: int, itemsize: int) -> int:
    """Registers hold a multiple of this many rows of a piece of `width` elements; a power of two, at most 128.

    A lane holds 16 bytes of a row, and as many lanes as possible share a row.
    """
    return WARPS * LANES // math.gcd(width * itemsize // 16, LANES)


def rows_layout(width: int, itemsize: int) -> Any:
    """The layout of [rows, width] in registers, for rows a multiple of `rows_step`."""
    step, vector = rows_step(width, itemsize), 16 // itemsize
    rows = step // WARPS
    columns = LANES // rows * vector
    return tiled_layout(((step, columns), (rows, columns), (1, vector)), -6, (-4, -3))


def columns(start: int, width: int, index: Any) -> Any:
    """Columns of an array in global memory, for a TMA to or from shared memory that registers load or store.

    Mosaic may tile and swizzle such shared memory as it likes, and then asks for whole tiles of the array in global
    memory, too. It leaves the memory as it is where it can't tell what divides the first column.

    Args:
      index: any traced int32 from 0 on, such as a position in the grid.
    """
    nothing = lax.div(index, jnp.int32(INT32_MAX))
    return pl.ds(start + nothing, width)


def load(ref: Any, layout: Any) -> Any:
    """Shared memory in registers, also where banks conflict."""
    return plgpu.load(ref, layout=layout, optimized=False)


@dataclasses.dataclass(frozen=True)
class RowTile:
    """Some tokens' keys or values: rows token by token, then head by head, of `width` elements each.

    Attributes:
      dtype: of the rows as they come.
      kept_as: of the buffer they go to.
      stored: of the numbers that the buffer holds.
      scale: number of axes of the cache's scale: 0 per tensor, 1 per head, 3 per token and head; None without one.
    """

    which: Which
    tokens: int
    heads: int
    width: int
    dtype: Any
    kept_as: Any
    stored: Any
    scale: int | None

    @property
    def converted(self) -> bool:
        """Whether the rows change on their way."""
        return self.dtype != self.stored

    @property
    def pieces(self) -> list[tuple[int, int]]:
        return pieces(self.width)

    @property
    def num_rows(self) -> int:
        return self.tokens * self.heads

    @property
    def padded_rows(self) -> int:
        """Rows of the tile in shared memory; registers hold multiples of some number of rows."""
        step = rows_step(self.pieces[0][1], self._itemsize) if self.converted else 1
        return pl.cdiv(self.num_rows, step) * step

    @property
    def layout(self) -> Any:
        """Of a piece in registers."""
        return rows_layout(self.pieces[0][1], self._itemsize)

    @property
    def _itemsize(self) -> int:
        """Of the wider one of the dtypes: registers hold 16 bytes of a row at most on either side."""
        return max(jnp.dtype(self.dtype).itemsize, jnp.dtype(self.kept_as).itemsize)

    def scratch(self) -> dict[str, Any]:
        """The tile's shared memory and its barrier, by name."""
        rows = self.padded_rows
        refs: dict[str, Any] = {
            f"{self.which}_in": [plgpu.SMEM((rows, width), self.dtype) for _, width in self.pieces],
            f"{self.which}_barrier": plgpu.Barrier(num_arrivals=len(self.pieces)),
        }
        if self.converted:
            refs[f"{self.which}_out"] = [plgpu.SMEM((rows, width), self.kept_as) for _, width in self.pieces]
        if self.scale in (1, 3):
            refs[f"{self.which}_scales"] = plgpu.SMEM((rows,), jnp.float32)
        return refs

    @property
    def smem_bytes(self) -> int:
        row = self.width * (jnp.dtype(self.dtype).itemsize + self.converted * jnp.dtype(self.kept_as).itemsize) + 4
        return self.padded_rows * row + 6 * 1024  # refs begin at multiples of 1024 bytes

    @property
    def aligned(self) -> bool:
        """Whether each token's rows begin where a TMA may begin."""
        dtypes = (self.dtype, self.kept_as) if self.converted else (self.dtype,)
        sizes = [self.heads * width * jnp.dtype(dtype).itemsize for dtype in dtypes for _, width in self.pieces]
        return all(size % TMA_ALIGNMENT == 0 for size in sizes)

    def refusal(self, buffer_width: int) -> str | None:
        """Why TMA can't move these rows to a buffer whose last axis has `buffer_width` elements, or None."""
        if self.heads > TMA_BOX:
            return f"num_kv_heads: the kernel moves up to {TMA_BOX} heads, not {self.heads}"
        dtypes = (self.dtype, self.kept_as)
        widths = [(self.dtype, self.width), (self.kept_as, buffer_width)]
        widths += [(dtype, width) for dtype in dtypes for _, width in self.pieces]
        odd = [(dtype, width) for dtype, width in widths if width * jnp.dtype(dtype).itemsize % TMA_BYTES]
        if odd or self.width % len(self.pieces):
            return (
                f"head_size: the kernel moves rows of a multiple of {TMA_BYTES} bytes, "
                f"not {self.width} of {jnp.dtype(self.kept_as).name} in rows of {buffer_width}"
            )
        return None
