"""Cascade attention: when a batch is taken for one that shares a prefix, how long that is, and what comes out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch, paged_attention
from jaxpaged.attention import make_options
from jaxpaged.metadata.batch import LEAST_SAVED
from jaxpaged.pallas import attention
from jaxpaged.pallas import prefill_plan as field
from jaxpaged.pallas.cascade import Prefix, plan_prefix, prefix_shape, shared_prefix
from jaxpaged.pallas.tuning import gpu_of
from jaxpaged.testing.cases import Case, build, named_cases, tolerance

BLOCK = 16
DEFAULTS = {"scale": 0.1, "causal": True}
DEFAULTS |= dict.fromkeys(["window", "soft_cap", "alibi_slopes", "sinks", "mask_mod", "score_mod"])

# The hint.


def table_of(num_reqs, shared, own=3):
    """A block table whose rows begin with the same blocks."""
    common = np.broadcast_to(np.arange(1000, 1000 + shared), (num_reqs, shared))
    return np.concatenate([common, np.arange(num_reqs * own).reshape(num_reqs, own)], axis=1).astype(np.int32)


ENOUGH = LEAST_SAVED // 8 // BLOCK  # blocks for 9 requests
LONG = [(ENOUGH + 2) * BLOCK] * 9
HINTS = {
    "found": (table_of(9, ENOUGH), LONG, {}, True),
    "without block_size": (table_of(9, ENOUGH), LONG, {"block_size": None}, True),
    "a list": (table_of(9, ENOUGH).tolist(), LONG, {}, True),
    "on JAX's CPU": (jnp.asarray(table_of(9, ENOUGH)), LONG, {}, True),
    "padding requests": (np.pad(table_of(9, ENOUGH), ((0, 2), (0, 0))), [*LONG, 0, 0], {}, True),
    "exactly the context": (table_of(9, ENOUGH, 1), [ENOUGH * BLOCK + 1] * 9, {}, True),
    "too short by a token": (table_of(9, ENOUGH, 1), [ENOUGH * BLOCK] * 9, {}, False),
    "too short by a block": (table_of(9, ENOUGH - 1), LONG, {}, False),
    "too few requests": (table_of(9, ENOUGH)[:8], LONG[:8], {}, False),
    "one request": (table_of(1, 9 * ENOUGH), [9 * ENOUGH * BLOCK], {}, False),
    "another first block": (table_of(9, ENOUGH) + np.eye(9, ENOUGH + 3, dtype=np.int32), LONG, {}, False),
    "no blocks": (table_of(9, ENOUGH) * 0 - 1, LONG, {}, False),
    "small blocks": (table_of(9, ENOUGH), LONG, {"block_size": 8}, False),
    "the caller says so": (table_of(2, 1), [40, 40], {"shares_prefix": True}, True),
    "the caller says no": (table_of(9, ENOUGH), LONG, {"shares_prefix": False}, False),
    "nothing at all": (np.zeros((0, 0), np.int32), [], {}, False),
}


@pytest.mark.parametrize("name", HINTS)
def test_the_hint(name):
    table, seq_lens, options, expected = HINTS[name]
    batch = PagedBatch.create(table, seq_lens, **{"block_size": BLOCK, **options})
    assert batch.shares_prefix is expected


def test_the_hint_survives_what_is_done_to_batches():
    batch = PagedBatch.create(table_of(9, ENOUGH), LONG, block_size=BLOCK)
    assert batch.shares_prefix
    assert batch.pad(num_reqs=11, max_blocks_per_req=200).shares_prefix
    assert batch.pad_to_bucket().shares_prefix
    assert dataclasses.replace(batch, slot_mapping=None).shares_prefix
    assert jax.tree.map(lambda x: x + 1, batch).shares_prefix
    assert jax.jit(lambda batch: batch.pad(num_reqs=10))(batch).shares_prefix


def test_traced_tables_give_no_hint():
    create = jax.jit(lambda table: PagedBatch.create(table, LONG))
    assert not create(table_of(9, ENOUGH)).shares_prefix


# The length of the prefix.


@pytest.mark.parametrize("seed", range(30))
def test_the_length_is_right_for_any_batch(seed):
    """The prefix has whole tiles of blocks that each active request has, before its new tokens."""
    rng = np.random.default_rng(seed)
    reqs, shared, block_size = int(rng.integers(1, 6)), int(rng.integers(0, 24)), int(rng.choice([8, 16, 24, 64]))
    table = rng.permutation(reqs * 12).reshape(reqs, 12).astype(np.int32)
    table = np.concatenate([np.broadcast_to(np.arange(500, 500 + shared), (reqs, shared)), table], 1).astype(np.int32)
    if rng.random() < 0.3:
        table[:, rng.integers(0, table.shape[1])] = rng.choice([-1, 999])
    seq_lens = rng.integers(max(shared - 2, 0) * block_size, (shared + 15) * block_size, reqs)
    query_lens = rng.integers(0, 4, reqs)
    if rng.random() < 0.5:
        seq_lens[-1] = 0
    batch = PagedBatch.create(table, seq_lens, query_lens=query_lens)
    cache = jax.eval_shape(lambda: KVCache.zeros(600, block_size, 1, 64, "bfloat16"))
    kv_len = np.minimum(seq_lens, table.shape[1] * block_size)
    active = [i for i in range(reqs) if kv_len[i] > 0 and query_lens[i] > 0]
    columns = 0
    while columns < table.shape[1] and len({table[i, columns] for i in active}) == 1 and 0 <= table[0, columns] < 600:
        columns += 1
    context = min(((kv_len[i] - query_lens[i]) // block_size for i in active), default=0)
    expected = max(min(columns, context), 0) * block_size // 64 * 64
    prefix = shared_prefix(cache, batch, 64)
    if 0 in active:
        assert prefix.tokens == expected
        np.testing.assert_array_equal(prefix.table[0, : expected // block_size], table[0, : expected // block_size])
    else:
        assert prefix.tokens == 0


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads"), [(64, 32, 8), (5, 4, 4), (300, 32, 8), (129, 6, 2), (9, 64, 1)]
)
def test_the_plan_has_each_step_once(tokens, heads, kv_heads):
    cache = jax.eval_shape(lambda: KVCache.zeros(600, 16, kv_heads, 128, "bfloat16"))
    query = jax.ShapeDtypeStruct((tokens, heads, 128), jnp.bfloat16)
    shape = prefix_shape(query, cache, make_options(num_heads=heads, num_reqs=tokens, **DEFAULTS), gpu_of())
    tiling = shape.tiling
    for steps in (0, 1, 7, 33):
        plan = plan_prefix(shape, Prefix(jnp.int32(steps * tiling.step), None))
        seen: dict[tuple[int, ...], int] = {}
        slots = set()
        for cta, count in enumerate(plan.counts.tolist()):
            for item in np.asarray(plan.work)[cta, :count].tolist():
                slot = (item[field.TILE], item[field.HEAD])
                assert slot not in slots
                assert item[field.TILE] // tiling.most_parts * tiling.tokens == item[field.FIRST_ROW]
                slots.add(slot)
                for row in range(item[field.ROWS]):
                    for step in range(item[field.STEPS]):
                        place = (item[field.FIRST_ROW] + row, item[field.HEAD], item[field.FIRST_STEP] + step)
                        seen[place] = seen.get(place, 0) + 1
        plan_heads = kv_heads if tiling.packed else heads
        assert len(seen) == tokens * plan_heads * steps and set(seen.values()) <= {1}
        assert len(slots) == -(-tokens // tiling.tokens) * tiling.most_parts * plan_heads
        assert max(row for row, _, _ in seen) == tokens - 1 if seen else steps == 0


# The results.

FEW = 6
"""Multiprocessors: with few of them CTAs are soon interpreted, and some share a rest, so that parts are joined, too."""
SMALL = {"num_heads": 2, "num_kv_heads": 1, "dtype": "bfloat16"}
EVERYTHING = (("soft_cap", 3.0), ("sinks", True))
CASES = {
    "ragged, with padding": Case(
        "", (1, 1, 0, 1, 1, 1), (150, 460, 0, 145, 0, 170), shared=9, extra_tokens=2, options=EVERYTHING, **SMALL
    ),
    "only some share": Case("", (1,) * 4, (150, 145, 20, 160), shared=9, seed=3, **SMALL),
    "several new tokens": Case("", (2, 1, 2, 1), (150, 330, 140, 130), shared=8, v_head_size=32, **SMALL),
}
COMPILED = {
    "8 kv heads of 128": Case("", (1,) * 20, tuple(range(1030, 1230, 10)), 32, 8, 128, shared=64, dtype="bfloat16"),
    "1 query head a kv head": Case("", (1,) * 9, (900,) * 9, 4, 4, shared=50, dtype="float16", layout="HND"),
    "64 query heads": Case("", (1,) * 20, (700,) * 20, 64, 1, 128, shared=40, dtype="bfloat16"),
    "7 query heads": Case("", (4, 3, 2, 1) * 3, (999, 500, 650, 444) * 3, 14, 2, shared=25, dtype="bfloat16"),
    "heads of 256": Case("", (1,) * 7, (700,) * 7, 8, 2, 256, shared=40, dtype="bfloat16", options=EVERYTHING),
    "heads of 80": Case("", (1,) * 7, (700,) * 7, 8, 2, 80, shared=40, dtype="bfloat16", layout="N2HD"),
    "not causal": Case("", (2,) * 7, (700,) * 7, shared=40, dtype="bfloat16", options=(("causal", False),)),
    "blocks of 48": Case("", (1,) * 7, (700,) * 7, block_size=48, shared=12, dtype="bfloat16"),
    "many requests": Case("", (1,) * 300, tuple(range(530, 830)), 8, 2, shared=32, dtype="bfloat16"),
    "long prefix": Case("", (1,) * 6, (9000,) * 6, 8, 1, 128, shared=550, dtype="bfloat16"),
}


def check(inputs, shared):
    """The results with the hint are the oracle's; `shared` tokens or more are taken for the prefix, or none for 0."""
    case = inputs.case
    table, lens, starts = inputs.block_table, inputs.seq_lens, inputs.query_start_loc
    batch = PagedBatch.create(table, lens, starts, shares_prefix=True)
    buffers = [None if b is None else jnp.asarray(b) for b in (inputs.key_buffer, inputs.value_buffer)]
    cache = KVCache.from_arrays(*buffers, layout=case.layout)
    found = int(shared_prefix(cache, batch, 128).tokens)
    assert found >= shared and (found > 0) == (shared > 0)
    options = {**inputs.options, "return_lse": True, "implementation": "mosaic_gpu"}
    out, lse = (np.asarray(x, np.float64) for x in paged_attention(jnp.asarray(inputs.query), cache, batch, **options))
    expected, expected_lse = inputs.expected()
    assert np.abs(out - expected).max() <= tolerance(case) * np.abs(expected).max()
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_results(kernels, set_multiprocessors, name):
    set_multiprocessors(FEW)
    check(build(CASES[name]), 0 if name == "only some share" else 128)


