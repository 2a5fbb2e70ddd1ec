"""Tiles of consecutive positions of a request, brought block by block from a paged cache to shared memory."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.layout import CacheDims, KVLayout, Which
from jaxpaged.pallas.mosaic import Interpreter
from jaxpaged.pallas.paged_rows import rows_index

CHUNK = 64
"""Columns of a head that lie together in shared memory: 128 bytes of 16-bit numbers, a swizzled row."""


def chunk_columns(dtype: Any) -> int:
    """Columns of numbers of any type that fill a swizzled row."""
    return 128 // jnp.dtype(dtype).itemsize


def swizzled(dtype: Any, columns: int | None = None) -> tuple[Any, ...]:
    """How rows of so many columns lie in shared memory for wgmma, and for registers without bank conflicts."""
    itemsize = jnp.dtype(dtype).itemsize
    row_bytes = (columns or chunk_columns(dtype)) * itemsize
    swizzle = next(width for width in (128, 64, 32) if row_bytes % width == 0)
    tiling: Any = plgpu.TilingTransform  # jax's annotations make an abstract class of it
    swizzling: Any = plgpu.SwizzleTransform
    return (tiling((8, swizzle // itemsize)), swizzling(swizzle))


def two_views(dims: tuple[int, ...], dtype: Any, interpret: Interpreter | None) -> Any:
    """Shared memory [.., rows, chunk columns] as wgmma and registers see it, and as TMA fills it row by row.

    The bytes are the same; but TMA through a tiled view takes rows by eights only, and whole heads.
    """
    transforms = swizzled(dtype)
    views = [plgpu.SMEM(dims, dtype, transforms=transforms), plgpu.SMEM(dims, dtype, transforms=transforms[1:])]
    # The interpreter, which knows nothing of tiling, takes a read through one view of what the other wrote for a fault.
    return plgpu.RefUnion(*views) if interpret is None else views[0]


class Views(NamedTuple):
    """The two views of a piece of shared memory; see `two_views`."""

    tensor_core: Any
    tma: Any


def split_views(ref: Any, interpret: Interpreter | None) -> Views:
    """The views of what `two_views` allocated."""
    return Views(ref, ref) if interpret is not None else Views(*ref)


def iota(size: tuple[int, ...], axis: int, layout: Any = plgpu.Layout.WGMMA) -> Any:
    """Indices along an axis of a matrix, in registers, by default as wgmma's results lie there.

    They are made for the one axis: what is computed of them is not computed, and kept in registers, for each place
    along the other. Mosaic finds no layout where nothing reads them.
    """
    along = plgpu.broadcasted_iota(jnp.int32, (size[axis],), 0, layout=layout.reduce(1 - axis))
    return plgpu.layout_cast(lax.broadcast_in_dim(along, size, [axis]), layout)


def padded_slice(start: int, size: int, head_size: int) -> Any:
    """Columns of a head in global memory, perhaps past its end: TMA reads zeros and writes nothing there."""
    if start + size <= head_size:
        return pl.ds(start, size)
    # Where a slice with a start known to Pallas leaves the array it is refused.
    return pl.ds(start + lax.div(lax.axis_index("wg"), jnp.int32(2**20)), size)


def send_rows(rows: Any, target: Any, start: int, head_size: int) -> None:
    """Start copying rows of a tile in shared memory to a head's columns from `start` on, to the head's end at most.

    Mosaic copies a single row as plain bytes, which TMA does not end with the head: then fewer of them are sent.

    Args:
      rows: a ref [rows, columns], which lie side by side.
      target: a ref [rows, head_size] in global memory.
    """
    count, size = rows.shape
    width = min(size, head_size - start) if count == 1 else size
    plgpu.copy_smem_to_gmem(rows.at[:, pl.ds(0, width)], target.at[:, padded_slice(start, width, head_size)])


def chunk_slice(c: int, head_size: int, columns: int = CHUNK) -> Any:
    """The columns of a chunk, perhaps past a head's end."""
    return padded_slice(c * columns, columns, head_size)


