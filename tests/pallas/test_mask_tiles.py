"""Tiles of which a mask function keeps nothing are skipped: which, and that the others' results are right."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch
from jaxpaged.metadata.masks import CausalMask, FullMask, and_masks
from jaxpaged.pallas import decode_plan, mask_tiles, prefill_plan
from jaxpaged.pallas.decode_plan import plan_decode
from jaxpaged.pallas.functions import reads_head
from jaxpaged.pallas.prefill_plan import MOST_REQUESTS, PrefillTiling, plan_prefill
from jaxpaged.reference.attention import AttentionOptions
from jaxpaged.testing.cases import Case, build, tolerance
from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.verify import compare, relative_error
from tests.pallas.agreement import check

INT32 = np.iinfo(np.int32)


def prefix_lm(b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
    return (kv_pos <= q_pos) | (kv_pos < 40)


def block_diagonal(b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
    return q_pos // 64 == kv_pos // 64


def by_head(b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
    """A tile of 128 positions in four, another one for every other head."""
    return kv_pos // 128 % 4 == h % 2


def odd_requests(b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
    """Nothing for every other request, and for every other row of the rest."""
    return (b % 2 == 1) & (q_pos % 2 == 1) & (kv_pos % 5 != 0)


def dilated(b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
    return (kv_pos // 128) % 3 == 0


def nothing(b: Any, h: Any, q_pos: Any, kv_pos: Any) -> Any:
    return q_pos < 0


MASKS = (prefix_lm, block_diagonal, by_head, odd_requests, dilated, nothing)


def options_of(mask: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
    return (("mask_mod", mask), ("causal", mask is not prefix_lm))


# Two multiprocessors make few CTAs, which each have much to do; with more, requests and tiles are split among them.
SHAPES = {
    "decode": (2, Case("", (1, 1, 1, 1), (600, 130, 0, 330))),
    "decode-in-parts": (40, Case("", (1, 1), (30, 900), num_heads=2, num_kv_heads=1)),
    "several-new": (2, Case("", (4, 2, 8), (400, 2, 150))),
    "unpacked": (2, Case("", (200,), (600,), num_heads=2)),
    "packed": (2, Case("", (20, 40), (500, 150))),
    "in-parts": (20, Case("", (20, 9), (600, 100))),
    "mixed": (2, Case("", (1, 40, 1, 3, 0, 1, 17, 1, 1), (33, 450, 1, 270, 0, 64, 17, 128, 300), extra_tokens=3)),
}
ALL = [(shape, mask) for shape in ("decode", "unpacked") for mask in MASKS]
ALL += [(shape, mask) for shape in ("several-new", "packed", "in-parts", "mixed") for mask in (by_head, odd_requests)]
ALL += [("decode-in-parts", dilated), ("in-parts", dilated), ("packed", block_diagonal)]


@pytest.mark.parametrize(("shape", "mask"), ALL, ids=lambda x: getattr(x, "__name__", x))
def test_values(kernels, set_multiprocessors, shape, mask):
    number, case = SHAPES[shape]
    set_multiprocessors(number)
    case = dataclasses.replace(case, name=shape, options=(*options_of(mask), ("sinks", True)))
    check(case)


MORE = {
    "window": Case("", (1, 5, 40), (700, 300, 500), options=(("mask_mod", dilated), ("window", (400, 0)))),
    "bad-blocks": Case("", (1, 3, 40), (400, 300, 500), options=(("mask_mod", dilated),), bad_blocks=True),
    "batch-invariant": Case("", (1, 20), (700, 450), options=(("mask_mod", by_head), ("batch_invariant", True))),
    "8-bit": Case("", (2, 1), (400, 500), options=(("mask_mod", dilated),), cache_dtype="int8", scales="head"),
    "head-size-256": Case("", (20,), (300,), head_size=256, options=(("mask_mod", block_diagonal),)),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_with_other_options(kernels, set_multiprocessors, name):
    set_multiprocessors(2)
    check(dataclasses.replace(MORE[name], name=name))


@pytest.mark.parametrize("garbage", ["not a number", "out of range"])
@pytest.mark.parametrize("shape", ["decode", "several-new", "packed", "unpacked"])
def test_blocks_of_skipped_tiles_may_be_anything(kernels, set_multiprocessors, shape, garbage):
    number, case = SHAPES[shape]
    set_multiprocessors(number)
    case = dataclasses.replace(case, name=shape, options=options_of(dilated), dtype="bfloat16")
    inputs = build(case)
    expected, expected_lse = inputs.expected()
    position = np.arange(inputs.block_table.shape[1]) * case.block_size
    skipped = position // 128 % 3 != 0
    unused = np.flatnonzero(np.isnan(inputs.key_values).all((1, 2, 3)))
    table = np.where(skipped, unused[0] if garbage == "not a number" else INT32.max, inputs.block_table)
    out, lse = DOORS["kernels"].run(dataclasses.replace(inputs, block_table=table.astype(np.int32)))
    assert relative_error(out, expected) <= 1.5 * tolerance(case)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [(1, 2), (2, 22)], ids=["decode", "prefill"])
def test_batch_invariant(kernels, set_multiprocessors, rows):
    """A request's bits are the same alone and among others."""
    request, rows = rows[0], slice(*rows)
    set_multiprocessors(2)
    options = (("mask_mod", dilated), ("batch_invariant", True))
    inputs = build(Case("", (1, 1, 20), (300, 450, 420), options=options, dtype="bfloat16"))
    alone = dataclasses.replace(
        inputs,
        query=inputs.query[rows],
        block_table=inputs.block_table[request : request + 1],
        seq_lens=inputs.seq_lens[request : request + 1],
        query_start_loc=np.array([0, rows.stop - rows.start], np.int32),
    )
    (out, lse), (one_out, one_lse) = (DOORS["kernels"].run(x) for x in (inputs, alone))
    np.testing.assert_array_equal(out[rows], one_out)
    np.testing.assert_array_equal(lse[:, rows], one_lse)


