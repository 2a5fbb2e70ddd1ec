"""Tokens a second of a decode loop in JAX, on pages and on keys gathered into dense arrays, on one GPU or several.

python benchmarks/serving_gpu.py [--devices N] [--smoke] [--write]

The loop is one program: greedy decoding of a batch whose requests all have the same context, weights and caches random,
the cache carried through in place. What attention takes of it is told by the same loop with attention left out. With
several GPUs heads and the layers' widths are spread over them (tensor parallel).
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pages import command_of
from rich.console import Console
from rich.table import Table

from jaxpaged import KVCache, PagedBatch
from jaxpaged.demo.config import DemoConfig
from jaxpaged.demo.jax_model import Attend, Params, hidden_states, logits, paged_attend
from jaxpaged.sharding import Partition

RESULTS = Path(__file__).parent / "results"
BLOCK_SIZE = 16
LARGE = DemoConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=500000.0,
    max_position_embeddings=8192,
)
"""The shape of an 8B decoder; output and embedding are one matrix here."""
PARTS = {"q": 1, "k": 1, "v": 1, "gate": 1, "up": 1, "o": 2, "down": 2}
"""Which axis of a projection's weights [num_layers, out, in] is spread over devices."""


@dataclasses.dataclass(frozen=True)
class Load:
    """A model at work: `steps` new tokens for each of `batch` requests, up to `context` positions."""

    name: str
    config: DemoConfig
    batch: int
    context: int
    steps: int

    @property
    def blocks_per_req(self) -> int:
        return math.ceil(self.context / BLOCK_SIZE)


LOADS = (Load("demo model", DemoConfig.shipped(), 64, 2048, 64), Load("8B decoder", LARGE, 64, 4096, 32))
TINY = dataclasses.replace(DemoConfig(), hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=128)
SMOKE = (Load("tiny", TINY, 3, 40, 4),)


def random_params(load: Load, mesh: Mesh) -> Params:
    """Weights in bfloat16, each part made on its device."""
    c = load.config
    heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    sizes = {
        "self_attn.q_proj.weight": (heads, c.hidden_size),
        "self_attn.k_proj.weight": (kv_heads, c.hidden_size),
        "self_attn.v_proj.weight": (kv_heads, c.hidden_size),
        "self_attn.o_proj.weight": (c.hidden_size, heads),
        "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        "input_layernorm.weight": (c.hidden_size,),
        "post_attention_layernorm.weight": (c.hidden_size,),
    }
    shapes = {
        "embed_tokens": (c.vocab_size, c.hidden_size),
        "norm": (c.hidden_size,),
        "layers": {name: (c.num_hidden_layers, *size) for name, size in sizes.items()},
    }

    def spec(path: Any, _: Any) -> P:
        axis = next((axis for part, axis in PARTS.items() if f"{part}_proj" in path[-1].key), None)
        return P() if axis is None else P(*("model" if i == axis else None for i in range(3)))

    def weight(path: Any, size: tuple[int, ...], key: Any) -> Any:
        if "norm" in path[-1].key:
            return jnp.ones(size, jnp.bfloat16)
        return jax.random.normal(key, size, jnp.bfloat16) * size[-1] ** -0.5

    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    specs = jax.tree.map_with_path(spec, shapes, is_leaf=is_shape)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P))

    @functools.partial(jax.jit, out_shardings=shardings)
    def make(key: Any) -> Params:
        leaves, tree = jax.tree.flatten(shapes, is_leaf=is_shape)
        keys = jax.tree.unflatten(tree, list(jax.random.split(key, len(leaves))))
        return jax.tree.map_with_path(weight, shapes, keys, is_leaf=is_shape)

    return make(jax.random.key(0))


def random_cache(load: Load, partition: Partition) -> KVCache:
    """One cache of all layers, filled."""
    c = load.config
    num_blocks = c.num_hidden_layers * load.batch * load.blocks_per_req
    empty = partition.zeros(num_blocks, BLOCK_SIZE, c.num_key_value_heads, c.head_dim, jnp.bfloat16)

    @functools.partial(jax.jit, donate_argnums=0)
    def fill(cache: KVCache) -> KVCache:
        def some(x: Any, seed: int) -> Any:
            # A pattern that costs no memory besides: positions are told apart, and so are heads.
            index = sum(lax.broadcasted_iota(jnp.int32, x.shape, i) * (7 + 4 * i) for i in range(x.ndim))
            return jnp.sin((index * (seed + 1)).astype(jnp.float32)).astype(x.dtype)

        return dataclasses.replace(cache, key=some(cache.key, 0), value=some(cache.value, 1))

    return fill(empty)


def on_pages(load: Load, batch: PagedBatch) -> Attend:
    """jaxpaged's write and attention."""
    return paged_attend(batch, load.config)


def gathered(load: Load, batch: PagedBatch) -> Attend:
    """What JAX has without jaxpaged: a scatter into the cache, a gather of all blocks, and dense attention."""

    def attend(cache: KVCache, layer: Any, query: Any, key: Any, value: Any) -> tuple[KVCache, Any]:
        n = cache.num_blocks // load.config.num_hidden_layers
        own = batch.shift_blocks(layer * n, num_blocks=n, block_size=BLOCK_SIZE)
        block, offset = own.slot_mapping // BLOCK_SIZE, own.slot_mapping % BLOCK_SIZE
        cache = dataclasses.replace(
            cache, key=cache.key.at[block, offset].set(key), value=cache.value.at[block, offset].set(value)
        )
        k, v = (x[own.block_table].reshape(load.batch, -1, *x.shape[2:]) for x in (cache.key, cache.value))
        out = jax.nn.dot_product_attention(query[:, None], k, v, key_value_seq_lengths=own.seq_lens)
        return cache, out[:, 0]

    return attend


