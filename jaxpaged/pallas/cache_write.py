"""Writes of new tokens into a paged KV cache, in place, on Hopper.

A CTA takes a few consecutive tokens. Their keys come into shared memory by one TMA and so do their values; where the
cache keeps another dtype they are converted in registers; each token leaves by one TMA for its slot. No CTA waits for
another, and enough of them share an SM to keep its memory busy.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.metadata.layout import Which
from jaxpaged.metadata.slots import last_writes
from jaxpaged.pallas.mosaic import Interpreter, follow_previous_kernel, kernel, store
from jaxpaged.pallas.paged_rows import rows_index
from jaxpaged.pallas.quantize import quantize, row_scale
from jaxpaged.pallas.row_tiles import TMA_BOX, WARPS, RowTile, columns, load
from jaxpaged.pallas.warps import is_last

SIDES: tuple[Which, Which] = ("key", "value")
SMEM_BYTES = 220 * 1024
MOST_SEARCHED = 1024
"""Tokens of a call up to which a warp looks at all slots for each token that it writes, while rows come in."""


@dataclasses.dataclass(frozen=True)
class WriteTiles:
    """How a write is cut into CTAs.

    Attributes:
      tile_bytes: of keys that a CTA takes at most, and as much of values: small, so that several CTAs share an SM.
      min_ctas: while there are fewer CTAs than this, each takes fewer tokens.
    """

    tile_bytes: int = 16 * 1024
    min_ctas: int = 128


def refusal(cache: KVCache, dtype: Any) -> str | None:
    """Why the kernel can't write rows of `dtype` into a cache, or None."""
    for which in SIDES:
        axes = cache.layout.axes(which)
        if axes[-1] not in ("d", "(2d)"):
            return f"layout: the kernel writes heads that lie in one piece, not {cache.layout.name}"
    tiles = tiles_of(cache, dtype, 1)
    for tile in tiles:
        reason = tile.refusal(cache.buffer(tile.which).shape[-1])
        if reason is not None:
            return reason
    if sum(tile.smem_bytes for tile in tiles) > SMEM_BYTES:
        return f"num_kv_heads: {cache.num_kv_heads} heads of a token don't fit into shared memory"
    return None


def write_kv(cache: KVCache, key: Any, value: Any, slot_mapping: Any, *, interpret: Interpreter | None) -> KVCache:
    """`jaxpaged.write_kv` on checked arguments; of tokens with the same slot the last is kept."""
    slots = slot_mapping[: min(key.shape[0], slot_mapping.shape[0])]
    few = slots.shape[0] <= MOST_SEARCHED
    if not few:
        slots = last_writes(slots, cache.num_slots)
    elif slots.dtype.itemsize == 8:
        slots = lax.bitcast_convert_type(slots, jnp.int32)
    return write_rows(cache, key, value, slots, interpret=interpret, keep_last=few)


def write_rows(
    cache: KVCache,
    key: Any,
    value: Any,
    slots: Any,
    *,
    interpret: Interpreter | None = None,
    config: WriteTiles | None = None,
    keep_last: bool = False,
) -> KVCache:
    """Write the first tokens to `slots` by one kernel.

    Division and conversions are IEEE's, so what is stored is the oracle's bit by bit. XLA's division on a GPU may be
    off by one in the last place, and so may be the reference there.

    Args:
      slots: [n] int32, or [n, 2] int32, the words of int64, low one first. Slots out of range are skipped.
      keep_last: of tokens with the same slot the last is kept; else no two may have the same.
    """
    num_tokens = min(key.shape[0], slots.shape[0])
    if num_tokens == 0:
        return cache
    tiles = tiles_of(cache, key.dtype, tokens_of_a_cta(cache, key.dtype, num_tokens, config or WriteTiles()))
    read = {"key_rows": key.reshape(-1, cache.head_size), "value_rows": value.reshape(-1, cache.v_head_size)}
    written = {"key": cache.key} | ({} if cache.value is None else {"value": cache.value})
    for tile in tiles:
        name, scale = f"{tile.which[0]}_scale", cache.scale(tile.which)
        if tile.scale == 3:
            written[name] = scale
        elif scale is not None:
            read[name] = scale.reshape(-1)
    refs = {name: jax.new_ref(buffer) for name, buffer in written.items()}
    names = [*read, "slots", *refs]

    def write_cache(*operands: Any, **scratch: Any) -> None:
        follow_previous_kernel(interpret)
        refs = dict(zip(names, operands, strict=True)) | scratch
        _write_tile(tiles, cache, num_tokens, keep_last, refs, interpret)

    kernel(
        write_cache,
        grid=(pl.cdiv(num_tokens, tiles[0].tokens),),
        grid_names=("tile",),
        scratch_types=tiles[0].scratch() | tiles[1].scratch(),
        interpret=interpret,
    )(*read.values(), slots, *refs.values())
    new: dict[str, Any] = {name: jax.freeze(ref) for name, ref in refs.items()}
    return dataclasses.replace(cache, **new)


