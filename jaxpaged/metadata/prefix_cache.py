"""Full blocks of earlier requests, found again by the tokens that they hold. Plain Python, on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpaged.metadata.block_pool import BlockPool, OutOfBlocks, check_count
from jaxpaged.metadata.checks import check_positive

_Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Entry:
    """A cached block. Its parents' tokens and its own spell out the whole prefix that its keys and values belong to."""

    parent: "_Entry | None"
    tokens: _Tokens
    block: int


class PrefixCache:
    """Lets requests share the blocks of a common prefix.

    The cache owns one reference to each block that it knows, so a block stays when its request frees it. Only full
    blocks are cached, and nobody writes to those. `match` gives a request the blocks of the longest known prefix.
    `allocate` evicts blocks that only the cache owns when it needs room: the least recently used first, and none that a
    cached block continues, which could no longer be found.

    Prefixes are compared token by token, so two are never taken for one another.
    """

    def __init__(self, pool: BlockPool, block_size: int):
        """An empty cache over a pool, whose blocks hold `block_size` tokens each."""
        if not isinstance(pool, BlockPool):
            raise TypeError(f"pool: expected a BlockPool, got {type(pool).__name__}")
        self._pool = pool
        self._block_size = check_positive("block_size", block_size)
        # The least recently used first, and a block always before the one that it continues (see _touch).
        self._entries: dict[tuple[_Entry | None, _Tokens], _Entry] = {}
        self._blocks: set[int] = set()

    def __len__(self) -> int:
        """Number of cached blocks."""
        return len(self._entries)

    @property
    def num_evictable(self) -> int:
        """Number of cached blocks that `allocate` could evict now."""
        return len(self._victims(len(self)))

    def match(self, token_ids: Any) -> list[int]:
        """The blocks of the longest known prefix of `token_ids`, in whole blocks.

        The caller owns them from now on and gives them back with `pool.free`. They hold the keys and values of the
        first `len(blocks) * block_size` tokens. A model needs a new token to give logits: pass all but the
        last.

        Args:
          token_ids: [num_tokens] int, a sequence or an array.
        """
        chain = self._known(self._full_blocks(token_ids))
        self._touch(chain)
        return self._pool.share(entry.block for entry in chain)

    def insert(self, token_ids: Any, blocks: Sequence[int]) -> int:
        """Make the full blocks of a request known, once their keys and values are written.

        A prefix that is known already keeps the block it has; the request's own copy stays the request's.

        Args:
          token_ids: [num_tokens] int, the request's tokens from its first on whose keys and values are written.
          blocks: the request's blocks from its first token on; those past the last full one are not looked at.

        Returns:
          The number of blocks that are new to the cache.

        Raises:
          ValueError: there are fewer blocks than `token_ids` fills, or a new one is free, there twice, or known already
            by other tokens.
        """
        full = self._full_blocks(token_ids)
        if len(blocks) < len(full):
            raise ValueError(
                f"blocks: expected {len(full)} or more for the full blocks of token_ids, got {len(blocks)}"
            )
        chain = self._known(full)
        new_blocks = list(blocks[len(chain) : len(full)])
        if len(set(new_blocks)) < len(new_blocks) or not self._blocks.isdisjoint(new_blocks):
            raise ValueError(f"blocks: expected blocks that hold no other cached tokens, got {new_blocks}")
        new_blocks = self._pool.share(new_blocks)
        for tokens, block in zip(full[len(chain) :], new_blocks, strict=True):
            parent = chain[-1] if chain else None
            chain.append(_Entry(parent, tokens, block))
            self._entries[parent, tokens] = chain[-1]
            self._blocks.add(block)
        self._touch(chain)
        return len(new_blocks)

    def evict(self, n: int) -> int:
        """Free up to `n` blocks that only the cache owns; how many it were."""
        victims = self._victims(check_count("n", n))
        self._remove(victims)
        return len(victims)

    def allocate(self, n: int) -> list[int]:
        """`pool.allocate(n)`, after evicting as many blocks as are missing.

        Raises:
          OutOfBlocks: all that could be evicted would not do; nothing is evicted then.
        """
        missing = check_count("n", n) - self._pool.num_free
        if missing > 0:
            victims = self._victims(missing)
            if len(victims) < missing:
                raise OutOfBlocks(n, self._pool.num_free + len(victims))
            self._remove(victims)
        return self._pool.allocate(n)

    def _full_blocks(self, token_ids: Any) -> list[_Tokens]:
        ids = np.asarray(token_ids)
        if ids.ndim != 1:
            raise ValueError(f"token_ids: expected shape [num_tokens], got {list(ids.shape)}")
        if ids.size and ids.dtype.kind not in "iu":
            raise TypeError(f"token_ids: expected integers, got {ids.dtype}")
        size = self._block_size
        return [tuple(row) for row in ids[: len(ids) // size * size].reshape(-1, size).tolist()]

    def _known(self, full: list[_Tokens]) -> list[_Entry]:
        """The entries of the longest known prefix."""
        chain: list[_Entry] = []
        for tokens in full:
            entry = self._entries.get((chain[-1] if chain else None, tokens))
            if entry is None:
                break
            chain.append(entry)
        return chain

    def _touch(self, chain: list[_Entry]) -> None:
        """Make a chain the most recently used, its first block last of all."""
        for entry in reversed(chain):
            self._entries[entry.parent, entry.tokens] = self._entries.pop((entry.parent, entry.tokens))

    def _victims(self, n: int) -> list[_Entry]:
        """Up to `n` entries to evict, each after those that continue it."""
        victims: list[_Entry] = []
        needed: set[_Entry | None] = set()  # continued by an entry that stays
        for entry in self._entries.values():
            if len(victims) >= n:
                break
            if entry in needed or self._pool.ref_count(entry.block) > 1:
                needed.add(entry.parent)
            else:
                victims.append(entry)
        return victims

    def _remove(self, victims: list[_Entry]) -> None:
        for entry in victims:
            del self._entries[entry.parent, entry.tokens]
            self._blocks.remove(entry.block)
        self._pool.free([entry.block for entry in victims])
