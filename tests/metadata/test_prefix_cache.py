"""The prefix cache, against a model that knows what tokens every block holds."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxpaged.metadata.block_pool import BlockPool, OutOfBlocks
from jaxpaged.metadata.prefix_cache import PrefixCache

BLOCK_SIZE, NUM_BLOCKS = 2, 12
# Few tokens, so that prefixes meet often.
token_lists = st.lists(st.integers(0, 1), max_size=4 * BLOCK_SIZE + 1)


def blocks_of(tokens):
    """The prefix that each full block ends, which is what its keys and values depend on."""
    return [tuple(tokens[: end + BLOCK_SIZE]) for end in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE)]


class CacheMachine(RuleBasedStateMachine):
    """Requests that match a prefix, fill the rest, make it known and leave."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool, BLOCK_SIZE)
        self.content = {}  # the prefix whose keys and values a block holds
        self.running = []  # tokens and blocks of each request

    @rule(tokens=token_lists)
    def start(self, tokens):
        matched = self.cache.match(tokens)
        assert [self.content[b] for b in matched] == blocks_of(tokens)[: len(matched)]
        missing = len(blocks_of(tokens)) - len(matched)
        used = {b for _, blocks in self.running for b in blocks} | set(matched)
        free, evictable = self.pool.num_free, self.cache.num_evictable
        if missing > free + evictable:
            known = len(self.cache)
            with pytest.raises(OutOfBlocks, match=f"{missing} asked for, {free + evictable} free"):
                self.cache.allocate(missing)
            assert (len(self.cache), self.pool.num_free) == (known, free)
            self.pool.free(matched)
            return
        new = self.cache.allocate(missing)
        assert used.isdisjoint(new)
        self.content.update(zip(new, blocks_of(tokens)[len(matched) :], strict=True))
        self.running.append((tokens, matched + new))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def make_known(self, data):
        tokens, blocks = data.draw(st.sampled_from(self.running))
        length = data.draw(st.integers(0, len(tokens)))
        known = len(self.cache)
        assert self.cache.insert(tokens[:length], blocks) == len(self.cache) - known
        found = self.cache.match(tokens[:length])
        assert [self.content[b] for b in found] == blocks_of(tokens[:length])
        self.pool.free(found)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        _, blocks = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.free(blocks)

    @rule(n=st.integers(0, 4))
    def evict(self, n):
        evictable, free = self.cache.num_evictable, self.pool.num_free
        assert self.cache.evict(n) == min(n, evictable)
        assert self.pool.num_free == free + min(n, evictable)

    @invariant()
    def every_reference_has_an_owner(self):
        running = [b for _, blocks in self.running for b in blocks]
        by_cache = [self.pool.ref_count(b) - running.count(b) for b in range(NUM_BLOCKS)]
        assert set(by_cache) <= {0, 1}
        assert sum(by_cache) == len(self.cache)

    def teardown(self):
        for _, blocks in self.running:
            self.pool.free(blocks)
        assert self.cache.num_evictable == self.cache.evict(NUM_BLOCKS)
        assert len(self.cache) == 0 and self.pool.num_free == NUM_BLOCKS


TestCache = CacheMachine.TestCase
TestCache.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def make(num_blocks=8, block_size=4):
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, block_size)