def tiles_of(cache: KVCache, dtype: Any, tokens: int) -> list[RowTile]:
    """The keys and the values of some tokens, in `dtype` outside of the cache."""
    widths = {"key": cache.head_size, "value": cache.v_head_size}
    return [
        RowTile(
            which=which,
            tokens=tokens,
            heads=cache.num_kv_heads,
            width=widths[which],
            dtype=jnp.dtype(dtype),
            kept_as=cache.buffer(which).dtype,
            stored=cache.dtype,
            scale=None if cache.scale(which) is None else cache.scale(which).ndim,
        )
        for which in SIDES
    ]


def tokens_of_a_cta(cache: KVCache, dtype: Any, num_tokens: int, config: WriteTiles) -> int:
    """How many tokens a CTA takes: a power of two, so that registers hold few rows that aren't there."""
    row_bytes = max(cache.head_size, cache.v_head_size) * jnp.dtype(dtype).itemsize
    most = min(
        config.tile_bytes // (cache.num_kv_heads * row_bytes),
        TMA_BOX // cache.num_kv_heads,
        pl.cdiv(num_tokens, config.min_ctas),
    )
    tokens = 1
    while 2 * tokens <= most and all(tile.aligned for tile in tiles_of(cache, dtype, 1)):
        if sum(tile.smem_bytes for tile in tiles_of(cache, dtype, 2 * tokens)) > SMEM_BYTES:
            break
        tokens *= 2
    return tokens


def _write_tile(
    tiles: list[RowTile],
    cache: KVCache,
    num_tokens: int,
    keep_last: bool,
    refs: dict[str, Any],
    interpret: Interpreter | None,
) -> None:
    """The kernel: load, convert where needed, store each token."""
    first = lax.axis_index("tile") * tiles[0].tokens

    def place(token: Any) -> tuple[Any, Any, Any]:
        """Block and offset of a token of the tile, and whether it is one that is written there."""
        slot, valid = _slot(refs["slots"], first + token, num_tokens)
        size = jnp.int32(cache.block_size)
        valid &= (slot >= 0) & (slot < cache.num_slots) & (token < tiles[0].tokens)
        if keep_last:
            valid &= is_last(refs["slots"].at[pl.ds(0, num_tokens)], slot, first + token, interpret)
        return lax.div(slot, size), lax.rem(slot, size), valid

    for tile in tiles:
        _load(tile, first, refs)
    for tile in tiles:
        if tile.converted:
            plgpu.barrier_wait(refs[f"{tile.which}_barrier"])
            _convert(tile, refs, interpret)
    _store_scales(tiles, place, refs)

    @plgpu.warp_map
    def _(warp: Any) -> None:
        """Each warp stores every fourth token. Its slots are on their way while the rows still come in."""
        tokens = [warp + i for i in range(0, tiles[0].tokens, WARPS)]
        places = [place(token) for token in tokens]
        for tile in tiles:
            if not tile.converted:
                plgpu.barrier_wait(refs[f"{tile.which}_barrier"])
            for token, (block, offset, valid) in zip(tokens, places, strict=True):
                pl.when(valid)(functools.partial(_store, tile, cache, token, block, offset, refs))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _load(tile: RowTile, first: Any, refs: dict[str, Any]) -> None:
    """The rows of the tokens from `first` on; past the last token TMA fills zeros."""
    source = refs[f"{tile.which}_rows"]
    for (start, width), target in zip(tile.pieces, refs[f"{tile.which}_in"], strict=True):
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(first * tile.heads, tile.num_rows), columns(start, width, first)],
            target.at[pl.ds(0, tile.num_rows)],
            refs[f"{tile.which}_barrier"],
        )