def left_out(load: Load, batch: PagedBatch) -> Attend:
    """No attention: an output as large as its own, of what is there."""
    group = load.config.num_attention_heads // load.config.num_key_value_heads

    def attend(cache: KVCache, layer: Any, query: Any, key: Any, value: Any) -> tuple[KVCache, Any]:
        return cache, query + jnp.repeat(key + value, group, axis=1)

    return attend


KINDS: dict[str, Callable[[Load, PagedBatch], Attend]] = {
    "jaxpaged": on_pages,
    "gather + dense attention": gathered,
    "no attention": left_out,
}


def on_each_device(attend: Attend, partition: Partition) -> Attend:
    """Attention of each device to its own heads, within a program that XLA spreads over devices."""

    def spread(cache: KVCache, layer: Any, *rows: Any) -> tuple[KVCache, Any]:
        specs = (partition.cache(cache), P(), *(partition.rows for _ in rows))
        out_specs = (specs[0], partition.rows)
        mapped = jax.shard_map(attend, mesh=partition.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return mapped(cache, layer, *rows)

    return spread if partition.mesh.size > 1 else attend


def decode_loop(load: Load, partition: Partition, kind: str) -> Any:
    """A jitted function of weights, a donated cache, a table and the first tokens: the cache and [steps, batch]."""

    def step(params: Params, table: Any, carry: tuple[KVCache, Any, Any], _: None) -> tuple[Any, Any]:
        cache, tokens, lens = carry
        starts = jnp.arange(load.batch + 1, dtype=jnp.int32)
        slots = jnp.take_along_axis(table, (lens // BLOCK_SIZE)[:, None], 1)[:, 0] * BLOCK_SIZE + lens % BLOCK_SIZE
        batch = PagedBatch(table, lens + 1, starts, slots, max_query_len=1)
        attend = on_each_device(KINDS[kind](load, batch), partition)
        cache, hidden = hidden_states(load.config, params, tokens, lens, attend, cache)
        chosen = jnp.argmax(logits(params, hidden), axis=-1).astype(jnp.int32)
        return (cache, chosen, lens + 1), chosen

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(params: Params, cache: KVCache, table: Any, tokens: Any) -> tuple[KVCache, Any]:
        lens = jnp.full(load.batch, load.context - load.steps, jnp.int32)
        (cache, _, _), chosen = lax.scan(
            functools.partial(step, params, table), (cache, tokens, lens), length=load.steps
        )
        return cache, chosen

    return loop


@dataclasses.dataclass(frozen=True)
class Row:
    """What one kind of attention gives: seconds of a loop, and the tokens chosen [steps, batch]."""

    load: Load
    kind: str
    seconds: float
    tokens: np.ndarray

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.load.batch * self.load.steps / self.seconds


def measure(load: Load, mesh: Mesh, repeats: int = 3) -> list[Row]:
    """A row for each kind, the least time of some loops; attention's tokens must be the same."""
    partition = Partition(mesh, tensor="model")
    params = random_params(load, mesh)
    order = np.random.default_rng(0).permutation(load.batch * load.blocks_per_req).astype(np.int32)
    table = jnp.asarray(order.reshape(load.batch, -1))
    first = jnp.arange(load.batch, dtype=jnp.int32) % load.config.vocab_size
    rows = []
    for kind in KINDS:
        loop, cache = decode_loop(load, partition, kind), random_cache(load, partition)
        cache, chosen = jax.block_until_ready(loop(params, cache, table, first))
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            cache, _ = jax.block_until_ready(loop(params, cache, table, first))
            times.append(time.perf_counter() - begin)
        rows.append(Row(load, kind, min(times), np.asarray(chosen)))
        del cache
    return rows


def table_of(rows: list[Row]) -> Table:
    table = Table("model", "attention", "tokens/s", "ms a step", "attention's share", "same tokens")
    for row in rows:
        of_load = {other.kind: other for other in rows if other.load == row.load}
        least = of_load["no attention"].seconds
        share = "-" if row.kind == "no attention" else f"{100 * (1 - least / row.seconds):.0f}%"
        same = np.mean(row.tokens == of_load["jaxpaged"].tokens)
        agree = "-" if row.kind == "no attention" else f"{100 * same:.1f}%"
        step = 1e3 * row.seconds / row.load.steps
        table.add_row(row.load.name, row.kind, f"{row.rate:,.0f}", f"{step:.2f}", share, agree)
    return table


def main(
    devices: Annotated[int, typer.Option(help="GPUs that share each model.")] = 1,
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny model, on any device; no figures to believe.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the table to benchmarks/results.")] = False,
) -> None:
    """Measure and print the table."""
    mesh = jax.make_mesh((devices,), ("model",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
    rows = [row for load in (SMOKE if smoke else LOADS) for row in measure(load, mesh)]
    console = Console(width=120, record=True)
    console.print(table_of(rows))
    if write:
        RESULTS.mkdir(exist_ok=True)
        command = " ".join(command_of())
        lines = [
            "# Decoding in JAX",
            "",
            f"- Date: {datetime.date.today()}; {devices} x {jax.devices()[0].device_kind}, jax "
            f"{importlib.metadata.version('jax')}; command: `{command}`",
            *(f"- {x.name}: batch {x.batch}, context up to {x.context}, {x.steps} steps" for x in LOADS),
            "- Weights and caches are random bfloat16; the share is what the loop takes longer than without attention.",
            "",
            "```",
            console.export_text().rstrip(),
            "```",
        ]
        name = "serving_gpu.md" if devices == 1 else f"serving_{devices}_gpus.md"
        (RESULTS / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
