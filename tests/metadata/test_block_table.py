"""The inverse of a block table, against its definition in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.metadata.block_table import blocks_needed, physical_to_logical

NUM_BLOCKS, NUM_REQS, WIDTH, BLOCK_SIZE = 6, 3, 4, 4
# Blocks below 0, past the cache, and at the ends of int32, where arithmetic on them wraps around.
GARBAGE = [-(2**31), -7, -1, NUM_BLOCKS, 99, 2**31 - 1]


def inverse(table, num_blocks, seq_lens=None, block_size=None):
    result = [[-1] * num_blocks for _ in table]
    for r, row in enumerate(table):
        used = len(row) if seq_lens is None else (seq_lens[r] + block_size - 1) // block_size
        for logical, physical in enumerate(row[:used]):
            if 0 <= physical < num_blocks:
                result[r][physical] = logical
    return result


entries = st.one_of(st.integers(0, NUM_BLOCKS - 1), st.sampled_from(GARBAGE))
tables = st.lists(st.lists(entries, min_size=WIDTH, max_size=WIDTH), min_size=NUM_REQS, max_size=NUM_REQS)
lengths = st.lists(st.integers(0, BLOCK_SIZE * (WIDTH + 2)), min_size=NUM_REQS, max_size=NUM_REQS)
jitted = jax.jit(physical_to_logical, static_argnums=1, static_argnames="block_size")


@settings(deadline=None, max_examples=150)
@given(tables)
def test_inverse_of_any_table(table):
    got = jitted(jnp.array(table, jnp.int32), NUM_BLOCKS)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, inverse(table, NUM_BLOCKS))


@settings(deadline=None, max_examples=150)
@given(tables, lengths)
def test_only_used_entries_count_when_lengths_are_given(table, seq_lens):
    got = jitted(
        jnp.array(table, jnp.int32), NUM_BLOCKS, seq_lens=jnp.array(seq_lens, jnp.int32), block_size=BLOCK_SIZE
    )
    np.testing.assert_array_equal(got, inverse(table, NUM_BLOCKS, seq_lens, BLOCK_SIZE))


def test_permuted_row():
    got = physical_to_logical(np.array([[3, 5, 1, 7, 4, 2, 0, 6]], np.int32), 8)
    np.testing.assert_array_equal(got, [[6, 2, 5, 0, 4, 1, 7, 3]])


def test_block_twice_in_a_row_keeps_the_largest_logical_index():
    got = physical_to_logical(np.array([[2, 1, 2, 2, 1]], np.int32), 3)
    np.testing.assert_array_equal(got, [[-1, 4, 3]])


def test_block_shared_by_requests_is_in_both_rows():
    got = physical_to_logical(np.array([[5, 1], [5, 2]], np.int32), 6)
    np.testing.assert_array_equal(got, [[-1, 1, -1, -1, -1, 0], [-1, -1, 1, -1, -1, 0]])


def test_block_zero_is_ordinary_unless_reserved():
    table = np.array([[0, 1], [1, 0]], np.int32)
    np.testing.assert_array_equal(physical_to_logical(table, 2), [[0, 1], [1, 0]])
    np.testing.assert_array_equal(physical_to_logical(table, 2, reserve_block_zero=True), [[-1, 1], [-1, 0]])


def test_large_table_gives_the_same_bits_each_time():
    table = np.random.default_rng(0).integers(-3, 60, (64, 500)).astype(np.int32)
    first = np.asarray(physical_to_logical(table, 50))
    np.testing.assert_array_equal(first, inverse(table.tolist(), 50))
    for _ in range(3):
        np.testing.assert_array_equal(physical_to_logical(table, 50), first)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_integer_dtypes(dtype, convert):
    got = physical_to_logical(convert(np.array([[1, 3, 255]], np.uint8).astype(dtype)), 300)
    assert np.flatnonzero(np.asarray(got[0]) >= 0).tolist() == [1, 3, 255]
    assert got[0, 1] == 0 and got[0, 3] == 1 and got[0, 255] == 2


def test_int64_entries_do_not_wrap_around_to_other_blocks():
    got = physical_to_logical(np.array([[2**32 + 1, 2, -(2**32)]], np.int64), 3)
    np.testing.assert_array_equal(got, [[-1, -1, 1]])
    with jax.enable_x64(True):
        got = physical_to_logical(jnp.array([[2**32 + 1, 2, -(2**32)]], jnp.int64), 3)
        np.testing.assert_array_equal(got, [[-1, -1, 1]])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_tables(shape):
    got = physical_to_logical(np.zeros(shape, np.int32), 5)
    np.testing.assert_array_equal(got, np.full((shape[0], 5), -1))


def test_lengths_as_list_and_past_the_width():
    table = np.array([[4, 3, 2]], np.int32)
    np.testing.assert_array_equal(physical_to_logical(table, 5, seq_lens=[17], block_size=16), [[-1, -1, -1, 1, 0]])
    got = physical_to_logical(table, 5, seq_lens=np.array([2**40]), block_size=16)
    np.testing.assert_array_equal(got, [[-1, -1, 2, 1, 0]])


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "block_table: expected integers, got float32", {"block_table": np.zeros((1, 2), np.float32)}),
        (TypeError, "block_table: expected integers, got bool", {"block_table": np.zeros((1, 2), bool)}),
        (
            ValueError,
            r"block_table: expected shape \[num_reqs, max_blocks_per_req\], got \[2\]",
            {"block_table": [1, 2]},
        ),
        (ValueError, "num_blocks: expected a positive int, got 0", {"num_blocks": 0}),
        (TypeError, "num_blocks: expected a positive int, got 2.5", {"num_blocks": 2.5}),
        (ValueError, "block_size: expected seq_lens and block_size, or neither", {"seq_lens": [3]}),
        (ValueError, "seq_lens: expected seq_lens and block_size, or neither", {"block_size": 16}),
        (ValueError, r"seq_lens: expected shape \[1\], got \[2\]", {"seq_lens": [3, 4], "block_size": 16}),
        (ValueError, "seq_lens: expected lengths of 0 or more, got -3", {"seq_lens": [-3], "block_size": 16}),
        (TypeError, "seq_lens: expected integers, got float64", {"seq_lens": [3.0], "block_size": 16}),
        (ValueError, "block_size: expected a positive int, got -1", {"seq_lens": [3], "block_size": -1}),
    ],
)
def test_errors(error, message, call):
    call = {"block_table": np.zeros((1, 2), np.int32), "num_blocks": 4, **call}
    with pytest.raises(error, match=message):
        physical_to_logical(**call)


@settings(deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 300))
def test_blocks_needed_holds_the_sequence_and_no_more(seq_len, block_size):
    blocks = blocks_needed(seq_len, block_size)
    assert isinstance(blocks, int)
    assert (blocks - 1) * block_size < seq_len <= blocks * block_size or blocks == seq_len == 0
    assert blocks_needed([seq_len], block_size).tolist() == [blocks]
    assert blocks_needed(np.int32([[seq_len]]), block_size).tolist() == [[blocks]]


def test_blocks_needed_keeps_kind_and_works_under_jit():
    assert blocks_needed([], 16).shape == (0,)
    got = jax.jit(functools.partial(blocks_needed, block_size=16))(jnp.array([0, 1, 16, 17, 2**31 - 1], jnp.int32))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, [0, 1, 1, 2, 2**27])


def test_blocks_needed_errors():
    with pytest.raises(ValueError, match="seq_lens: expected lengths of 0 or more, got -1"):
        blocks_needed(-1, 16)
    with pytest.raises(TypeError, match="seq_lens: expected integers, got bool"):
        blocks_needed(True, 16)
    with pytest.raises(ValueError, match="block_size: expected a positive int, got 0"):
        blocks_needed(4, 0)