def _convert(tile: RowTile, refs: dict[str, Any], interpret: Interpreter | None) -> None:
    """The rows as the cache stores them, and their scales where each row has its own."""
    pieces = [load(piece, tile.layout).astype(jnp.float32) for piece in refs[f"{tile.which}_in"]]
    scale = _scale(tile, pieces, refs)
    for piece, target in zip(pieces, refs[f"{tile.which}_out"], strict=True):
        if tile.stored != jnp.float32:
            short = tile.dtype.itemsize == 2
            piece = quantize(piece, tile.stored, tile.kept_as, scale, tile.layout, short, interpret)
        store(target, piece)
    plgpu.commit_smem()


def _scale(tile: RowTile, pieces: list[Any], refs: dict[str, Any]) -> Any:
    """The scale of the rows: a scalar, one for each row of the tile, or None."""
    if tile.scale is None:
        return None
    given = refs[f"{tile.which[0]}_scale"]
    if tile.scale == 0:
        return given[0]
    rows = refs[f"{tile.which}_scales"]
    if tile.scale == 3:
        scales = row_scale(pieces, tile.stored)
        store(rows, scales)
        return scales
    by_head = [given[head] for head in range(tile.heads)]
    for row in range(tile.num_rows):
        rows[row] = by_head[row % tile.heads]
    plgpu.commit_smem()  # all threads store the same, but none may read before the others have
    return load(rows, tile.layout.reduce(1))


def _slot(slots: Any, token: Any, num_tokens: int) -> tuple[Any, Any]:
    """A token's slot, and whether the token is one and its slot fits into 32 bits."""
    index = jnp.minimum(token, num_tokens - 1)
    if len(slots.shape) == 1:
        return slots[index], token < num_tokens
    return slots[index, 0], (token < num_tokens) & (slots[index, 1] == 0)


def _store_scales(tiles: list[RowTile], place: Callable[[Any], tuple[Any, Any, Any]], refs: dict[str, Any]) -> None:
    """The tokens' own scales into their slots: few numbers, so each by itself."""
    renewed = [tile for tile in tiles if tile.scale == 3]
    for token in range(tiles[0].tokens if renewed else 0):
        block, offset, valid = place(jnp.int32(token))

        @pl.when(valid)
        def _(token: int = token, block: Any = block, offset: Any = offset) -> None:
            for tile in renewed:
                for head in range(tile.heads):
                    scale = refs[f"{tile.which}_scales"][token * tile.heads + head]
                    refs[f"{tile.which[0]}_scale"][block, offset, head] = scale


def _store(tile: RowTile, cache: KVCache, token: Any, block: Any, offset: Any, refs: dict[str, Any]) -> None:
    """A token's rows into its slot."""
    buffer = refs["key" if tile.which == "key" or cache.value is None else "value"]
    index = rows_index(cache.layout, cache.dims, tile.which, block, offset, pl.ds(0, tile.heads))
    rows = pl.ds(token * tile.heads, tile.heads)
    pieces = refs[f"{tile.which}_{'out' if tile.converted else 'in'}"]
    for (start, width), piece in zip(tile.pieces, pieces, strict=True):
        plgpu.copy_smem_to_gmem(piece.at[rows], buffer.at[index].at[:, columns(start, width, block)])
