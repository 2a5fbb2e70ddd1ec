"""A pool of KV cache blocks with reference counts, for loops written in JAX. Plain Python, on the host."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from jaxpaged.metadata.checks import check_positive


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free.

    Attributes:
      requested: how many were asked for.
      num_free: how many there were.
    """

    def __init__(self, requested: int, num_free: int):
        super().__init__(f"out of blocks: {requested} asked for, {num_free} free")
        self.requested = requested
        self.num_free = num_free


class BlockPool:
    """Hands out the physical blocks of a cache, and counts how many owners each of them has.

    A request owns the blocks of its table. A block that two requests share has a reference count of 2, and is free
    again once both have freed it. Every method costs a constant time a block, and one that raises has changed nothing.
    The blocks freed last are handed out first, so the same calls give the same blocks.
    """

    def __init__(self, num_blocks: int, *, reserved: int = 0):
        """A pool of the blocks `reserved` to `num_blocks - 1`, all free.

        Args:
          num_blocks: blocks of the cache.
          reserved: so many first blocks are never handed out; 1 for an engine whose block 0 is a null block.
        """
        self.num_blocks = check_positive("num_blocks", num_blocks)
        self.reserved = check_count("reserved", reserved)
        if reserved > num_blocks:
            raise ValueError(f"reserved: expected at most num_blocks = {num_blocks}, got {reserved}")
        self._ref_counts = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, self.reserved - 1, -1))  # a stack, the next block at the end

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that have an owner; reserved ones don't count."""
        return self.num_blocks - self.reserved - self.num_free

    def ref_count(self, block: int) -> int:
        """How many owners a block has, 0 when it is free."""
        return self._ref_counts[self._own(block)]

    def allocate(self, n: int) -> list[int]:
        """`n` blocks, each with a reference count of 1.

        Raises:
          OutOfBlocks: fewer are free.
        """
        if check_count("n", n) > self.num_free:
            raise OutOfBlocks(n, self.num_free)
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> list[int]:
        """One more owner for each of `blocks`, for a prefix that another request has, too; the blocks as a new list.

        Raises:
          ValueError: a block is free, or not the pool's.
        """
        blocks = [self._used(block) for block in blocks]
        for block in blocks:
            self._ref_counts[block] += 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less for each of `blocks`; those without an owner can be handed out again, in the order given.

        Raises:
          ValueError: a block is not the pool's, or is freed more often than it has owners.
        """
        blocks = [self._own(block) for block in blocks]
        for block, times in Counter(blocks).items():
            if times > self._ref_counts[block]:
                raise ValueError(
                    f"blocks: block {block} is freed {times} times, but has {self._ref_counts[block]} owners"
                )
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def writable(self, block: int) -> tuple[int, int | None]:
        """A block to write to in the place of `block`: itself, or a new one where others own it, too (copy on write).

        Returns:
          The block to write to, and None, or the block that its content must be copied from first:
          `copy_blocks(cache, [[copied_from, block]])`. The caller then owns the new block and no longer the old one.

        Raises:
          OutOfBlocks: `block` is shared, and none is free.
          ValueError: `block` is free, or not the pool's.
        """
        block = self._used(block)
        if self._ref_counts[block] == 1:
            return block, None
        (copy,) = self.allocate(1)
        self._ref_counts[block] -= 1
        return copy, block

    def _own(self, block: int) -> int:
        if isinstance(block, bool) or not isinstance(block, int | np.integer):
            raise TypeError(f"block: expected an int, got {block!r}")
        if not self.reserved <= block < self.num_blocks:
            raise ValueError(f"block: expected {self.reserved} to {self.num_blocks - 1}, got {block}")
        return int(block)

    def _used(self, block: int) -> int:
        block = self._own(block)
        if self._ref_counts[block] == 0:
            raise ValueError(f"block: expected one that is in use, but block {block} has 0 owners")
        return block


def check_count(name: str, value: int) -> int:
    """The value as an int; TypeError or ValueError unless it is a whole number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: expected an int of 0 or more, got {value!r}")
    if value < 0:
        raise ValueError(f"{name}: expected 0 or more, got {value}")
    return int(value)
