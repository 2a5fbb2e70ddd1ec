"""The public functions under JAX's transformations: vmap, export, gradients, the compilation cache, profiles."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import (
    KVCache,
    PagedBatch,
    copy_blocks,
    gather_kv,
    merge_attention_states,
    paged_attention,
    write_kv,
)
from jaxpaged.pallas.mosaic import interpreted

RNG = np.random.default_rng(0)
BATCH = PagedBatch.create([[0, 1], [2, 5]], [5, 8], query_lens=[2, 1], block_size=4)


def rows(*shape):
    return jnp.asarray(RNG.standard_normal(shape, np.float32))


def filled(layout="NHD", **options):
    cache = KVCache.zeros(6, 4, 2, 16, "float32", layout=layout, **options)
    return jax.tree.map(lambda x: rows(*x.shape), cache)


def step(cache, query, key, value, batch):
    cache = write_kv(cache, key, value, batch.slot_mapping)
    cache = copy_blocks(cache, jnp.array([[0, 3]], jnp.int32))
    dense = gather_kv(cache, batch.block_table, batch.seq_lens, total_tokens=13)
    return cache, dense, paged_attention(query, cache, batch, return_lse=True)


@pytest.mark.parametrize("layout", ["NHD", "2HND", "HN2D", "VLLM_V0"])
def test_vmap_over_caches_equals_a_loop(layout):
    """As over the layers of a stack, or several models; requests go into one batch instead."""
    caches = [filled(layout) for _ in range(3)]
    query, key, value = rows(3, 3, 4, 16), rows(3, 3, 2, 16), rows(3, 3, 2, 16)
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *caches)
    got = jax.vmap(step, (0, 0, 0, 0, None))(stacked, query, key, value, BATCH)
    for i in range(3):
        wanted = step(caches[i], query[i], key[i], value[i], BATCH)
        for ours, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(ours[i], want, atol=2e-6)


def test_vmap_over_queries_to_one_cache_equals_a_loop():
    cache, query = filled(), rows(5, 3, 4, 16)
    got = jax.vmap(lambda q: paged_attention(q, cache, BATCH))(query)
    for i in range(5):
        np.testing.assert_allclose(got[i], paged_attention(query[i], cache, BATCH), atol=2e-6)


def test_vmap_of_a_kernel_says_what_to_do_instead():
    cache = KVCache.zeros(2, 8, 1, 16, "bfloat16")
    batch = PagedBatch.create([[0]], [1], block_size=8)
    new = jnp.ones((2, 1, 1, 16), jnp.bfloat16)
    calls = {
        "paged_attention": lambda x: paged_attention(x, cache, batch, implementation="mosaic_gpu"),
        "write_kv": lambda x: write_kv(cache, x, x, batch.slot_mapping, implementation="mosaic_gpu"),
        "merge_attention_states": lambda x: merge_attention_states(
            [x, x], [jnp.zeros((1, 1))] * 2, implementation="mosaic_gpu"
        ),
    }
    with interpreted():
        for name, call in calls.items():
            with pytest.raises(NotImplementedError, match=f"{name}: .*jax.vmap; pack requests into one PagedBatch"):
                jax.vmap(call)(new)


DIFFERENTIATED = {
    "paged_attention": lambda x: paged_attention(x, filled(), BATCH),
    "write_kv": lambda x: write_kv(filled(), x, x, BATCH.slot_mapping).key,
    "gather_kv": lambda x: gather_kv(
        KVCache.from_arrays(x[None], x[None]), np.zeros((1, 1), np.int32), np.ones(1, np.int32), total_tokens=1
    )[0],
    "copy_blocks": lambda x: copy_blocks(KVCache.from_arrays(x[None], x[None]), [[0, 0]]).key,
    "merge_attention_states": lambda x: merge_attention_states([x, x], [jnp.zeros(x.shape[1::-1])] * 2)[0],
}


@pytest.mark.parametrize("transform", ["grad", "jvp", "checkpoint"])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_are_refused(name, transform):
    x = rows(3, 2, 16)
    total = lambda x: DIFFERENTIATED[name](x).sum()  # noqa: E731
    differentiate = {
        "grad": jax.grad(total),
        "jvp": lambda x: jax.jvp(total, (x,), (x,)),
        "checkpoint": jax.grad(jax.checkpoint(total)),
    }
    with pytest.raises(NotImplementedError, match=f"{name} has no gradient: it is for inference.*stop_gradient"):
        differentiate[transform](x)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_a_gradient_may_pass_by(name):
    x = rows(3, 2, 16)
    past = jax.grad(lambda x: (DIFFERENTIATED[name](jax.lax.stop_gradient(x)) ** 0 * x.sum()).sum())(x)
    assert float(past.min()) == float(past.max()) > 0
    assert float(jax.grad(lambda w: w * (DIFFERENTIATED[name](x) ** 0).sum())(2.0)) > 0


LOAD = """
import json, sys
import jax, numpy as np
from jax import export
from jaxpaged import KVCache, PagedBatch
step = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
cache = KVCache.zeros(6, 4, 2, 16, "float32", layout="2NHD")
cache = jax.tree.map(lambda x: np.arange(x.size, dtype=np.float32).reshape(x.shape) % 7, cache)
batch = PagedBatch.create([[0, 1], [2, 5]], [5, 8], query_lens=[2, 1], block_size=4)
query = np.arange(192, dtype=np.float32).reshape(3, 4, 16) % 5 / 8
cache, _, (out, lse) = step.call(cache, query, query[:, :2], query[:, 2:], batch)
assert type(cache) is KVCache and cache.layout.name == "2NHD" and cache.num_blocks == 6
print(json.dumps([np.asarray(out).tolist(), np.asarray(lse).tolist()]))
"""


def test_an_exported_step_runs_in_another_process(tmp_path: Path):
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers to write")
    cache = KVCache.zeros(6, 4, 2, 16, "float32", layout="2NHD")
    cache = jax.tree.map(lambda x: np.arange(x.size, dtype=np.float32).reshape(x.shape) % 7, cache)
    query = np.arange(192, dtype=np.float32).reshape(3, 4, 16) % 5 / 8
    arguments = cache, query, query[:, :2], query[:, 2:], BATCH
    exported = jax.export.export(jax.jit(step, donate_argnums=0))(*arguments)
    (tmp_path / "step").write_bytes(exported.serialize())
    ran = subprocess.run([sys.executable, "-c", LOAD, tmp_path / "step"], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    for got, want in zip(json.loads(ran.stdout), step(*arguments)[2], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


COMPILE = """
from collections import Counter
import jax, numpy as np
from jaxpaged import KVCache, PagedBatch, paged_attention, write_kv
seen = Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.split("/")[-1]]))
def step(cache, query, batch):
    cache = write_kv(cache, query[:, :2], query[:, :2], batch.slot_mapping)
    return paged_attention(query, cache, batch, mask_mod=lambda b, h, q, kv: kv != 2), cache
cache = KVCache.zeros(6, 4, 2, 16, "float32")
batch = PagedBatch.create([[0, 1], [2, 5]], [5, 8], query_lens=[2, 1], block_size=4)
jax.jit(step, donate_argnums=0)(cache, np.ones((3, 4, 16), np.float32), batch)
print(seen["cache_hits"], seen["cache_misses"])
"""


def test_the_persistent_compilation_cache_serves_a_second_process(tmp_path: Path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    counts = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=120, env={**os.environ, **settings}
        )
        assert ran.returncode == 0, ran.stderr
        counts.append([int(n) for n in ran.stdout.split()])
    (hits, misses), again = counts
    assert (hits, misses > 0) == (0, True)
    assert again == [misses, 0]


def test_profiles_name_the_operations():
    arguments = filled(), rows(3, 4, 16), rows(3, 2, 16), rows(3, 2, 16), BATCH
    text = jax.jit(step).lower(*arguments).compile().as_text()
    names = set(re.findall(r"jaxpaged\.(\w+)", " ".join(re.findall(r'op_name="([^"]*)"', text))))
    assert names == {"write_kv", "copy_blocks", "gather_kv", "paged_attention"}
