"""Block masks, against the whole mask of each request cut into tiles in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.metadata import block_mask as module
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.block_mask import EMPTY, FULL, PARTIAL, create_block_mask
from jaxpaged.metadata.masks import (
    CausalMask,
    DocumentMask,
    FullMask,
    PrefixLMMask,
    SlidingWindowMask,
    and_masks,
    not_mask,
)

# A prefill, a chunk after a context, one new token, a padding row, a request of whole tiles.
SEQ_LENS = [13, 30, 21, 0, 16]
QUERY_LENS = [13, 9, 1, 0, 16]
NUM_HEADS, Q_BLOCK, KV_BLOCK = 3, 4, 8


def make_batch(seq_lens=SEQ_LENS, query_lens=QUERY_LENS):
    return PagedBatch.create(np.zeros((len(seq_lens), 1), np.int32), seq_lens, query_lens=query_lens)


def by_head(b, h, q_pos, kv_pos):
    return (q_pos - kv_pos) % (h + 2) == 0


def only_head_one(b, h, q_pos, kv_pos):
    return h == 1


def expected_tiles(mask, num_heads=1):
    starts = np.subtract(SEQ_LENS, QUERY_LENS).astype(np.int32)
    b, h = np.arange(5, dtype=np.int32).reshape(5, 1, 1, 1), np.arange(num_heads, dtype=np.int32).reshape(-1, 1, 1)
    q_pos, kv_pos = starts.reshape(5, 1, 1, 1) + np.arange(16, dtype=np.int32)[:, None], np.arange(32, dtype=np.int32)
    whole = np.broadcast_to(jax.jit(lambda *args: mask(*args))(b, h, q_pos, kv_pos), (5, num_heads, 16, 32)) != 0
    tiles = np.zeros((5, num_heads, 4, 4), np.int8)
    for r, t, k in np.ndindex(5, 4, 4):
        kept = whole[r, :, : QUERY_LENS[r], : SEQ_LENS[r]]
        kept = kept[:, t * Q_BLOCK : (t + 1) * Q_BLOCK, k * KV_BLOCK : (k + 1) * KV_BLOCK]
        if kept.size:
            tiles[r, :, t, k] = np.where(kept.all((1, 2)), FULL, np.where(kept.any((1, 2)), PARTIAL, EMPTY))
    return tiles


MASKS = {
    "full": FullMask(),
    "nothing": not_mask(FullMask()),
    "causal": CausalMask(),
    "window": and_masks(CausalMask(), SlidingWindowMask(5, None)),
    "prefix": PrefixLMMask(np.array([4, 25, 0, 7, 16], np.int32)),
    "document": DocumentMask(np.arange(5 * 30, dtype=np.int32).reshape(5, 30) // 8),
    "by head": by_head,
    "only head one": only_head_one,
    "Python bool": lambda b, h, q_pos, kv_pos: True,
    "int": lambda b, h, q_pos, kv_pos: 2 * (kv_pos <= q_pos),
}


@pytest.mark.parametrize("name", MASKS)
def test_tiles_of_each_head(name):
    mask = MASKS[name]
    got = create_block_mask(mask, make_batch(), num_heads=NUM_HEADS, q_block_size=Q_BLOCK, kv_block_size=KV_BLOCK)
    assert got.tiles.dtype == jnp.int8 and (got.num_q_blocks, got.num_kv_blocks) == (4, 4)
    np.testing.assert_array_equal(got.tiles, expected_tiles(mask, NUM_HEADS))


def test_without_heads_the_mask_is_evaluated_for_head_zero():
    def mask(b, h, q_pos, kv_pos):
        return (kv_pos <= q_pos) & (h == 0)

    got = create_block_mask(mask, make_batch(), q_block_size=Q_BLOCK, kv_block_size=KV_BLOCK)
    np.testing.assert_array_equal(got.tiles, expected_tiles(CausalMask())[:, 0])


def test_causal_prefill_written_out():
    got = create_block_mask(CausalMask(), make_batch([12], [12]), q_block_size=4, kv_block_size=4)
    np.testing.assert_array_equal(got.tiles, [[[1, 0, 0], [2, 1, 0], [2, 2, 1]]])
    assert float(got.sparsity()) == pytest.approx(3 / 9)


def test_a_full_tile_may_reach_past_the_ends():
    got = create_block_mask(FullMask(), make_batch([5], [3]), q_block_size=4, kv_block_size=4)
    np.testing.assert_array_equal(got.tiles, [[[FULL, FULL]]])


@pytest.mark.parametrize("scores_at_once", [1, 3 * Q_BLOCK * KV_BLOCK, 10**9])
def test_the_number_of_tiles_evaluated_together_changes_nothing(monkeypatch, scores_at_once):
    monkeypatch.setattr(module, "_SCORES_AT_ONCE", scores_at_once)
    mask = and_masks(CausalMask(), lambda b, h, q_pos, kv_pos: kv_pos != 3)  # a new function: compiled here
    got = create_block_mask(mask, make_batch(), num_heads=2, q_block_size=Q_BLOCK, kv_block_size=KV_BLOCK)
    np.testing.assert_array_equal(got.tiles, expected_tiles(mask, 2))


def test_memory_does_not_grow_with_the_whole_mask():
    """A mask of 2**34 elements in all: the program that looks at them holds far less."""
    batch = make_batch([2**17], [2**17])
    grid, tile_shape = (1, 1, 2**10, 2**10), (128, 128)
    program = module._evaluate.lower(CausalMask(), batch.query_lens, batch.seq_lens, grid, tile_shape).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2**25


@pytest.mark.parametrize("num_heads", [None, NUM_HEADS])
def test_sparsity_counts_only_tiles_that_exist(num_heads):
    mask = MASKS["window"]
    got = create_block_mask(
        mask, make_batch(), num_heads=num_heads, q_block_size=Q_BLOCK, kv_block_size=KV_BLOCK, max_seq_len=100
    )
    existing = empty = 0
    tiles = expected_tiles(mask)[:, 0]
    for b, t, k in np.ndindex(*tiles.shape):
        if t * Q_BLOCK < QUERY_LENS[b] and k * KV_BLOCK < SEQ_LENS[b]:
            existing += 1
            empty += tiles[b, t, k] == EMPTY
    assert 0 < empty < existing
    assert float(got.sparsity()) == pytest.approx(empty / existing)


def test_sparsity_at_the_ends():
    batch = make_batch()
    assert float(create_block_mask(FullMask(), batch).sparsity()) == 0
    assert float(create_block_mask(not_mask(FullMask()), batch).sparsity()) == 1
    assert float(create_block_mask(FullMask(), make_batch([0], [0])).sparsity()) == 0


@pytest.mark.parametrize("num_heads", [None, NUM_HEADS])
def test_kept_blocks_lists_partial_and_full_tiles(num_heads):
    mask = and_masks(CausalMask(), SlidingWindowMask(17, None))
    block_mask = create_block_mask(
        mask, make_batch(), num_heads=num_heads, q_block_size=Q_BLOCK, kv_block_size=KV_BLOCK
    )
    tiles = np.asarray(block_mask.tiles)
    kept = jax.tree.map(np.asarray, block_mask.kept_blocks())
    assert {x.dtype for x in kept} == {np.dtype(np.int32)}
    seen = 0
    for row in np.ndindex(tiles.shape[:-1]):
        for state, counts, indices in (
            (PARTIAL, kept.kv_num_blocks, kept.kv_indices),
            (FULL, kept.full_kv_num_blocks, kept.full_kv_indices),
        ):
            expected = np.flatnonzero(tiles[row] == state)
            assert counts[row] == len(expected)
            assert indices[row].tolist() == [*expected, *[-1] * (tiles.shape[-1] - len(expected))]
            seen += len(expected)
    assert seen > 10


def test_under_jit_with_limits():
    @jax.jit
    def tiles(batch, mask):
        block_mask = create_block_mask(
            mask, batch, q_block_size=Q_BLOCK, kv_block_size=KV_BLOCK, max_query_len=16, max_seq_len=30
        )
        return block_mask, block_mask.sparsity(), block_mask.kept_blocks()

    mask = MASKS["prefix"]
    block_mask, sparsity, kept = tiles(make_batch(), mask)
    expected = create_block_mask(mask, make_batch(), q_block_size=Q_BLOCK, kv_block_size=KV_BLOCK)
    np.testing.assert_array_equal(block_mask.tiles, expected.tiles)
    assert block_mask.q_block_size == Q_BLOCK and block_mask.kv_block_size == KV_BLOCK
    assert float(sparsity) == float(expected.sparsity())
    jax.tree.map(np.testing.assert_array_equal, kept, expected.kept_blocks())


def test_under_jit_longer_requests_are_cut_off():
    @jax.jit
    def tiles(batch):
        return create_block_mask(
            CausalMask(), batch, q_block_size=Q_BLOCK, kv_block_size=KV_BLOCK, max_query_len=4, max_seq_len=16
        )

    got = tiles(make_batch([30], [9]))
    # As if of 16 tokens: the new ones start at position 7, at the end of the first block.
    np.testing.assert_array_equal(got.tiles, [[[FULL, PARTIAL]]])
    assert got.seq_lens.tolist() == [16]


def test_larger_limits_add_empty_tiles():
    small = create_block_mask(CausalMask(), make_batch(), q_block_size=Q_BLOCK, kv_block_size=KV_BLOCK)
    large = create_block_mask(
        CausalMask(), make_batch(), q_block_size=Q_BLOCK, kv_block_size=KV_BLOCK, max_query_len=24, max_seq_len=41
    )
    assert large.tiles.shape == (5, 6, 6)
    np.testing.assert_array_equal(large.tiles[:, :4, :4], small.tiles)
    assert not np.any(large.tiles[:, 4:]) and not np.any(large.tiles[:, :, 4:])


@pytest.mark.parametrize("lens", [([], []), ([0, 0], [0, 0])])
def test_empty_batches(lens):
    got = create_block_mask(CausalMask(), make_batch(*lens))
    assert got.tiles.shape == (len(lens[0]), 0, 0)
    got = create_block_mask(CausalMask(), make_batch(*lens), max_query_len=1, max_seq_len=1)
    np.testing.assert_array_equal(got.tiles, np.zeros((len(lens[0]), 1, 1)))


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "mask_mod: expected a function, got int", {"mask_mod": 3}),
        (TypeError, "batch: expected a PagedBatch, got list", {"batch": [1, 2]}),
        (ValueError, "num_heads: expected a positive int, got 0", {"num_heads": 0}),
        (TypeError, "q_block_size: expected a positive int, got 1.5", {"q_block_size": 1.5}),
        (ValueError, "kv_block_size: expected a positive int, got -8", {"kv_block_size": -8}),
        (ValueError, "max_query_len: expected 16 or more, the batch's longest, got 15", {"max_query_len": 15}),
        (ValueError, "max_seq_len: expected 30 or more, the batch's longest, got 29", {"max_seq_len": 29}),
        (ValueError, "max_seq_len: expected a positive int, got 0", {"max_seq_len": 0}),
    ],
)
def test_errors(error, message, change):
    with pytest.raises(error, match=message):
        create_block_mask(**{"mask_mod": CausalMask(), "batch": make_batch(), **change})


@pytest.mark.parametrize("missing", ["max_query_len", "max_seq_len"])
def test_limits_are_needed_under_jit(missing):
    limits = {name: 30 for name in ("max_query_len", "max_seq_len") if name != missing}
    with pytest.raises(ValueError, match=f"{missing}: under jit .* expected an int, got None"):
        jax.jit(lambda batch: create_block_mask(CausalMask(), batch, **limits).tiles)(make_batch())
