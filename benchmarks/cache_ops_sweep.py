"""Times of the tile sizes that `WriteTiles` and `CopyTiles` choose from.

python benchmarks/cache_ops_sweep.py [--repeats N]
"""

import functools
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from cache_ops_cases import BLOCK_SIZE, HEAD_SIZE, NUM_KV_HEADS, Donated, random_cache
from gpu_timing import kernel_times
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxpaged.pallas import block_copy
from jaxpaged.pallas.block_copy import CopyTiles
from jaxpaged.pallas.block_pairs import block_pairs
from jaxpaged.pallas.cache_write import WriteTiles, write_rows


def main(repeats: Annotated[int, typer.Option(help="Measured calls of each.")] = 20) -> None:
    """Measure all tile sizes of a few sizes of calls, and print the fastest first."""
    console = Console(width=140)
    for tokens in (64, 512, 8192, 65536):
        cache = random_cache(tokens)
        key, value = jax.random.normal(jax.random.key(1), (2, tokens, NUM_KV_HEADS, HEAD_SIZE), jnp.bfloat16)
        slots = jnp.asarray(np.random.default_rng(0).permutation(cache.num_slots)[:tokens].astype(np.int32))
        configs = [WriteTiles(2**b, c) for b in range(11, 17) for c in (32, 66, 132, 264, 528)]
        calls = {str(c): Donated(functools.partial(write_rows, config=c), cache, key, value, slots) for c in configs}
        print_sweep(console, f"write {tokens}", kernel_times(calls, repeats=repeats))
    cache = random_cache(2 * 4096 * BLOCK_SIZE)
    pairs = np.random.default_rng(0).permutation(cache.num_blocks)[:8192].reshape(-1, 2).astype(np.int32)
    known = jax.tree.map(jnp.asarray, block_pairs(pairs, cache.num_blocks, cache.num_blocks, within=True))
    copies = {
        str(c): Donated(functools.partial(block_copy.copy_blocks, None, config=c), cache, known)
        for c in (CopyTiles(2**b) for b in range(12, 17))
    }
    print_sweep(console, "copy 4096 blocks", kernel_times(copies, repeats=repeats))


def print_sweep(console: Console, name: str, timings: Mapping[str, Any]) -> None:
    table = Table("tiles", "µs", "spread", title=name, box=SIMPLE_HEAD)
    for config, timing in sorted(timings.items(), key=lambda item: item[1].microseconds):
        table.add_row(config, f"{timing.microseconds:.1f}", f"{timing.spread:.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
