"""The block pool, against a model that remembers the owners of every block."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxpaged.metadata.block_pool import BlockPool, OutOfBlocks

NUM_BLOCKS, RESERVED = 9, 2


class PoolMachine(RuleBasedStateMachine):
    """Requests that allocate, share, write and free, and tell what each of them owns."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, reserved=RESERVED)
        self.tables = []  # the blocks of each request
        self.content = {}  # what is written in each block

    def owners(self, block):
        return sum(table.count(block) for table in self.tables)

    def snapshot(self):
        return [self.pool.ref_count(b) for b in range(RESERVED, NUM_BLOCKS)], self.pool.num_free

    @rule(n=st.integers(0, 5))
    def allocate(self, n):
        before = self.snapshot()
        if n > self.pool.num_free:
            with pytest.raises(OutOfBlocks, match=f"{n} asked for, {self.pool.num_free} free"):
                self.pool.allocate(n)
            assert self.snapshot() == before
            return
        blocks = self.pool.allocate(n)
        assert len(set(blocks)) == n
        assert all(RESERVED <= b < NUM_BLOCKS and self.owners(b) == 0 for b in blocks)
        self.tables.append(blocks)
        self.content.update((b, object()) for b in blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share_a_prefix(self, data):
        table = data.draw(st.sampled_from(self.tables))
        length = data.draw(st.integers(0, len(table)))
        shared = self.pool.share(table[:length])
        assert shared == table[:length] and shared is not table
        self.tables.append(shared)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def write(self, data):
        table = data.draw(st.sampled_from([t for t in self.tables if t]))
        i = data.draw(st.integers(0, len(table) - 1))
        block, owners, before = table[i], self.owners(table[i]), self.snapshot()
        if owners > 1 and self.pool.num_free == 0:
            with pytest.raises(OutOfBlocks, match="1 asked for, 0 free"):
                self.pool.writable(block)
            assert self.snapshot() == before
            return
        new, copied_from = self.pool.writable(block)
        if owners == 1:
            assert (new, copied_from) == (block, None)
        else:
            assert copied_from == block and self.owners(new) == 0
            table[i] = new
        self.content[new] = object()
        others = [self.content[b] for t in self.tables if t is not table for b in t]
        assert self.content[new] not in others

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        length = data.draw(st.integers(0, len(table)))
        self.pool.free(table[length:])
        if length:
            self.tables.append(table[:length])

    @rule(data=st.data())
    def free_too_often(self, data):
        block = data.draw(st.integers(RESERVED, NUM_BLOCKS - 1))
        owned = [b for table in self.tables for b in table]
        times, before = owned.count(block) + 1, self.snapshot()
        with pytest.raises(ValueError, match=f"block {block} is freed {times} times, but has {times - 1} owners"):
            self.pool.free([*set(owned) - {block}, *[block] * times])
        assert self.snapshot() == before

    @invariant()
    def counts_agree_and_nothing_leaks(self):
        counts = [self.owners(b) for b in range(RESERVED, NUM_BLOCKS)]
        assert [self.pool.ref_count(b) for b in range(RESERVED, NUM_BLOCKS)] == counts
        assert self.pool.num_used == sum(count > 0 for count in counts)
        assert self.pool.num_free == NUM_BLOCKS - RESERVED - self.pool.num_used

    def teardown(self):
        for table in self.tables:
            self.pool.free(table)
        assert self.pool.num_free == NUM_BLOCKS - RESERVED
        assert sorted(self.pool.allocate(NUM_BLOCKS - RESERVED)) == list(range(RESERVED, NUM_BLOCKS))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_blocks_come_in_a_fixed_order():
    pool = BlockPool(6)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.free([1, 3])
    assert pool.allocate(3) == [1, 3, 4]
    pool.free([3])
    pool.free([0])
    assert pool.allocate(2) == [0, 3]


def test_reserved_blocks_are_never_handed_out():
    pool = BlockPool(4, reserved=1)
    assert (pool.num_free, pool.num_used) == (3, 0)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert (pool.num_free, pool.num_used) == (0, 3)
    assert BlockPool(4, reserved=4).num_free == 0


def test_copy_on_write_of_a_shared_block():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    assert pool.writable(block) == (block, None)
    pool.share([block])
    new, copied_from = pool.writable(block)
    assert new != block and copied_from == block
    assert pool.ref_count(block) == pool.ref_count(new) == 1
    assert pool.writable(block) == (block, None)


def test_out_of_blocks_says_how_many_and_changes_nothing():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(5)
    assert (caught.value.requested, caught.value.num_free) == (5, 2)
    assert isinstance(caught.value, RuntimeError)
    assert pool.allocate(2) == [1, 2]


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "n: expected 0 or more, got -1", lambda pool: pool.allocate(-1)),
        (TypeError, "n: expected an int of 0 or more, got 1.0", lambda pool: pool.allocate(1.0)),
        (TypeError, "n: expected an int of 0 or more, got True", lambda pool: pool.allocate(True)),
        (ValueError, "block: expected 1 to 5, got 6", lambda pool: pool.free([1, 6])),
        (ValueError, "block: expected 1 to 5, got 0", lambda pool: pool.share([0])),
        (ValueError, "block: expected 1 to 5, got -1", lambda pool: pool.ref_count(-1)),
        (TypeError, "block: expected an int, got 1.5", lambda pool: pool.free([1, 1.5])),
        (ValueError, "blocks: block 1 is freed 2 times, but has 1 owners", lambda pool: pool.free([2, 1, 1])),
        (ValueError, "blocks: block 5 is freed 1 times, but has 0 owners", lambda pool: pool.free([1, 5])),
        (ValueError, "block: expected one that is in use, but block 5 has 0 owners", lambda pool: pool.share([1, 5])),
        (ValueError, "block: expected one that is in use, but block 4 has 0 owners", lambda pool: pool.writable(4)),
    ],
)
def test_errors_change_nothing(error, message, call):
    pool = BlockPool(6, reserved=1)
    pool.allocate(2)
    with pytest.raises(error, match=message):
        call(pool)
    assert [pool.ref_count(block) for block in range(1, 6)] == [1, 1, 0, 0, 0]
    assert pool.allocate(3) == [3, 4, 5]


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "num_blocks: expected a positive int, got 0", {"num_blocks": 0}),
        (TypeError, "num_blocks: expected a positive int, got '3'", {"num_blocks": "3"}),
        (ValueError, "reserved: expected 0 or more, got -1", {"num_blocks": 3, "reserved": -1}),
        (ValueError, "reserved: expected at most num_blocks = 3, got 4", {"num_blocks": 3, "reserved": 4}),
    ],
)
def test_wrong_sizes(error, message, arguments):
    with pytest.raises(error, match=message):
        BlockPool(**arguments)