def test_a_block_out_of_range_ends_the_prefix(kernels, set_multiprocessors):
    set_multiprocessors(FEW)
    inputs = build(Case("", (1,) * 4, (210, 222, 215, 240), shared=12, **SMALL))
    table = inputs.block_table.copy()
    table[:, 9] = (-1, 10**6, -1, -1)
    check(dataclasses.replace(inputs, block_table=table), 128)


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPILED)
def test_results_of_larger_batches(hopper, name):
    check(build(COMPILED[name]), 384)


# What runs.


def lowered(
    hint=True, reqs=64, heads=32, kv_heads=8, head_size=128, new=1, dtype="bfloat16", batch_invariant=False, **options
):
    cache = jax.eval_shape(lambda: KVCache.zeros(300, BLOCK, kv_heads, head_size, dtype))
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((reqs, 280), (reqs,), (reqs + 1,))]
    batch = PagedBatch(*ints, None, new, hint)
    query = jax.ShapeDtypeStruct((reqs * new, heads, head_size), dtype)
    given = make_options(num_heads=heads, num_reqs=reqs, **{**DEFAULTS, **options})
    static = {"out_dtype": jnp.dtype(dtype), "batch_invariant": batch_invariant, "return_lse": True, "interpret": None}
    call = jax.jit(lambda *arrays: attention.paged_attention(*arrays, given, **static))
    return call.trace(query, cache, batch).lower(lowering_platforms=("cuda",)).as_text()


