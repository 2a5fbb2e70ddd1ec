"""Dense keys and values out of a paged KV cache, on Hopper: a cache write the other way round.

XLA's gather moves one number at a time per thread. Here a CTA takes a few consecutive tokens of the result: each comes
into shared memory by one TMA, and all leave by one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas.cache_write import WriteTiles, tiles_of, tokens_of_a_cta
from jaxpaged.pallas.cache_write import refusal as write_refusal
from jaxpaged.pallas.mosaic import Interpreter, kernel
from jaxpaged.pallas.paged_rows import rows_index
from jaxpaged.pallas.row_tiles import WARPS, RowTile
from jaxpaged.reference.cache_ops import token_places


def refusal(cache: KVCache, dtype: Any) -> str | None:
    """Why the kernel can't gather rows of `dtype` from a cache, or None."""
    if cache.quantized or dtype != cache.dtype:
        return (
            f"dtype: the kernel moves numbers as they are, from {cache.dtype.name} to {jnp.dtype(dtype).name} it can't"
        )
    return write_refusal(cache, dtype)


def gather_kv(
    cache: KVCache,
    block_table: Any,
    seq_lens: Any,
    total_tokens: int,
    *,
    interpret: Interpreter | None = None,
    config: WriteTiles | None = None,
) -> tuple[Any, Any]:
    """`jaxpaged.gather_kv` on checked arguments, in the cache's dtype."""
    block, offset, valid = token_places(cache, block_table, seq_lens, total_tokens)
    blocks = jnp.where(valid, block, cache.num_blocks)  # there is no such block, so TMA fills zeros
    tiles = tiles_of(cache, cache.dtype, tokens_of_a_cta(cache, cache.dtype, total_tokens, config or WriteTiles()))
    buffers = [cache.key] if cache.value is None else [cache.key, cache.value]

    def gather_rows(blocks_ref: Any, offsets_ref: Any, *refs: Any, **scratch: Any) -> None:
        *sources, keys, values = refs
        moved = list(zip(tiles, (sources[0], sources[-1]), (keys, values), strict=True))
        _gather_tile(moved, cache, total_tokens, (blocks_ref, offsets_ref), scratch)

    results = kernel(
        gather_rows,
        out_type=[jax.ShapeDtypeStruct((total_tokens * tile.heads, tile.width), cache.dtype) for tile in tiles],
        grid=(pl.cdiv(total_tokens, tiles[0].tokens),),
        grid_names=("tile",),
        scratch_types=_scratch(tiles),
        interpret=interpret,
    )(blocks, offset, *buffers)
    keys, values = (x.reshape(total_tokens, cache.num_kv_heads, -1) for x in results)
    return keys, values


def _scratch(tiles: list[RowTile]) -> dict[str, Any]:
    """The rows of a CTA's tokens, and barriers that they have all come."""
    refs: dict[str, Any] = {}
    for tile in tiles:
        refs[f"{tile.which}_rows"] = [plgpu.SMEM((tile.num_rows, width), tile.dtype) for _, width in tile.pieces]
        refs[f"{tile.which}_barrier"] = plgpu.Barrier(num_arrivals=tile.tokens * len(tile.pieces))
    return refs


def _gather_tile(
    moved: list[tuple[RowTile, Any, Any]],
    cache: KVCache,
    total_tokens: int,
    places: tuple[Any, Any],
    scratch: dict[str, Any],
) -> None:
    """The kernel.

    Args:
      moved: keys' and values' tile, buffer and result.
      places: block and offset of each token.
    """
    tokens = moved[0][0].tokens
    first = lax.axis_index("tile") * tokens

    def load(token: Any) -> None:
        index = jnp.minimum(first + token, total_tokens - 1)  # past the last token: rows that are not stored
        block, offset = places[0][index], places[1][index]
        for tile, buffer, _ in moved:
            rows = rows_index(cache.layout, cache.dims, tile.which, block, offset, pl.ds(0, tile.heads))
            for (start, width), smem in zip(tile.pieces, scratch[f"{tile.which}_rows"], strict=True):
                plgpu.copy_gmem_to_smem(
                    buffer.at[rows].at[:, pl.ds(start, width)],
                    smem.at[pl.ds(token * tile.heads, tile.heads)],
                    scratch[f"{tile.which}_barrier"],
                )

    @plgpu.warp_map
    def _(warp: Any) -> None:
        for i in range(0, tokens, WARPS):
            pl.when(warp + i < tokens)(functools.partial(load, warp + i))

    for tile, _, result in moved:
        plgpu.barrier_wait(scratch[f"{tile.which}_barrier"])
        for (start, width), smem in zip(tile.pieces, scratch[f"{tile.which}_rows"], strict=True):
            plgpu.copy_smem_to_gmem(smem, result.at[pl.ds(first * tile.heads, tile.num_rows), pl.ds(start, width)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
