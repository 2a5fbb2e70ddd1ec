"""One step of every public function, on one device and spread over a mesh in each way, for tests to compare."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, PartitionSpec

from jaxpaged import KVCache, PagedBatch, copy_blocks, gather_kv, pad_tokens, paged_attention, write_kv
from jaxpaged.metadata.block_table import blocks_needed
from jaxpaged.sharding import (
    Partition,
    concatenate_batches,
    context_attention,
    own_blocks,
    own_pairs,
    repeat_kv_heads,
)

BLOCK_SIZE, BLOCKS, HEADS, HEAD_SIZE, TOKENS, TOTAL = 4, 64, 16, 16, 32, 96
KINDS = {
    "tensor": {"tensor": 8},
    "tensor, replicated kv heads": {"tensor": 8},
    "data": {"data": 8},
    "context": {"context": 8},
    "tensor and context": {"tensor": 2, "context": 4},
    "data, tensor and context": {"data": 2, "tensor": 2, "context": 2},
}


def make_partition(sizes: dict[str, int], explicit: bool = False) -> Partition:
    types = (AxisType.Explicit if explicit else AxisType.Auto,) * len(sizes)
    names = tuple(f"{role}_axis" for role in sizes)
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    mesh = jax.make_mesh(tuple(sizes.values()), names, axis_types=types, devices=devices)
    return Partition(mesh, **dict(zip(sizes, names, strict=True)))


@dataclasses.dataclass
class Step:
    """What one pool's requests need for a step: tensors of all heads, ids of the pool's blocks."""

    key_cache: np.ndarray
    value_cache: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    batch: PagedBatch
    pairs: np.ndarray


def num_kv_heads(kind: str) -> int:
    return 2 if "replicated" in kind else 8


def make_step(kind: str, seed: int, dtype: Any) -> Step:
    """Prompts, decodes and a few new tokens; logical block j of request i lies on device i + j of the context axis."""
    rng = np.random.default_rng(seed)
    kv_heads, context = num_kv_heads(kind), KINDS[kind].get("context", 1)
    new, lens = ([13, 1, 3, 1], [17, 30, 9, 23]) if seed % 2 == 0 else ([1, 5, 1], [31, 5, 1])
    own = BLOCKS // context
    pools = [list(rng.permutation(np.arange(i * own, (i + 1) * own))) for i in range(context)]
    tables = [
        [int(pools[(i + j) % context].pop()) for j in range(blocks_needed(n, BLOCK_SIZE))] for i, n in enumerate(lens)
    ]
    pairs = np.array([[int(pool.pop()), pool[0]] for pool in pools] + [[-1, 0]], np.int32)
    batch = PagedBatch.create(tables, lens, query_lens=new, block_size=BLOCK_SIZE)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    caches = [draw(BLOCKS, BLOCK_SIZE, kv_heads, HEAD_SIZE) for _ in "kv"]
    rows = [draw(sum(new), heads, HEAD_SIZE) for heads in (HEADS, kv_heads, kv_heads)]
    return Step(*caches, *rows, batch, pairs)


def on_one_device(step: Step, per_head: dict[str, Any], options: dict[str, Any]) -> list[np.ndarray]:
    """Output, lse, gathered keys and values."""
    cache = KVCache.from_arrays(jnp.asarray(step.key_cache), jnp.asarray(step.value_cache))
    cache = copy_blocks(cache, step.pairs)
    cache = write_kv(cache, step.key, step.value, step.batch.slot_mapping)
    out, lse = paged_attention(step.query, cache, step.batch, return_lse=True, **per_head, **options)
    dense = gather_kv(cache, step.batch.block_table, step.batch.seq_lens)
    return [np.asarray(x, np.float32) for x in (out, lse.T, *dense)]


def spread_step(partition: Partition, options: dict[str, Any]) -> Any:
    """The step as one device of a mesh runs it: `(cache, query, key, value, batch, pairs, per_head) -> results`."""
    axis_name = partition.context

    def step(cache, query, key, value, batch, pairs, per_head):
        mine = batch if axis_name is None else own_blocks(batch, cache, axis_name=axis_name)
        cache = copy_blocks(cache, pairs if axis_name is None else own_pairs(pairs, cache, axis_name=axis_name))
        cache = write_kv(cache, key, value, mine.slot_mapping)
        if axis_name is None:
            out, lse = paged_attention(query, cache, batch, return_lse=True, **per_head, **options)
        else:
            given = {**per_head, **options, "axis_name": axis_name}
            out, lse = context_attention(query, cache, batch, return_lse=True, **given)
        dense = gather_kv(cache, mine.block_table, mine.seq_lens, total_tokens=TOTAL)
        return cache, out, lse, dense if axis_name is None else lax.psum(dense, axis_name)

    return step


def compare(kind: str, *, dtype: Any, explicit: bool = False, **options: Any) -> list[float]:
    """The largest difference between a step over a mesh and on one device: of output, lse, keys and values."""
    partition = make_partition(KINDS[kind], explicit)
    steps = [make_step(kind, seed, dtype) for seed in range(partition.size("data"))]
    rng = np.random.default_rng(9)
    per_head = {name: rng.standard_normal(HEADS).astype(np.float32) for name in options.pop("per_head", ())}
    expected = [on_one_device(step, per_head, options) for step in steps]
    got = over_a_mesh(partition, steps, per_head, options)
    differences = [0.0] * 4
    for shard, wanted in enumerate(expected):
        for i, (part, want) in enumerate(zip(got, wanted, strict=True)):
            rows = part.reshape(len(steps), -1, *part.shape[1:])[shard][: len(want)]
            if i >= 2 and rows.shape[1] != want.shape[1]:  # copies of kv heads
                want = np.repeat(want, rows.shape[1] // want.shape[1], 1)
            seen = np.isfinite(want)
            assert (np.isfinite(rows) == seen).all()
            differences[i] = max(differences[i], float(np.abs(rows - want, where=seen, out=np.zeros_like(want)).max()))
    return differences


def over_a_mesh(partition: Partition, steps: list[Step], per_head: Any, options: Any) -> list[np.ndarray]:
    """Output, lse transposed, keys and values of all pools, one after the other."""
    arguments, specs = spread_arguments(partition, steps, per_head)
    out_specs = (specs[0], partition.rows, partition.lse, partition.rows)
    step = jax.shard_map(spread_step(partition, options), mesh=partition.mesh, in_specs=specs, out_specs=out_specs)
    _, out, lse, dense = jax.jit(step, donate_argnums=0)(*arguments)
    gathered = multihost_utils.process_allgather((out, lse, *dense), tiled=True)
    out, lse, *dense = (np.asarray(x, np.float32) for x in gathered)
    return [out, lse.T, *dense]


def spread_arguments(partition: Partition, steps: list[Step], per_head: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """The arguments of `spread_step` on the devices of a mesh, and their specs."""
    copies = partition.kv_head_copies(HEADS, steps[0].key.shape[1])

    def joined(name: str, repeats: int, length: int | None = None) -> np.ndarray:
        parts = [getattr(step, name) for step in steps]
        if length is not None:
            parts = [np.asarray(pad_tokens(part, length)) for part in parts]
        return np.repeat(np.concatenate(parts), repeats, -2) if repeats > 1 else np.concatenate(parts)

    cache = KVCache.from_arrays(joined("key_cache", copies), joined("value_cache", copies))
    batch = concatenate_batches([step.batch.pad(num_tokens=TOKENS) for step in steps])
    rows = [joined("query", 1, TOKENS)]
    rows += [np.asarray(repeat_kv_heads(joined(name, 1, TOKENS), copies)) for name in ("key", "value")]
    values = (cache, *rows, batch, np.concatenate([step.pairs for step in steps]), per_head)
    specs = (partition.cache(cache), *[partition.rows] * 3, partition.batch, partition.tokens)
    specs = (*specs, PartitionSpec(partition.tensor))
    return [partition.put(value, spec) for value, spec in zip(values, specs, strict=True)], specs