# Which tiles the plans list.

NUM_HEADS, BLOCK_SIZE = 4, 16


def batch_of(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> tuple[KVCache, PagedBatch]:
    width = -(-max(seq_lens) // BLOCK_SIZE) + 5
    table = np.zeros((len(seq_lens), width), np.int32)
    cache = jax.eval_shape(lambda: KVCache.zeros(4, BLOCK_SIZE, 2, 64, "bfloat16"))
    return cache, PagedBatch.create(table, list(seq_lens), query_lens=list(query_lens))


def expected_tiles(options: AttentionOptions, b: int, positions: range, kv_len: int, tile: int) -> list[int]:
    """The tiles of which a pair is kept, by the masks' definitions."""
    h, q_pos, kv_pos = np.arange(NUM_HEADS)[:, None, None], np.array(positions)[:, None], np.arange(kv_len)[None]
    keep = np.broadcast_to(options.mask_mod(np.int32(b), h, q_pos, kv_pos), (NUM_HEADS, len(positions), kv_len))
    if options.causal:
        keep = keep & (kv_pos <= q_pos)
    if options.window[0] is not None:
        keep = keep & (kv_pos >= q_pos - options.window[0])
    return sorted(set((np.flatnonzero(keep.any((0, 1))) // tile).tolist()))


def made_decode_plan(options: AttentionOptions, cache: KVCache, batch: PagedBatch, **more: Any) -> Any:
    how = {"num_heads": NUM_HEADS, "max_query_len": 4, "tile": 64, "num_shares": 5, "min_tiles": 1}
    how |= {"num_tokens": 30, "others_elsewhere": True, "batch_invariant": False, **more}
    return plan_decode(cache, batch, options, **how)


def listed_for_decode(plan: Any) -> list[list[int]]:
    """Each request's tiles."""
    first, count = plan.requests[:-1, decode_plan.FIRST_TILE], plan.requests[:-1, decode_plan.TILES]
    listed = np.asarray(plan.kept_tiles)
    return [listed[f : f + n].tolist() for f, n in zip(first.tolist(), count.tolist(), strict=True)]


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("mask", MASKS, ids=lambda x: x.__name__)
def test_tiles_of_decode(mask, window):
    query_lens, seq_lens = (1, 4, 0, 2, 20, 1), (700, 130, 0, 333, 300, 64)
    cache, batch = batch_of(query_lens, seq_lens)
    options = AttentionOptions(1.0, causal=mask is not prefix_lm, window=(window, None), mask_mod=mask)
    plan = made_decode_plan(options, cache, batch)
    listed = listed_for_decode(plan)
    for b, (q, n) in enumerate(zip(query_lens, seq_lens, strict=True)):
        expected = expected_tiles(options, b, range(n - q, n), n, 64) if 0 < q <= 4 else []
        assert listed[b] == expected
    sizes = np.asarray(plan.shares[:, 3] - plan.shares[:, 2])
    total = sum(map(len, listed))
    assert sizes.sum() == total
    assert sizes.max() <= -(-total // 5)  # an even split of what is kept


TILINGS = {
    "unpacked": PrefillTiling(128, False, 128, 3, most_parts=1, l2_bytes=1 << 20),
    "packed": PrefillTiling(16, True, 128, 3, most_parts=1, l2_bytes=1 << 20),
    "in-parts": PrefillTiling(16, True, 64, 40, most_parts=7, l2_bytes=1 << 20),
}


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("mask", MASKS, ids=lambda x: x.__name__)
def test_steps_of_prefill(mask, tiling, window):
    query_lens, seq_lens, tiling = (150, 1, 0, 33), (700, 130, 0, 400), TILINGS[tiling]
    cache, batch = batch_of(query_lens, seq_lens)
    options = AttentionOptions(1.0, causal=mask is not prefix_lm, window=(window, None), mask_mod=mask)
    how = {"num_tokens": 190, "num_heads": NUM_HEADS, "shortest": 2}
    plan = plan_prefill(cache, batch, options, tiling, **how)
    listed, seen = np.asarray(plan.kept_steps), {}
    for items, count in zip(np.asarray(plan.work), plan.counts.tolist(), strict=True):
        for item in items[:count]:
            first, steps = item[prefill_plan.FIRST_STEP], item[prefill_plan.STEPS]
            tile, part = divmod(int(item[prefill_plan.TILE]), tiling.most_parts)
            seen[tile, int(item[prefill_plan.HEAD]), part] = listed[first : first + steps].tolist()
            rows, first_pos = int(item[prefill_plan.ROWS]), int(item[prefill_plan.FIRST_POS])
            request, kv_len = int(item[prefill_plan.REQUEST]) & MOST_REQUESTS, int(item[prefill_plan.KV_LEN])
            tile_is = expected_tiles(options, request, range(first_pos, first_pos + rows), kv_len, tiling.step)
            seen.setdefault((tile, "expected"), tile_is)
    parts = int(plan.parts)
    assert len(seen) > 4
    for key in [key for key in seen if key[1] == "expected"]:
        for head in range(2 if tiling.packed else NUM_HEADS):
            pieces = [seen[key[0], head, part] for part in range(parts)]
            assert list(itertools.chain(*pieces)) == seen[key]
            assert max(map(len, pieces)) == -(-len(seen[key]) // parts)


@pytest.mark.parametrize("x64", [False, True])
def test_evaluation_in_turns_finds_the_same(monkeypatch, x64):
    cache, batch = batch_of((1, 4, 0, 2, 20, 1), (700, 130, 0, 333, 300, 64))
    for mask in (by_head, dilated):
        options = AttentionOptions(1.0, mask_mod=mask)
        at_once = listed_for_decode(made_decode_plan(options, cache, batch))
        for pairs, static_trips in ((1, 10**6), (1, 1), (6 * 4 * 64 * 3, 10**6), (6 * 4 * 64 * 5, 1)):
            monkeypatch.setattr(mask_tiles, "AT_ONCE", pairs)
            monkeypatch.setattr(mask_tiles, "MOST_STATIC_TRIPS", static_trips)
            with jax.enable_x64(x64):
                assert listed_for_decode(made_decode_plan(options, cache, batch)) == at_once
            monkeypatch.undo()


@pytest.mark.parametrize("shape", ["decode", "packed"])
def test_a_list_too_long_skips_nothing(kernels, set_multiprocessors, monkeypatch, shape):
    monkeypatch.setattr(mask_tiles, "MOST_LISTED", 1)
    cache, batch = batch_of((1, 4), (700, 130))
    plan = made_decode_plan(AttentionOptions(1.0, mask_mod=dilated), cache, batch)
    assert plan.kept_tiles is None
    assert plan.requests[:2, decode_plan.TILES].tolist() == [11, 3]
    number, case = SHAPES[shape]
    set_multiprocessors(number)
    result = compare(dataclasses.replace(case, options=options_of(dilated)), "kernels", DOORS["kernels"])
    assert result.ok, result


def test_what_a_function_returns_lists_no_other_tiles():
    """Even where it is no flag, and for whatever lies beyond a request's end."""
    cache, batch = batch_of((1, 4, 0), (700, 130, 0))
    for mask in (lambda b, h, q, k: k * 7 + 3, lambda b, h, q, k: k > 10**6, lambda b, h, q, k: k > -1):
        plan = made_decode_plan(AttentionOptions(1.0, mask_mod=mask), cache, batch)
        listed = np.asarray(plan.kept_tiles).reshape(3, -1)
        assert (listed >= 0).all()
        assert (listed.max(1) <= (10, 2, 0)).all()


def test_evaluated_once_for_all_layers():
    cache, batch = batch_of((1, 4, 0, 2), (700, 130, 0, 333))
    options = AttentionOptions(1.0, mask_mod=by_head)

    def layers(batch: PagedBatch, number: int) -> Any:
        return [made_decode_plan(options, cache, batch) for _ in range(number)]

    def loops(number: int) -> int:
        compiled = jax.jit(layers, static_argnums=1).lower(batch, number).compile()
        return compiled.as_text().count(" while(")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_tiles, "AT_ONCE", 4 * 4 * 64)
        patch.setattr(mask_tiles, "MOST_STATIC_TRIPS", 1)
        assert loops(3) == loops(1) > 0


READS_HEAD = {
    "plain": (lambda b, h, q, k: q > k, False),
    "head": (by_head, True),
    "in a shape alone": (and_masks(CausalMask(), FullMask()), False),
    "unused": (lambda b, h, q, k: (h + 1, q > k)[1], False),
    "inner jit, unused": (lambda b, h, q, k: jax.jit(lambda h, q: (h * 2, q % 7))(h, q)[1] == k, False),
    "inner jit": (lambda b, h, q, k: jax.jit(lambda h, q: (h * 2, q % 7))(h, q)[0] > k, True),
    "through where": (lambda b, h, q, k: jnp.where(h > 2, q > k, q == k), True),
    "constant": (lambda b, h, q, k: jnp.ones_like(q, bool), False),
}


@pytest.mark.parametrize("name", READS_HEAD)
def test_reads_head(name):
    mask, expected = READS_HEAD[name]
    assert reads_head(mask) == expected