def run(pool, cache, tokens):
    """A request from start to end; the number of blocks that it found, and its table."""
    found = cache.match(tokens)
    table = found + cache.allocate(-(-len(tokens) // 4) - len(found))
    cache.insert(tokens, table)
    pool.free(table)
    return len(found), table


def test_a_second_request_finds_the_common_prefix():
    pool, cache = make()
    assert run(pool, cache, range(11)) == (0, [0, 1, 2])
    assert len(cache) == 2 and pool.num_used == 2  # the last block isn't full
    assert run(pool, cache, [*range(8), 50, 51, 52, 53])[0] == 2
    assert run(pool, cache, [*range(7), 50])[0] == 1
    assert run(pool, cache, [9, *range(1, 8)])[0] == 0
    assert run(pool, cache, [*range(4, 8)])[0] == 0  # the same tokens, but not at the start


def test_match_takes_a_reference_for_the_caller():
    pool, cache = make()
    run(pool, cache, range(8))
    blocks = cache.match(range(9))
    assert blocks == [0, 1] and [pool.ref_count(b) for b in blocks] == [2, 2]
    assert cache.num_evictable == 0 and cache.evict(2) == 0
    pool.free(blocks)
    assert cache.num_evictable == 2


def test_a_known_prefix_keeps_its_block():
    pool, cache = make()
    first, second = pool.allocate(2), pool.allocate(2)
    assert cache.insert(range(8), first) == 2
    assert cache.insert(range(8), second) == 0
    pool.free(first + second)
    assert cache.match(range(8)) == first and pool.num_free == 6


def test_the_least_recently_used_goes_first():
    pool, cache = make(num_blocks=4)
    for start in (0, 100, 200, 300):
        run(pool, cache, range(start, start + 4))
    run(pool, cache, range(4))
    assert pool.num_free == 0
    run(pool, cache, range(400, 404))
    assert [run(pool, cache, range(s, s + 4))[0] for s in (0, 200, 300, 400)] == [1, 1, 1, 1]
    assert cache.match(range(100, 104)) == []


def test_a_match_is_a_use():
    pool, cache = make(num_blocks=4)
    for start in (0, 100):
        run(pool, cache, range(start, start + 4))
    pool.free(cache.match(range(4)))
    cache.evict(1)
    assert cache.match(range(100, 104)) == [] and len(cache.match(range(4))) == 1


def test_a_chain_loses_its_end_first():
    pool, cache = make(num_blocks=4)
    run(pool, cache, range(16))
    for left in (3, 2, 1, 0):
        assert cache.evict(1) == 1
        blocks = cache.match(range(16))
        assert len(blocks) == left
        pool.free(blocks)


def test_a_block_that_a_used_one_continues_stays():
    pool, cache = make(num_blocks=4)
    run(pool, cache, range(12))
    blocks = cache.match(range(12))
    pool.free(blocks[:2])
    assert cache.num_evictable == 0 and cache.evict(3) == 0
    pool.free(blocks[2:])
    assert cache.num_evictable == cache.evict(3) == 3


def test_allocate_evicts_no_more_than_it_needs():
    pool, cache = make(num_blocks=4)
    run(pool, cache, range(12))
    assert pool.num_free == 1
    assert len(cache.allocate(2)) == 2
    assert len(cache) == 2 and pool.num_free == 0
    with pytest.raises(OutOfBlocks, match="3 asked for, 2 free"):
        cache.allocate(3)
    assert len(cache) == 2


@pytest.mark.parametrize("convert", [list, tuple, np.array, lambda x: np.array(x, np.int32)])
def test_token_ids_of_any_kind(convert):
    pool, cache = make()
    table = pool.allocate(2)
    cache.insert([3, 1, 2, 0, 5, 6, 7, 8, 9], table)
    assert cache.match(convert([3, 1, 2, 0, 5, 6, 7, 8])) == table
    assert cache.match(convert([])) == []


@pytest.mark.parametrize(
    ("error", "message", "tokens", "blocks"),
    [
        (TypeError, "token_ids: expected integers, got float64", [1.0] * 4, [3]),
        (ValueError, r"token_ids: expected shape \[num_tokens\], got \[1, 4\]", [[1] * 4], [3]),
        (ValueError, "blocks: expected 2 or more for the full blocks of token_ids, got 1", [1] * 9, [3]),
        (ValueError, "block: expected one that is in use, but block 5 has 0 owners", [1] * 8, [3, 5]),
        (ValueError, "block: expected 0 to 7, got 8", [1] * 4, [8]),
        (ValueError, r"blocks: expected blocks that hold no other cached tokens, got \[3, 3\]", [1] * 8, [3, 3]),
        (ValueError, r"blocks: expected blocks that hold no other cached tokens, got \[0\]", [1] * 4, [0]),
    ],
)
def test_insert_errors_change_nothing(error, message, tokens, blocks):
    pool, cache = make()
    pool.allocate(4)
    cache.insert(range(4), [0])
    counts = [pool.ref_count(b) for b in range(8)]
    with pytest.raises(error, match=message):
        cache.insert(tokens, blocks)
    assert len(cache) == 1 and [pool.ref_count(b) for b in range(8)] == counts


def test_other_errors():
    pool, cache = make()
    with pytest.raises(ValueError, match="n: expected 0 or more, got -1"):
        cache.evict(-1)
    with pytest.raises(ValueError, match="n: expected 0 or more, got -2"):
        cache.allocate(-2)
    with pytest.raises(TypeError, match="pool: expected a BlockPool, got int"):
        PrefixCache(8, 4)
    with pytest.raises(ValueError, match="block_size: expected a positive int, got 0"):
        PrefixCache(pool, 0)