@dataclasses.dataclass(frozen=True)
class PagedTiles:
    """A ring of tiles of keys or of values of one kv head, or of several: one head's rows after the other's.

    Heads whose size is no multiple of `CHUNK` are padded with zeros in shared memory: TMA writes them past a row's end.
    """

    which: Which
    layout: KVLayout
    dims: CacheDims
    dtype: Any
    tile: int
    stages: int
    heads: int = 1

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: its positions, for each head."""
        return self.tile * self.heads

    @property
    def head_size(self) -> int:
        return self.dims.head_size if self.which == "key" else self.dims.v_head_size

    @property
    def chunks(self) -> int:
        return -(-self.head_size // CHUNK)

    @property
    def row_columns(self) -> int:
        """Columns of a row of shared memory: longer rows come faster by TMA, which takes as long for a short one."""
        columns = chunk_columns(self.dtype)
        return columns if self.head_size % columns == 0 else CHUNK

    @property
    def _whole(self) -> bool:
        return self.head_size % CHUNK == 0

    @property
    def rows(self) -> int:
        """Consecutive positions that lie in one block whatever the tile: a copy."""
        return math.gcd(self.dims.block_size, self.tile)

    @property
    def copies(self) -> int:
        """Copies that fill a tile."""
        return self.heads * (self.tile // self.rows) * (1 if self._whole else self.chunks)

    def smem(self, interpret: Interpreter | None) -> Any:
        if self._whole:
            return plgpu.SMEM(
                (self.stages, self.tile_rows, self.head_size),
                self.dtype,
                transforms=swizzled(self.dtype, self.row_columns),
            )
        return two_views((self.stages * self.chunks, self.tile_rows, CHUNK), self.dtype, interpret)

    def views(self, ref: Any, interpret: Interpreter | None) -> Any:
        """What the other methods take for the shared memory that `smem` allocated."""
        return ref if self._whole else split_views(ref, interpret)

    def barrier(self, with_scales: bool = False) -> Any:
        """Completes when a tile is there, and its scales per token and head."""
        scales = self.tile // self.rows if with_scales else 0
        return plgpu.Barrier(num_arrivals=self.copies + scales, num_barriers=self.stages)

    def last_block(self, kv_len: Any) -> Any:
        """The logical block of a request's last position."""
        return lax.div(jnp.maximum(kv_len, 1) - 1, jnp.int32(self.dims.block_size))

    def blocks(self, table: Any, request: Any, tile: Any, last_block: Any) -> tuple[Any, ...]:
        """The physical blocks of a tile's copies; past a request's last one that one again."""
        block_size = jnp.int32(self.dims.block_size)
        firsts = [tile * self.tile + j for j in range(0, self.tile, self.rows)]
        return tuple(table[request, jnp.minimum(lax.div(first, block_size), last_block)] for first in firsts)

    def position(
        self, size: tuple[int, ...], axis: int, start: Any, layout: Any = plgpu.Layout.WGMMA, first: int = 0
    ) -> Any:
        """For an array with a tile's rows from `first` on along an axis, their positions; the tile's begin at `start`.

        What is added is added as one number: of several, the sums that all steps have in common would take registers.
        """
        row, first = iota(size, axis, layout), first % self.tile
        if first + size[axis] <= self.tile:  # of one head
            return row + (start + first)
        return lax.rem(row + first if first else row, jnp.full(size, self.tile, jnp.int32)) + start

    def readable(
        self,
        table: Any,
        request: Any,
        tile: Any,
        kv_len: Any,
        size: tuple[int, ...],
        *,
        axis: int,
        first: int = 0,
        layout: Any = plgpu.Layout.WGMMA,
    ) -> Any:
        """For an array with a tile's rows from `first` on along an axis, which lie in a block that exists."""
        position = self.position(size, axis, 0, layout, first)
        missing = jnp.zeros(size, jnp.int32)
        for j, block in enumerate(self.blocks(table, request, tile, self.last_block(kv_len))):
            mine = (position >= j * self.rows) & (position < (j + 1) * self.rows)
            in_range = (block >= 0) & (block < self.dims.num_blocks)
            missing = jnp.where(mine, jnp.full(size, jnp.where(in_range, 0, 1)), missing)
        return missing == 0

    def _copies(self, blocks: Any, tile: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Of each copy that fills a tile: the block, the rows in it, and those in the tile."""
        for j, block in enumerate(blocks):
            # Of a block out of range nothing shows, whatever is read.
            known = jnp.clip(block, 0, self.dims.num_blocks - 1)
            offset = lax.rem(tile * self.tile + j * self.rows, jnp.int32(self.dims.block_size))
            yield known, pl.ds(offset, self.rows), pl.ds(j * self.rows, self.rows)

    def copy(self, buffer: Any, smem: Any, slot: Any, blocks: Any, tile: Any, head: Any, barrier: Any) -> None:
        """Start filling a slot of the ring with the rows of a tile, whose first head is `head`."""
        for block, rows, place in self._copies(blocks, tile):
            for h in range(self.heads):
                target = pl.ds(h * self.tile + place.start, place.size)
                index = functools.partial(rows_index, self.layout, self.dims, self.which, block, rows, head + h)
                if self._whole:
                    plgpu.copy_gmem_to_smem(buffer.at[index()], smem.at[slot, target, :], barrier.at[slot])
                    continue
                for c in range(self.chunks):
                    part = buffer.at[index(chunk_slice(c, self.head_size))]
                    plgpu.copy_gmem_to_smem(part, smem.tma.at[slot * self.chunks + c, target, :], barrier.at[slot])

    @property
    def scale_rows(self) -> tuple[int, int]:
        """A tile's scales per token and head as TMA takes them: one copy's numbers lie side by side, in few long rows.

        In rows as long as there are kv heads they would take as long as the keys.
        """
        width = math.gcd(self.rows * self.dims.num_kv_heads, 256)
        return self.tile * self.dims.num_kv_heads // width, width

    def copy_scales(self, scales: Any, smem: Any, slot: Any, blocks: Any, tile: Any, barrier: Any) -> None:
        """Start bringing the scales of a tile's rows, for all kv heads: those of one are too narrow for TMA.

        Args:
          scales: [num_blocks, .., columns of `scale_rows`].
          smem: [stages, *scale_rows].
        """
        heads, width = self.dims.num_kv_heads, self.scale_rows[1]
        size = self.rows * heads // width
        for j, (block, rows, _) in enumerate(self._copies(blocks, tile)):
            source = scales.at[block, pl.ds(lax.div(rows.start, jnp.int32(self.rows)) * size, size), :]
            plgpu.copy_gmem_to_smem(source, smem.at[slot, pl.ds(j * size, size), :], barrier.at[slot])

    def chunk(self, smem: Any, slot: Any, c: int, rows: int | None = None) -> Any:
        """A chunk of a tile's first rows, [rows, CHUNK], as wgmma and registers see it."""
        return self.parts(smem, slot, rows, columns=pl.ds(c * CHUNK, CHUNK))[0 if self._whole else c]

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Columns of each of the `parts`."""
        return (self.head_size,) if self._whole else (CHUNK,) * self.chunks

    def parts(
        self, smem: Any, slot: Any, rows: int | None = None, first: int = 0, columns: Any = slice(None)
    ) -> list[Any]:
        """Rows of a tile in as few pieces as can be, [rows, columns] each."""
        where = slice(None) if rows in (None, self.tile_rows) else pl.ds(first, rows)
        if self._whole:
            return [smem.at[slot, where, columns]]
        return [smem.tensor_core.at[slot * self.chunks + c, where, :] for c in range(self.chunks)]


class Stream(NamedTuple):
    """Keys or values on their way to shared memory, perhaps with scales per token and head."""

    tiles: PagedTiles
    buffer: Any
    smem: Any
    full: Any
    empty: Any
    scales: Any = None
    scales_smem: Any = None


def tile_at(listed: Any, place: Any) -> Any:
    """The number of the tile at a place of a list in global memory, or past its end; without a list that place."""
    return place if listed is None else listed[jnp.minimum(place, listed.shape[0] - 1)]


class Span(NamedTuple):
    """Tiles of a request and its kv heads from `head` on: `count` consecutive ones, or places in a list."""

    request: Any
    kv_len: Any
    head: Any
    first_tile: Any
    count: Any
    listed: Any = None


def load_tiles(streams: Sequence[Stream], table: Any, span: Span, before: Any) -> None:
    """Bring tiles of keys, values or both when there is room in the ring, in which `before` tiles were.

    The blocks of a tile are looked up while the one before is on its way, and its number yet a tile earlier.
    """
    tiles = streams[0].tiles
    last_block = tiles.last_block(span.kv_len)

    def blocks(tile: Any) -> tuple[Any, ...]:
        return tiles.blocks(table, span.request, tile, last_block)

    def listed(i: Any) -> Any:
        return tile_at(span.listed, span.first_tile + i)

    def load(i: Any, looked_up: tuple[Any, Any]) -> tuple[Any, Any]:
        current, pair = looked_up  # the tile's blocks; and if tiles are listed, its number and the next one's
        following = blocks(pair[1] if pair else span.first_tile + (i + 1))
        next_pair = (pair[1], listed(i + 2)) if pair else ()
        slot = lax.rem(before + i, jnp.int32(tiles.stages))
        for stream in streams:
            pl.when(before + i >= tiles.stages)(functools.partial(plgpu.barrier_wait, stream.empty.at[slot]))
            where = (slot, current, pair[0] if pair else span.first_tile + i)
            stream.tiles.copy(stream.buffer, stream.smem, *where, span.head, stream.full)
            if stream.scales is not None:
                stream.tiles.copy_scales(stream.scales, stream.scales_smem, *where, stream.full)
        return following, next_pair

    pair = () if span.listed is None else (listed(jnp.int32(0)), listed(jnp.int32(1)))
    first = pair[0] if pair else span.first_tile + jnp.int32(0)
    lax.fori_loop(0, span.count, load, (blocks(first), pair))
