"""PagedBatch: what it takes, what it computes, what it refuses, and how it grows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxpaged.metadata.batch import PagedBatch, pad_tokens

TABLE, SEQ_LENS, QUERY_LENS = [[3, 1, -1], [0, 2, 5]], [5, 11], [2, 3]
STARTS = [0, 2, 5]
SLOTS = [3 * 4 + 3, 1 * 4 + 0, 5 * 4 + 0, 5 * 4 + 1, 5 * 4 + 2]  # of positions 3, 4; 8, 9, 10, in blocks of 4

KINDS = {
    "list": lambda x, dtype: x,
    "tuple": lambda x, dtype: tuple(x),
    "numpy": np.array,
    "jax": lambda x, dtype: jnp.array(x, jnp.int32),
    "torch": lambda x, dtype: torch.tensor(x, dtype=getattr(torch, np.dtype(dtype).name)),
}


def equal(batch, table=TABLE, seq_lens=SEQ_LENS, starts=STARTS, slots=SLOTS):
    for got, expected in ((batch.block_table, table), (batch.seq_lens, seq_lens), (batch.query_start_loc, starts)):
        assert isinstance(got, jax.Array) and got.dtype == jnp.int32
        np.testing.assert_array_equal(got, expected)
    if slots is None:
        assert batch.slot_mapping is None
    else:
        assert isinstance(batch.slot_mapping, jax.Array)
        np.testing.assert_array_equal(batch.slot_mapping, slots)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_create_from_any_kind_of_array(kind, dtype):
    table, seq_lens, query_lens, starts, slots = (
        KINDS[kind](x, dtype) for x in (TABLE, SEQ_LENS, QUERY_LENS, STARTS, SLOTS)
    )
    by_starts = PagedBatch.create(table, seq_lens, starts, slot_mapping=slots)
    by_lens = PagedBatch.create(table, seq_lens, query_lens=query_lens, block_size=4)
    for batch in (by_starts, by_lens):
        equal(batch)
        assert batch.slot_mapping.dtype == jnp.int32
        assert (batch.num_reqs, batch.max_blocks_per_req, batch.max_query_len) == (2, 3, 4)
        assert batch.query_lens.tolist() == [2, 3] and batch.context_lens.tolist() == [3, 8]


def test_one_new_token_a_request():
    batch = PagedBatch.create(TABLE, SEQ_LENS, block_size=4)
    equal(batch, starts=[0, 1, 2], slots=[4, 22])
    assert batch.max_query_len == 1
    equal(PagedBatch.create(TABLE, SEQ_LENS), starts=[0, 1, 2], slots=None)


def test_rows_of_different_length_are_padded():
    equal(PagedBatch.create([[3, 1], [0, 2, 5]], SEQ_LENS, STARTS), slots=None)
    equal(PagedBatch.create(([], np.array([0, 2, 5])), SEQ_LENS, STARTS), [[-1] * 3, [0, 2, 5]], slots=None)
    empty = PagedBatch.create([[], []], SEQ_LENS, STARTS, block_size=4)
    assert empty.block_table.shape == (2, 0) and empty.slot_mapping.tolist() == [-1] * 5


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_table_entries_that_int32_cannot_hold_are_no_block(convert):
    batch = PagedBatch.create(convert([[2**40, 1], [2**32 + 2, -(2**33)]]), [8, 8], query_lens=[8, 8], block_size=4)
    assert batch.block_table.tolist() == [[-1, 1], [-1, -1]]
    assert batch.slot_mapping.tolist() == [-1] * 4 + [4, 5, 6, 7] + [-1] * 8


def test_garbage_entries_past_a_length_stay_out_of_the_slots():
    table = np.array([[7, -(2**31), 2**31 - 1], [2**31 - 1, -1, 0]], np.int32)
    batch = PagedBatch.create(table, [4, 0], query_lens=[4, 0], block_size=4)
    assert batch.slot_mapping.tolist() == [28, 29, 30, 31]
    np.testing.assert_array_equal(batch.block_table, table)


def test_int64_slots_without_x64_become_int32():
    slots = np.array([5, -1, 2**31 - 1, 2**31, -(2**40), 2**32 + 5], np.int64)
    batch = PagedBatch.create(TABLE, SEQ_LENS, slot_mapping=slots)
    assert batch.slot_mapping.dtype == jnp.int32
    assert batch.slot_mapping.tolist() == [5, -1, 2**31 - 1, -1, -1, -1]


@pytest.mark.parametrize("convert", [np.array, torch.tensor, jnp.array])
def test_int64_with_x64(convert):
    with jax.enable_x64(True):
        table, slots = convert([[2**32 + 3, 1]]), convert([5, -(2**40), 2**32 + 5])
        batch = PagedBatch.create(table, convert([8]), slot_mapping=slots)
        assert batch.slot_mapping.dtype == jnp.int64 and batch.slot_mapping.tolist() == [5, -(2**40), 2**32 + 5]
        assert batch.block_table.dtype == batch.seq_lens.dtype == jnp.int32
        assert batch.block_table.tolist() == [[-1, 1]] and batch.seq_lens.tolist() == [8]
        with pytest.raises(ValueError, match="seq_lens: values must fit int32, got 4294967304 to 4294967304"):
            PagedBatch.create(table, convert([2**32 + 8]))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_other_integers(dtype, convert):
    table, seq_lens, starts, slots = (convert(np.array(x, dtype)) for x in ([[3, 1]], [5], [0, 2], [7, 0]))
    equal(PagedBatch.create(table, seq_lens, starts, slot_mapping=slots), [[3, 1]], [5], [0, 2], [7, 0])


def test_unsigned_values_that_int32_cannot_hold():
    big = np.array([2**31 + 4], np.uint32)
    for convert in (np.asarray, jnp.asarray):
        assert PagedBatch.create(convert(big[None]), [3]).block_table.tolist() == [[-1]]
        assert PagedBatch.create([[1]], [3], slot_mapping=convert(big)).slot_mapping.tolist() == [-1]
        with pytest.raises(ValueError, match="seq_lens: values must fit int32, got 2147483652 to 2147483652"):
            PagedBatch.create([[1]], convert(big))


@pytest.mark.parametrize(
    ("query_lens", "expected"), [([1, 1], 1), ([0, 0], 1), ([0, 2], 2), ([3, 1], 4), ([17, 5], 32), ([16, 5], 16)]
)
def test_max_query_len_is_a_power_of_two(query_lens, expected):
    assert PagedBatch.create(TABLE, [99, 99], query_lens=query_lens).max_query_len == expected


def test_without_requests():
    batch = PagedBatch.create([], [], block_size=4)
    equal(batch, np.zeros((0, 0)), [], [0], [])
    assert PagedBatch.create(np.zeros((0, 7), np.int32), [], [0]).max_blocks_per_req == 7


def test_create_under_jit():
    traces = []

    @jax.jit
    def create(table, seq_lens, query_lens):
        traces.append(1)
        return PagedBatch.create(table, seq_lens, query_lens=query_lens, block_size=4, num_tokens=7)

    batch = create(jnp.array(TABLE), jnp.array(SEQ_LENS), jnp.array(QUERY_LENS))
    equal(batch, slots=[*SLOTS, -1, -1])
    assert batch.max_query_len is None
    batch = create(jnp.array(TABLE), jnp.array([1, 12]), jnp.array([1, 1]))
    equal(batch, seq_lens=[1, 12], starts=[0, 1, 2], slots=[12, 23, -1, -1, -1, -1, -1])
    assert len(traces) == 1


def test_num_tokens_shortens_or_lengthens_the_slots():
    for num_tokens, slots in ((3, SLOTS[:3]), (8, [*SLOTS, -1, -1, -1])):
        equal(PagedBatch.create(TABLE, SEQ_LENS, STARTS, block_size=4, num_tokens=num_tokens), slots=slots)


def test_a_batch_is_a_pytree():
    batch = PagedBatch.create(TABLE, SEQ_LENS, STARTS, block_size=4)
    assert len(jax.tree.leaves(batch)) == 4
    shifted = jax.jit(lambda batch: jax.tree.map(lambda x: x + 1, batch))(batch)
    assert shifted.seq_lens.tolist() == [6, 12] and shifted.max_query_len == 4
    other = PagedBatch.create(TABLE, SEQ_LENS, [0, 1, 5], block_size=4)
    assert jax.tree.structure(batch) == jax.tree.structure(other)  # lengths of 3 and 4 share a program


def test_pad():
    batch = PagedBatch.create(TABLE, SEQ_LENS, STARTS, block_size=4)
    expected_table = [[3, 1, -1, -1], [0, 2, 5, -1], [-1] * 4, [-1] * 4]
    for pad in (
        PagedBatch.pad,
        jax.jit(PagedBatch.pad, static_argnames=("num_reqs", "num_tokens", "max_blocks_per_req")),
    ):
        padded = pad(batch, num_reqs=4, num_tokens=7, max_blocks_per_req=4)
        equal(padded, expected_table, [*SEQ_LENS, 0, 0], [*STARTS, 5, 5], [*SLOTS, -1, -1])
        assert padded.query_lens.tolist() == [2, 3, 0, 0] and padded.max_query_len == 4
    equal(batch.pad(), TABLE)
    equal(batch.pad(num_reqs=2, num_tokens=5, max_blocks_per_req=3), TABLE)
    without_slots = PagedBatch.create(TABLE, SEQ_LENS, STARTS).pad(num_reqs=3, num_tokens=9)
    equal(without_slots, [*TABLE, [-1] * 3], [*SEQ_LENS, 0], [*STARTS, 5], None)


def test_pad_keeps_int64_slots():
    with jax.enable_x64(True):
        batch = PagedBatch.create(TABLE, SEQ_LENS, STARTS, slot_mapping=np.array(SLOTS, np.int64)).pad(num_tokens=6)
        assert batch.slot_mapping.dtype == jnp.int64 and batch.slot_mapping.tolist() == [*SLOTS, -1]


def test_pad_to_bucket():
    batch = PagedBatch.create([*TABLE, [1, 2, 3]], [*SEQ_LENS, 1], query_lens=[2, 3, 0], block_size=4)
    padded = batch.pad_to_bucket()
    assert padded.block_table.shape == (4, 4) and padded.slot_mapping.shape == (8,)
    assert padded.slot_mapping.tolist() == [*SLOTS, -1, -1, -1] and padded.query_start_loc.tolist() == [0, 2, 5, 5, 5]
    padded = batch.pad_to_bucket([6, 10, 100])
    assert padded.block_table.shape == (6, 6) and padded.slot_mapping.shape == (6,)
    assert batch.pad_to_bucket([3, 5]).block_table.shape == (3, 3)
    with pytest.raises(ValueError, match="buckets: the largest is 4, but 5 must fit"):
        batch.pad_to_bucket([2, 4])


def test_pad_tokens():
    x = np.arange(12, dtype=np.float16).reshape(3, 2, 2)
    padded = pad_tokens(x, 5)
    assert padded.dtype == jnp.float16 and padded.shape == (5, 2, 2)
    np.testing.assert_array_equal(padded[:3], x)
    assert not np.any(padded[3:])
    np.testing.assert_array_equal(pad_tokens(jnp.arange(3), 3), [0, 1, 2])
    with pytest.raises(ValueError, match="num_tokens: can't pad 3 to 2"):
        pad_tokens(x, 2)


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("num_reqs: can't pad 2 to 1", {"num_reqs": 1}),
        ("num_tokens: can't pad 5 to 4", {"num_tokens": 4}),
        ("max_blocks_per_req: can't pad 3 to 0", {"max_blocks_per_req": 0}),
    ],
)
def test_pad_does_not_shrink(message, sizes):
    with pytest.raises(ValueError, match=message):
        PagedBatch.create(TABLE, SEQ_LENS, STARTS, block_size=4).pad(**sizes)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (
            ValueError,
            r"block_table: expected shape \[num_reqs, max_blocks_per_req\], got \[2\]",
            {"block_table": np.ones(2, int)},
        ),
        (ValueError, r"block_table: expected a list of blocks in row 0, got shape \[\]", {"block_table": [1, 2]}),
        (
            ValueError,
            r"block_table: expected a list of blocks in row 1, got shape \[1, 2\]",
            {"block_table": [[1], [[1, 2]]]},
        ),
        (TypeError, "block_table: expected integers, got float64 in row 1", {"block_table": [[1], [2.0]]}),
        (TypeError, "block_table: expected integers, got float32", {"block_table": np.ones((2, 3), np.float32)}),
        (TypeError, "block_table: expected integers, got bool", {"block_table": torch.ones((2, 3), dtype=torch.bool)}),
        (TypeError, "block_table: expected a list or an array of integers, got str", {"block_table": "abc"}),
        (ValueError, r"seq_lens: expected shape \[2\], got \[3\]", {"seq_lens": [1, 2, 3]}),
        (ValueError, r"seq_lens: expected shape \[2\], got \[2, 1\]", {"seq_lens": [[1], [2]]}),
        (
            ValueError,
            "seq_lens: expected a list of integers, got lists of different length",
            {"seq_lens": [[1], [2, 3]]},
        ),
        (TypeError, "seq_lens: expected a list or an array of integers, got int", {"seq_lens": 5}),
        (TypeError, "seq_lens: expected integers, got float64", {"seq_lens": [1.0, 2.0]}),
        (ValueError, "seq_lens: expected lengths of 0 or more, got -2", {"seq_lens": [-2, 3]}),
        (ValueError, "seq_lens: values must fit int32, got 1 to 1099511627776", {"seq_lens": [1, 2**40]}),
        (ValueError, r"query_start_loc: expected shape \[3\], got \[2\]", {"query_start_loc": [0, 2]}),
        (ValueError, r"query_start_loc: expected to start at 0 .* got \[1, 2, 3\]", {"query_start_loc": [1, 2, 3]}),
        (ValueError, r"query_start_loc: .* never to fall .* got \[0, 3, 2\]", {"query_start_loc": [0, 3, 2]}),
        (ValueError, r"query_lens: expected shape \[2\], got \[1\]", {"query_lens": [2]}),
        (ValueError, r"query_lens of 0 or more\), got \[0, 2, 1\]", {"query_lens": [2, -1]}),
        (TypeError, "query_lens: expected integers, got bool", {"query_lens": [True, False]}),
        (
            ValueError,
            "query_lens: give query_start_loc or query_lens, not both",
            {"query_lens": [1, 1], "query_start_loc": [0, 1, 2]},
        ),
        (ValueError, r"slot_mapping: expected shape \[num_tokens\], got \[1, 2\]", {"slot_mapping": [[1, 2]]}),
        (TypeError, "slot_mapping: expected integers, got float32", {"slot_mapping": jnp.ones(3)}),
        (ValueError, "block_size: expected a positive int, got 0", {"block_size": 0}),
        (TypeError, "block_size: expected a positive int, got 16.0", {"block_size": 16.0}),
    ],
)
def test_errors(error, message, change):
    arguments = {"block_table": TABLE, "seq_lens": SEQ_LENS, **change}
    with pytest.raises(error, match=message):
        PagedBatch.create(**arguments)


def test_num_tokens_is_needed_under_jit():
    create = jax.jit(lambda starts: PagedBatch.create(TABLE, SEQ_LENS, starts, block_size=4))
    with pytest.raises(ValueError, match=r"num_tokens: under jit .* expected num_tokens or slot_mapping, got neither"):
        create(jnp.array(STARTS))


def test_shifted_blocks_name_others_and_garbage_names_none():
    table = np.array([[0, 7, -1], [3, 8, 2**31 - 1]], np.int32)
    batch = PagedBatch.create(table, [5, 9], slot_mapping=np.array([0, 31, 32, -1], np.int32))
    up = jax.jit(lambda by: batch.shift_blocks(by, num_blocks=8, block_size=4))(16)
    assert up.block_table.tolist() == [[16, 23, -1], [19, -1, -1]]
    assert up.slot_mapping.tolist() == [64, 95, -1, -1]
    down = batch.shift_blocks(-4, num_blocks=8, block_size=4)
    assert down.block_table.tolist() == [[-1, 3, -1], [-1, -1, -1]]
    assert down.slot_mapping.tolist() == [-1, 15, -1, -1]