CASCADES = {
    "plain": {},
    "1 query head a kv head": {"kv_heads": 32},
    "64 query heads": {"heads": 64, "kv_heads": 1},
    "7 query heads": {"heads": 14, "kv_heads": 2},
    "heads of 256": {"head_size": 256},
    "heads of 80": {"head_size": 80},
    "4 new tokens": {"new": 4},
    "float16": {"dtype": "float16"},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"sinks": np.zeros(32, np.float32)},
    "not causal": {"causal": False},
    "many requests": {"reqs": 300},
}
OTHERS = {
    "no hint": {"hint": False},
    "a window": {"window": (5, 0)},
    "ALiBi": {"alibi_slopes": np.zeros(32, np.float32)},
    "mask_mod": {"mask_mod": lambda b, h, q, k: q >= k},
    "score_mod": {"score_mod": lambda s, b, h, q, k: s},
    "batch_invariant": {"batch_invariant": True, "reqs": 9},
}


@pytest.mark.parametrize("name", CASCADES)
def test_a_cascade_lowers_for_cuda(name):
    text = lowered(**CASCADES[name])
    assert all(kernel in text for kernel in ("paged_prefill", "paged_decode"))


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_prefix_is_not_read_once_for(name):
    assert "paged_prefill" not in lowered(**OTHERS[name])


def test_the_suite_has_a_batch_that_cascades():
    inputs = build({case.name: case for case in named_cases()}["shared-prefix-long"])
    assert PagedBatch.create(inputs.block_table, inputs.seq_lens, inputs.query_start_loc).shares_prefix
