"""A long trace of continuous batching, padded to buckets, compiles few programs, and none after its warm-up."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch, pad_tokens, paged_attention, write_kv
from jaxpaged.testing.compilations import compilations

STEPS, WARM_UP = 1000, 500
MAX_REQS, MAX_TOKENS, MAX_PROMPT, MAX_NEW, BLOCK_SIZE = 24, 256, 300, 150, 16
BUCKETS = (32, 256)
BOUND = 2 * 9
"""Programs that the trace may need: a step has 32 or 256 tokens, of a request at most 1, 2, 4, .. or 256."""


@dataclasses.dataclass
class Request:
    prompt: int
    total: int
    blocks: list[int]
    done: int = 0

    @property
    def decodes(self) -> bool:
        return self.done >= self.prompt


def trace(steps: int) -> Iterator[tuple[list[list[int]], list[int], list[int]]]:
    """Steps of an engine: the block tables of its requests, their lengths, and how many of those tokens are new.

    Requests come and go, more of them at some times than at others; every one that generates gets a token, and prompts
    share the rest of a step, in chunks.
    """
    rng = np.random.default_rng(0)
    free = list(range(MAX_REQS * (-(-(MAX_PROMPT + MAX_NEW) // BLOCK_SIZE))))
    running: list[Request] = []
    for i in range(steps):
        rate = 0.15 + 0.15 * np.sin(i / 40)
        if not running or (len(running) < MAX_REQS and rng.random() < rate):
            prompt = int(rng.integers(1, MAX_PROMPT + 1))
            running.append(Request(prompt, prompt + int(rng.integers(1, MAX_NEW + 1)), []))
        room, step = MAX_TOKENS - sum(r.decodes for r in running), []
        for request in running:
            new = 1 if request.decodes else min(room, request.prompt - request.done)
            if new == 0:
                continue
            room -= 0 if request.decodes else new
            request.done += new
            while len(request.blocks) * BLOCK_SIZE < request.done:
                request.blocks.append(free.pop())
            step.append((list(request.blocks), request.done, new))
        for request in [r for r in running if r.done >= r.total]:
            running.remove(request)
            free += request.blocks
        blocks, lengths, new_tokens = zip(*step, strict=True)
        yield list(blocks), list(lengths), list(new_tokens)


def run_trace(cache: KVCache, num_heads: int, implementation: str | None) -> tuple[list[int], int, Any]:
    """Compilations in each step of the trace, programs of the model's step, and the last step's output."""

    def step(cache: KVCache, query: Any, key: Any, value: Any, batch: PagedBatch) -> Any:
        cache = write_kv(cache, key, value, batch.slot_mapping)
        return cache, paged_attention(query, cache, batch, implementation=implementation)

    compiled_step = jax.jit(step, donate_argnums=0)
    rows = np.random.default_rng(1).standard_normal((MAX_TOKENS, num_heads, cache.head_size), np.float32)
    rows = rows.astype(cache.dtype)
    counts = []
    for blocks, lengths, new_tokens in trace(STEPS):
        with compilations() as compiled:
            with jax.default_device(jax.devices("cpu")[0]):  # elsewhere XLA pads, by a program for each pair of sizes
                batch = PagedBatch.create(blocks, lengths, query_lens=new_tokens, block_size=BLOCK_SIZE)
                batch = batch.pad_to_bucket(BUCKETS)
            batch = jax.device_put(batch, jax.devices()[0])
            query = pad_tokens(rows[: sum(new_tokens)], batch.slot_mapping.shape[0])
            key = query[:, : cache.num_kv_heads]
            cache, out = compiled_step(cache, query, key, key, batch)
        counts.append(compiled.count)
    return counts, compiled_step._cache_size(), jnp.asarray(out[: sum(new_tokens)])


def check(counts: list[int], programs: int, out: Any) -> None:
    assert programs <= BOUND
    last = max((i for i, count in enumerate(counts) if count), default=-1)
    assert sum(counts[WARM_UP:]) == 0, f"{sum(counts[WARM_UP:])} after {sum(counts)}, the last in step {last}"
    assert np.isfinite(np.asarray(out, np.float32)).all()


def test_the_trace_is_a_varied_one() -> None:
    steps = list(trace(STEPS))
    assert {len(blocks) for blocks, _, _ in steps} >= set(range(1, 17))
    assert max(max(lengths) for _, lengths, _ in steps) > MAX_PROMPT
    kinds = {(max(new) > 1, min(new) > 1) for _, _, new in steps}
    assert kinds == {(False, False), (True, False), (True, True)}
    assert max(sum(new) for _, _, new in steps) == MAX_TOKENS


def test_nothing_is_compiled_after_the_warm_up() -> None:
    num_blocks = MAX_REQS * (-(-(MAX_PROMPT + MAX_NEW) // BLOCK_SIZE))
    check(*run_trace(KVCache.zeros(num_blocks, BLOCK_SIZE, 1, 8, "float32"), 1, "reference"))


@pytest.mark.gpu
def test_the_kernels_are_not_compiled_after_the_warm_up(hopper: Any) -> None:
    num_blocks = MAX_REQS * (-(-(MAX_PROMPT + MAX_NEW) // BLOCK_SIZE))
    check(*run_trace(KVCache.zeros(num_blocks, BLOCK_SIZE, 2, 64, "bfloat16"), 8, "mosaic_gpu"))


FIRST_PROGRAM = """
import jax, numpy as np
from jaxpaged import KVCache, PagedBatch, paged_attention
from jaxpaged.testing.compilations import compilations
attend = jax.jit(paged_attention)
arguments = np.ones((1, 1, 8), np.float32), KVCache.zeros(1, 8, 1, 8, "float32"), PagedBatch.create([[0]], [1])
counts = []
for _ in range(2):
    with compilations() as compiled:
        attend(*arguments)
    counts.append(compiled.count)
print(counts)
"""


def test_the_first_program_of_a_process_is_not_compiled_again() -> None:
    ran = subprocess.run([sys.executable, "-c", FIRST_PROGRAM], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "[1, 0]", ran.stdout + ran.stderr


def test_compilations_are_counted() -> None:
    function = jax.jit(lambda x: x * 2 + 1)
    with compilations() as outer:
        with compilations() as first:
            function(np.zeros(3, np.float32))
        with compilations() as second:
            function(np.zeros(3, np.float32))
        function(np.zeros(4, np.float32))
    assert (first.count, second.count, outer.count) == (1, 0, 2)
    assert 0 < first.seconds < outer.seconds
