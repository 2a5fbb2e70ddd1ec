"""Slot mappings, against their definition for one token at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.metadata.slots import (
    PAD_SLOT_ID,
    PAIRWISE_LIMIT,
    compute_slot_mapping,
    compute_slot_mapping_start_idx,
    is_block_tables_empty,
    last_writes,
    request_ids,
    slot_mapping_from_block_table,
)

INT32_MAX = 2**31 - 1
NUM_REQS, WIDTH, NUM_TOKENS = 3, 4, 12


def expected_slots(table, seq_lens, query_lens, block_size, num_tokens):
    slots = []
    for row, seq_len, query_len in zip(table, seq_lens, query_lens, strict=True):
        for position in range(seq_len - query_len, seq_len):
            known = 0 <= position < len(row) * block_size and row[position // block_size] >= 0
            slots.append(row[position // block_size] * block_size + position % block_size if known else PAD_SLOT_ID)
    return (slots + [PAD_SLOT_ID] * num_tokens)[:num_tokens]


@st.composite
def batches(draw):
    """Tables with garbage; requests longer than their table, without tokens, or with more new tokens than tokens."""
    table = draw(st.lists(st.lists(st.integers(-2, 99), min_size=WIDTH, max_size=WIDTH), min_size=3, max_size=3))
    query_lens = draw(st.lists(st.integers(0, 6), min_size=NUM_REQS, max_size=NUM_REQS))
    seq_lens = draw(st.lists(st.integers(0, 20), min_size=NUM_REQS, max_size=NUM_REQS))
    return table, seq_lens, query_lens


@settings(deadline=None, max_examples=200)
@given(batches(), st.integers(1, 5), st.integers(0, 20))
def test_slot_mapping_in_numpy(batch, block_size, num_tokens):
    table, seq_lens, query_lens = batch
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    got = slot_mapping_from_block_table(
        np.array(table, np.int32), np.array(seq_lens, np.int32), starts, block_size=block_size, num_tokens=num_tokens
    )
    assert isinstance(got, np.ndarray) and got.dtype == np.int32
    assert got.tolist() == expected_slots(table, seq_lens, query_lens, block_size, num_tokens)


jitted = jax.jit(functools.partial(slot_mapping_from_block_table, block_size=4, num_tokens=NUM_TOKENS))


@settings(deadline=None, max_examples=100)
@given(batches())
def test_slot_mapping_under_jit(batch):
    table, seq_lens, query_lens = batch
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    got = jitted(np.array(table, np.int32), np.array(seq_lens, np.int32), starts)
    assert isinstance(got, jax.Array) and got.dtype == jnp.int32
    assert got.tolist() == expected_slots(table, seq_lens, query_lens, 4, NUM_TOKENS)


@pytest.mark.parametrize("jit", [False, True], ids=["numpy", "jit"])
@pytest.mark.parametrize("block_size", [1, 16, 100, 256])
def test_garbage_blocks_do_not_wrap_around_to_real_slots(jit, block_size):
    too_large, num_tokens = INT32_MAX // block_size, 4 * block_size
    table = np.array([[INT32_MAX, -(2**31), too_large, too_large - 1]], np.int32)
    call = functools.partial(slot_mapping_from_block_table, block_size=block_size, num_tokens=num_tokens)
    got = np.asarray((jax.jit(call) if jit else call)(table, np.int32([num_tokens]), np.int32([0, num_tokens])))
    assert np.all(got[: 3 * block_size] == PAD_SLOT_ID)
    np.testing.assert_array_equal(got[3 * block_size :], (too_large - 1) * block_size + np.arange(block_size))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_empty_tables(shape):
    starts = np.arange(shape[0] + 1, dtype=np.int32)
    got = slot_mapping_from_block_table(
        np.zeros(shape, np.int32), np.ones(shape[0], np.int32), starts, block_size=4, num_tokens=3
    )
    assert got.tolist() == [PAD_SLOT_ID] * 3 and got.dtype == np.int32


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_request_ids(convert):
    got = request_ids(convert(np.array([0, 2, 2, 5, 5], np.int32)), 7)
    assert got.dtype == np.int32 and got.tolist() == [0, 0, 2, 2, 2, 4, 4]
    assert request_ids(convert(np.array([0, 3], np.int32)), 2).tolist() == [0, 0]
    assert request_ids(convert(np.array([0], np.int32)), 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        (0, (True, 10, 0, None, False)),
        (0, (False, 1, 9, 4, False)),
        (0, (True, 10, 0, 4, True)),
        (6, (True, 10, 0, 4, False)),
        (0, (True, 10, 0, 10, False)),
        (0, (True, 3, 0, 4, False)),
        (0, (True, 10, 5, 4, True)),
    ],
)
def test_start_idx(expected, arguments):
    assert compute_slot_mapping_start_idx(*arguments) == expected


def test_start_idx_knows_no_chunks_with_the_first_block_manager():
    with pytest.raises(ValueError, match=r"context_len: .* expected 0, got 5"):
        compute_slot_mapping_start_idx(True, 10, 5, 4, False)
    assert compute_slot_mapping_start_idx(True, 10, 5, 4) == 0


def test_block_tables_are_empty():
    assert is_block_tables_empty(None) and is_block_tables_empty({}) and is_block_tables_empty({1: None, 2: None})
    assert not is_block_tables_empty({1: [3]}) and not is_block_tables_empty({1: None, 2: []})


def test_slots_of_a_prompt_of_a_chunk_and_of_a_decode():
    slots = [77]
    tables = {0: [5, 2], "b": [1, 0, 7]}
    compute_slot_mapping(False, slots, 0, 5, 0, 0, 4, tables)
    assert slots == [77, 20, 21, 22, 23, 8]
    compute_slot_mapping(False, slots, "b", 10, 7, 0, 4, tables)
    assert slots[6:] == [3, 28, 29]
    compute_slot_mapping(False, slots, "b", 12, 11, 0, 4, tables)
    assert slots[9:] == [31]
    compute_slot_mapping(False, slots, "b", 11, 11, 0, 4, {"b": []})
    assert len(slots) == 10 and all(type(slot) is int for slot in slots)


def test_slots_before_the_start_are_padding():
    slots = []
    compute_slot_mapping(False, slots, 0, 7, 0, 5, 4, {0: [5, 2]})
    assert slots == [PAD_SLOT_ID] * 5 + [9, 10]
    slots = []
    compute_slot_mapping(False, slots, 0, 7, 4, 5, 4, {0: [5, 2]})
    assert slots == [PAD_SLOT_ID, 9, 10]


def test_profile_runs_have_no_slots():
    for tables in (None, {0: None}):
        slots = [3]
        compute_slot_mapping(is_block_tables_empty(tables), slots, 0, 6, 0, 0, 4, tables)
        assert slots == [3] + [PAD_SLOT_ID] * 6


@given(st.lists(st.integers(0, 50), min_size=6, max_size=6), st.data())
def test_slots_of_one_sequence(table, data):
    block_size = data.draw(st.integers(1, 5))
    seq_len = data.draw(st.integers(0, 6 * block_size))
    context_len = data.draw(st.integers(0, seq_len))
    start_idx = data.draw(st.integers(0, seq_len))
    slots = []
    compute_slot_mapping(False, slots, 9, seq_len, context_len, start_idx, block_size, {9: table})
    assert slots == [
        table[p // block_size] * block_size + p % block_size if p >= start_idx else PAD_SLOT_ID
        for p in range(context_len, seq_len)
    ]


def test_errors_append_nothing():
    slots = []
    with pytest.raises(ValueError, match=r"block_tables\[4\]: 9 tokens in blocks of 4 need 3 blocks, got 2"):
        compute_slot_mapping(False, slots, 4, 9, 0, 0, 4, {4: [1, 2]})
    with pytest.raises(ValueError, match=r"block_tables: expected the table of each sequence .* got None"):
        compute_slot_mapping(False, slots, 4, 9, 0, 0, 4, None)
    with pytest.raises(ValueError, match="block_size: expected a positive int, got 0"):
        compute_slot_mapping(False, slots, 4, 9, 0, 0, 0, {4: [1, 2]})
    assert slots == []


@pytest.mark.parametrize("tokens", [PAIRWISE_LIMIT, PAIRWISE_LIMIT + 1])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_last_writes(tokens, dtype):
    slots = np.random.default_rng(3).integers(-20, 700, tokens).astype(dtype)
    slots[:2] = np.iinfo(dtype).max, np.iinfo(dtype).min
    with jax.enable_x64(True):
        got = np.asarray(last_writes(jnp.asarray(slots), 680))
    last = {slot: token for token, slot in enumerate(slots.tolist())}
    expected = [slot if 0 <= slot < 680 and last[slot] == token else -1 for token, slot in enumerate(slots.tolist())]
    assert got.dtype == np.int32
    assert got.tolist() == expected
