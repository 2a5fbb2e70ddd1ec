"""The suite: every named case through every door, against the float64 oracle. `jaxpaged verify` runs the same."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch, paged_attention
from jaxpaged.testing.cases import MIXED, Case, build, named_cases
from jaxpaged.testing.doors import DOORS, Door
from jaxpaged.testing.verify import compare, run

CASES = {case.name: case for case in named_cases()}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CASES)
def test_case(name, door):
    result = compare(CASES[name], door, DOORS[door])
    if result.skipped:
        pytest.skip(result.skipped)
    assert result.ok, result


def _faulty(change):
    """A door with a fault: `change` turns a case's inputs into others, or its results."""
    door = DOORS["jax"]
    return {"faulty": Door(lambda inputs: change(door.run, inputs), door.refuses)}


def _without(option):
    return lambda run, inputs: run(
        dataclasses.replace(inputs, options={k: v for k, v in inputs.options.items() if k != option})
    )


def _one_token_too_many(run, inputs):
    return run(dataclasses.replace(inputs, seq_lens=inputs.seq_lens + 1))


def _one_block_wrong(run, inputs):
    table = inputs.block_table.copy()
    table[3, 1] = table[3, 0]
    return run(dataclasses.replace(inputs, block_table=table))


def _one_poison_block(run, inputs):
    table = inputs.block_table.copy()
    table[3, 1] = np.setdiff1d(np.arange(len(inputs.key_buffer)), inputs.block_table)[0]
    return run(dataclasses.replace(inputs, block_table=table))


def _last_row_unwritten(run, inputs):
    out, lse = run(inputs)
    out[-1] = np.nan
    return out, lse


def _lse_of_base_two(run, inputs):
    out, lse = run(inputs)
    return out, lse / np.log(2)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("mixed", _one_token_too_many),
        ("mixed", _one_block_wrong),
        ("mixed", _one_poison_block),
        ("int8-head", _one_token_too_many),
        ("int8-head", _one_poison_block),
        ("mixed", _last_row_unwritten),
        ("mixed", _lse_of_base_two),
        ("option-soft-cap", _without("soft_cap")),
        ("option-window", _without("window")),
        ("option-alibi", _without("alibi_slopes")),
        ("option-sinks", _without("sinks")),
        ("option-mask-mod", _without("mask_mod")),
        ("option-score-mod", _without("score_mod")),
        ("option-encoder", _without("causal")),
    ],
)
def test_a_planted_fault_is_found(name, fault):
    (good,) = run({"jax": DOORS["jax"]}, [CASES[name]])
    (bad,) = run(_faulty(fault), [CASES[name]])
    assert good.ok
    assert not bad.ok


def test_the_poison_is_there():
    """A reader that ignored lengths would see NaN, in keys and in values."""
    inputs = build(Case("poison", **MIXED))
    assert np.isnan(inputs.key_buffer).any()
    assert np.isnan(inputs.value_buffer).any()
    assert (inputs.block_table < 0).any()
    assert (inputs.block_table >= inputs.key_buffer.shape[0]).any()


def _call(inputs, rows=None, **options):
    """The case's output, or that of some of its requests alone; bits."""
    cache = KVCache.from_arrays(inputs.key_buffer, inputs.value_buffer)
    rows = range(len(inputs.seq_lens)) if rows is None else rows
    starts = inputs.query_start_loc
    query = np.concatenate([inputs.query[starts[r] : starts[r + 1]] for r in rows])
    lens = np.diff(starts)[list(rows)]
    batch = PagedBatch.create(inputs.block_table[list(rows)], inputs.seq_lens[list(rows)], query_lens=lens)
    return [np.asarray(x) for x in paged_attention(query, cache, batch, return_lse=True, **options)]


def test_results_are_the_same_bits_run_after_run():
    inputs = build(CASES["mixed"])
    first, second = _call(inputs), _call(inputs)
    assert [x.tobytes() for x in first] == [x.tobytes() for x in second]


@pytest.mark.parametrize("name", ["mixed", "decode", "chunked-prefill", "bfloat16"])
def test_batch_invariant_results_do_not_depend_on_the_batch(name):
    inputs = build(CASES[name])
    whole, whole_lse = _call(inputs, batch_invariant=True)
    for r in range(len(inputs.seq_lens)):
        part = slice(*inputs.query_start_loc[r : r + 2])
        alone, alone_lse = _call(inputs, [r], batch_invariant=True)
        np.testing.assert_array_equal(alone, whole[part])
        np.testing.assert_array_equal(alone_lse, whole_lse[:, part])


def test_varying_batches_in_one_bucket_compile_once():
    traces = 0

    @jax.jit
    def step(query, cache, batch):
        nonlocal traces
        traces += 1
        return paged_attention(query, cache, batch)

    cache = KVCache.zeros(32, 8, 2, 16, "float32")
    for lens in ([3, 9], [1, 30, 7], [5, 5, 5, 5], [2]):
        batch = PagedBatch.create([[i, i + 4, i + 8, i + 12] for i in range(len(lens))], lens, block_size=8)
        batch = batch.pad(num_reqs=4, num_tokens=4, max_blocks_per_req=4)
        out = step(np.ones((4, 4, 16), np.float32), cache, batch)
        assert out.shape == (4, 4, 16)
        assert not np.asarray(out[len(lens) :]).any()
    assert traces == 1


@pytest.mark.parametrize("name", ["mixed", "decode"])
def test_nan_outside_every_window_never_shows(name):
    """An engine may reuse the blocks that a sliding window has left behind."""
    case = dataclasses.replace(CASES[name], options=(("window", (9, 0)),))
    inputs = build(case)
    expected, _ = inputs.expected()
    key, value = inputs.key_buffer.copy(), inputs.value_buffer.copy()
    for row, new, length in zip(inputs.block_table, case.query_lens, inputs.seq_lens, strict=True):
        left_behind = max(0, length - new - 9) // case.block_size
        key[row[:left_behind]] = value[row[:left_behind]] = np.nan
    out, _ = _call(dataclasses.replace(inputs, key_buffer=key, value_buffer=value), window=(9, 0))
    assert np.abs(out - expected).max() < 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("window", [(None, 2**31 - 1), (2**31 - 1, 2**31 - 1), (2**31 - 1, None), (2**40, 2**40)])
@pytest.mark.parametrize("name", ["mixed", "cross-attention"])
def test_a_huge_window_is_no_window(name, window):
    inputs = build(dataclasses.replace(CASES[name], options=(("causal", False),)))
    out, lse = _call(inputs, causal=False, window=window)
    expected, expected_lse = _call(inputs, causal=False)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
