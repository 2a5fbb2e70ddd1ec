"""What a device sees of a batch whose blocks are spread over a context axis."""

import jax
import numpy as np
import pytest

from jaxpaged import KVCache, PagedBatch, paged_attention
from jaxpaged.sharding import _decodes_packed, concatenate_batches


def test_a_decode_walks_over_its_own_blocks_alone():
    """A device with blocks 0 to 3, as `own_blocks` shows it the table: others' blocks are -1."""
    cache = KVCache.zeros(4, 4, 1, 8, "float32")
    table = [[-1, 2, -1, 0, -1], [-1, 1, -1, 3, -1], [2, -1, -1, -1, 9], [-1, -1, 3, -1, 1]]
    batch = PagedBatch.create(table, [15, 15, 18, 18], query_lens=[1, 3, 1, 1])
    packed = _decodes_packed(batch, cache)
    assert packed.seq_lens.tolist() == [7, 15, 4, 6]  # blocks 1 and 3, the latter with 3 tokens; all; block 0; 2 and 4
    assert packed.block_table[0, :2].tolist() == [2, 0]
    assert packed.block_table[1].tolist() == table[1]
    assert packed.block_table[2, :1].tolist() == [2]
    assert packed.block_table[3, :2].tolist() == [3, 1]
    rng = np.random.default_rng(0)
    cache = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), cache)
    query = rng.standard_normal((6, 2, 8), np.float32)
    for ours, want in zip(
        paged_attention(query, cache, packed, return_lse=True),
        paged_attention(query, cache, batch, return_lse=True),
        strict=True,
    ):
        np.testing.assert_allclose(ours, want, atol=1e-6)


def test_batches_are_laid_side_by_side():
    first = PagedBatch.create([[0, 1]], [7], query_lens=[3], block_size=4)
    second = PagedBatch.create([[2], [3]], [4, 1], query_lens=[1, 1], block_size=4)
    both = concatenate_batches([first, second])
    assert both.seq_lens.tolist() == [7, 0, 4, 1]
    assert both.query_start_loc.tolist() == [0, 3, 3, 0, 1, 2]
    assert both.block_table.tolist() == [[0, 1], [-1, -1], [2, -1], [3, -1]]
    assert both.slot_mapping.tolist() == [4, 5, 6, 11, 12, -1]
    assert both.max_query_len == 4


def test_batches_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="batches: expected one for each device along the data axis, got none"):
        concatenate_batches([])
    batches = [PagedBatch.create([[0]], [1], block_size=4), PagedBatch.create([[0]], [1])]
    with pytest.raises(ValueError, match="batches: expected a slot_mapping in all of them or in none, got both"):
        concatenate_batches(batches)
