"""PagedBatch: which tokens of which requests a call works on, and where their keys and values lie."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.metadata.checks import INT32_MAX, check_positive, check_shape, is_concrete, on_host, shape_text
from jaxpaged.metadata.slots import PAD_SLOT_ID, slot_mapping_from_block_table

LEAST_SAVED = 16384
"""Tokens whose reading is saved, requests beyond the first times tokens shared, from which on a shared prefix is worth
a pass of its own: with 8 kv heads of 128 in bfloat16, 64 MB or 15 us."""
_USUAL_BLOCK_SIZE = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedBatch:
    """A batch of requests over a paged cache, as a pytree. Build it with `create`.

    Attributes:
      block_table: [num_reqs, max_blocks_per_req] int32, the physical block of each logical block. Entries past a
        request's length may be anything.
      seq_lens: [num_reqs] int32, all tokens of each request, the new ones included; 0 in a padding row.
      query_start_loc: [num_reqs + 1] int32, where each request's new tokens start among the packed ones.
      slot_mapping: [num_tokens] int32 or int64, the cache slot of each new token, negative to skip it; None when
        unknown.
      max_query_len: an upper bound of new tokens per request, rounded up to a power of two, or None when unknown.
        It steers speed, never results.
      shares_prefix: whether the requests' first blocks are believed to be the same ones, so many that they should be
        read once for all requests. It steers speed, never results: how many they are is found out from `block_table`.
    """

    block_table: Any
    seq_lens: Any
    query_start_loc: Any
    slot_mapping: Any
    max_query_len: int | None = dataclasses.field(metadata={"static": True})
    shares_prefix: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def create(
        cls,
        block_table: Any,
        seq_lens: Any,
        query_start_loc: Any = None,
        *,
        query_lens: Any = None,
        slot_mapping: Any = None,
        block_size: int | None = None,
        num_tokens: int | None = None,
        shares_prefix: bool | None = None,
    ) -> Self:
        """A batch from lists, NumPy, JAX or torch arrays, checked once.

        Args:
          block_table: [num_reqs, max_blocks_per_req] int; a list may have rows of different length.
          seq_lens: [num_reqs] int.
          query_start_loc: [num_reqs + 1] int.
          query_lens: [num_reqs] int, instead of `query_start_loc`. With neither: one new token a request.
          slot_mapping: [num_tokens] int; computed from the block table when `block_size` is given instead.
          block_size: tokens a block.
          num_tokens: length of a computed slot mapping; needed under `jit`, where lengths can't be read.
          shares_prefix: see the attribute; None to find out from the other arguments where their values lie on the host
            (blocks of unknown size count as 16 tokens), and False elsewhere.

        Raises:
          TypeError, ValueError: an argument has the wrong dtype, shape or values. Values of arrays that lie on another
            device than the host, or are traced, are not read and so not checked.
        """
        table = _int_array("block_table", _rectangular(block_table), allow_large=True)
        lens = _int_array("seq_lens", seq_lens)
        check_shape("block_table", table.shape, ("num_reqs", "max_blocks_per_req"))
        check_shape("seq_lens", lens.shape, (table.shape[0],))
        starts, max_query_len = _query_starts(query_start_loc, query_lens, num_reqs=table.shape[0])
        _check_values(lens, starts)
        if slot_mapping is not None:
            slot_mapping = _to_jax(_int_array("slot_mapping", slot_mapping, keep_int64=True, allow_large=True))
            check_shape("slot_mapping", slot_mapping.shape, ("num_tokens",))
        elif block_size is not None:
            slot_mapping = _computed_slots(table, lens, starts, check_positive("block_size", block_size), num_tokens)
        if shares_prefix is None:
            saved = _saved_by_sharing(table, lens, starts, block_size or _USUAL_BLOCK_SIZE)
            shares_prefix = saved >= LEAST_SAVED
        table, lens, starts = (_to_jax(x) for x in (table, lens, starts))
        return cls(table, lens, starts, slot_mapping, max_query_len, bool(shares_prefix))

    @property
    def num_reqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def max_blocks_per_req(self) -> int:
        return self.block_table.shape[1]

    @property
    def query_lens(self) -> Any:
        """[num_reqs] int32, new tokens of each request."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    @property
    def context_lens(self) -> Any:
        """[num_reqs] int32, tokens of each request before the new ones."""
        return self.seq_lens - self.query_lens

    def kv_lens(self, block_size: int) -> Any:
        """[num_reqs] int32, positions of each request that the block table has room for."""
        return jnp.minimum(self.seq_lens, self.max_blocks_per_req * block_size)

    def shift_blocks(self, by: Any, *, num_blocks: int, block_size: int) -> Self:
        """This batch over a cache in which its block i is block `i + by`.

        So layers share one cache, of which layer i owns blocks `i * num_blocks` and on, and so a device finds its own
        blocks, those of `device * blocks_per_device` and on, among all.

        Args:
          by: an int, or a traced int32 scalar; below 0 as well.
          num_blocks: ids of this batch from 0 to `num_blocks - 1` name a block; others, and what becomes negative,
            name none afterwards.
          block_size: tokens a block.
        """
        slots = self.slot_mapping
        if slots is not None:
            slots = _shifted(slots, by * block_size, num_blocks * block_size)
        return dataclasses.replace(self, block_table=_shifted(self.block_table, by, num_blocks), slot_mapping=slots)

    def pad(
        self, *, num_reqs: int | None = None, num_tokens: int | None = None, max_blocks_per_req: int | None = None
    ) -> Self:
        """This batch grown to the sizes given: padding rows have no tokens, padding tokens the slot -1.

        Raises:
          ValueError: a size is below the batch's own.
        """
        reqs = _grown("num_reqs", self.num_reqs, num_reqs)
        width = _grown("max_blocks_per_req", self.max_blocks_per_req, max_blocks_per_req)
        slots = self.slot_mapping
        if num_tokens is not None and slots is not None:
            extra = _grown("num_tokens", slots.shape[0], num_tokens)
            slots = _padded(slots, (0, extra), constant_values=PAD_SLOT_ID)
        return dataclasses.replace(
            self,
            block_table=_padded(self.block_table, ((0, reqs), (0, width)), constant_values=-1),
            seq_lens=_padded(self.seq_lens, (0, reqs)),
            query_start_loc=_padded(self.query_start_loc, (0, reqs), mode="edge"),
            slot_mapping=slots,
        )

    def pad_to_bucket(self, buckets: Sequence[int] | None = None) -> Self:
        """This batch with its numbers of requests, tokens and table columns each rounded up to a bucket.

        Args:
          buckets: sizes to choose from; powers of two when None. Pad `query`, `key` and `value` with `pad_tokens` to
            the resulting `slot_mapping.shape[0]`.

        On the host (`jax.default_device(jax.devices("cpu")[0])`) this compiles nothing; on a GPU, XLA compiles a
        program for each pair of an old and a new size. So pad first, and then `jax.device_put` the batch.
        """
        return self.pad(
            num_reqs=next_bucket(self.num_reqs, buckets),
            num_tokens=None if self.slot_mapping is None else next_bucket(self.slot_mapping.shape[0], buckets),
            max_blocks_per_req=next_bucket(self.max_blocks_per_req, buckets),
        )


def _shifted(ids: Any, by: Any, limit: int) -> Any:
    named = (ids >= 0) & (ids < limit)
    return jnp.where(named, jnp.maximum(ids + by, -1), -1).astype(ids.dtype)


def pad_tokens(x: Any, num_tokens: int) -> Any:
    """`x` [tokens, ...] with rows of zeros after it, up to `num_tokens`."""
    extra = _grown("num_tokens", x.shape[0], num_tokens)
    return _padded(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1))


def _padded(x: Any, widths: Any, **how: Any) -> Any:
    """`jnp.pad`, but by NumPy where `x` lies on the host: XLA compiles each pair of an old and a new shape anew."""
    if not on_host(x) or (x.dtype == np.int64 and not jax.config.jax_enable_x64):
        return jnp.pad(x, widths, **how)
    same = jax.default_device(next(iter(x.devices()))) if isinstance(x, jax.Array) else contextlib.nullcontext()
    with same:
        return jax.device_put(np.pad(np.asarray(x), widths, **how))


def _to_jax(x: Any) -> Any:
    """`jnp.asarray`, but that compiles a copy for each new shape."""
    return x if isinstance(x, jax.Array) else jax.device_put(np.array(x))


def _grown(name: str, size: int, wanted: int | None) -> int:
    if wanted is None:
        return 0
    if wanted < size:
        raise ValueError(f"{name}: can't pad {size} to {wanted}")
    return wanted - size


def _rectangular(block_table: Any) -> Any:
    """A block table given as rows of different length, padded with -1."""
    if not isinstance(block_table, list | tuple):
        return block_table
    rows = [np.asarray(row) for row in block_table]
    table = np.full((len(rows), max((row.size for row in rows), default=0)), -1, np.int64)
    for i, row in enumerate(rows):
        if row.ndim != 1:
            raise ValueError(f"block_table: expected a list of blocks in row {i}, got shape {shape_text(row.shape)}")
        if row.size and row.dtype.kind not in "iu":
            raise TypeError(f"block_table: expected integers, got {row.dtype} in row {i}")
        table[i, : len(row)] = row
    return table


def _int_array(name: str, x: Any, *, keep_int64: bool = False, allow_large: bool = False) -> Any:
    """`x` as an int32 array, NumPy where its values lie on the host.

    Args:
      keep_int64: leave int64 as it is where JAX can hold it.
      allow_large: values that int32 can't hold become -1, no block and no slot; otherwise they are an error.
    """
    if isinstance(x, list | tuple):
        try:
            x = np.asarray(x, np.int64 if len(x) == 0 else None)
        except ValueError as error:
            raise ValueError(f"{name}: expected a list of integers, got lists of different length") from error
    if not isinstance(x, np.ndarray | jax.Array):
        x = np.from_dlpack(x) if _is_host_dlpack(name, x) else jax.dlpack.from_dlpack(x)
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {x.dtype}")
    holds_int64 = isinstance(x, jax.Array) or jax.config.jax_enable_x64
    if x.dtype == np.int32 or (keep_int64 and x.dtype == np.int64 and holds_int64):
        return x
    if x.dtype.itemsize < 4:
        return x.astype(np.int32)
    xp = np if isinstance(x, np.ndarray) else jnp
    fits = x <= INT32_MAX if x.dtype.kind == "u" else (x <= INT32_MAX) & (x >= -INT32_MAX - 1)
    if not allow_large and on_host(x) and not fits.all():
        raise ValueError(f"{name}: values must fit int32, got {x.min()} to {x.max()}")
    return xp.where(fits, x.astype(np.int32), -1)


def _is_host_dlpack(name: str, x: Any) -> bool:
    if not hasattr(x, "__dlpack_device__"):
        raise TypeError(f"{name}: expected a list or an array of integers, got {type(x).__name__}")
    return x.__dlpack_device__()[0] == 1  # kDLCPU


def _query_starts(query_start_loc: Any, query_lens: Any, num_reqs: int) -> tuple[Any, int | None]:
    if query_start_loc is not None and query_lens is not None:
        raise ValueError("query_lens: give query_start_loc or query_lens, not both")
    if query_lens is not None:
        lens = _int_array("query_lens", query_lens)
        check_shape("query_lens", lens.shape, (num_reqs,))
        xp = np if isinstance(lens, np.ndarray) else jnp
        starts = xp.concatenate([xp.zeros(1, np.int32), xp.cumsum(lens, dtype=np.int32)])
    elif query_start_loc is not None:
        starts = _int_array("query_start_loc", query_start_loc)
        check_shape("query_start_loc", starts.shape, (num_reqs + 1,))
    else:
        return np.arange(num_reqs + 1, dtype=np.int32), 1
    if not on_host(starts):
        return starts, None
    lens = np.diff(np.asarray(starts))
    return starts, next_bucket(int(lens.max(initial=1)))


def _saved_by_sharing(table: Any, seq_lens: Any, starts: Any, block_size: int) -> int:
    """Tokens that need not be read again when the blocks that all requests have in common are read once.

    Blocks with new tokens don't count. 0 where values can't be read without a wait.
    """
    if not all(on_host(x) for x in (table, seq_lens, starts)):
        return 0
    table, seq_lens, starts = (np.asarray(x) for x in (table, seq_lens, starts))
    query_lens = np.diff(starts)
    active = (seq_lens > 0) & (query_lens > 0)
    others = int(active.sum()) - 1
    if others < 1:
        return 0
    shared = min(int((seq_lens - query_lens)[active].min()), table.shape[1] * block_size)
    if others * shared < LEAST_SAVED:
        return 0
    rows = table[active, : -(-shared // block_size)]
    if (rows[:, 0] != rows[0, 0]).any():  # the usual case, found at once
        return 0
    same = (rows == rows[0]).all(0) & (rows[0] >= 0)
    blocks = rows.shape[1] if same.all() else int(same.argmin())
    return others * min(shared, blocks * block_size)


def _check_values(seq_lens: Any, starts: Any) -> None:
    if on_host(seq_lens) and np.any(np.asarray(seq_lens) < 0):
        raise ValueError(f"seq_lens: expected lengths of 0 or more, got {np.asarray(seq_lens).min()}")
    if on_host(starts):
        values = np.asarray(starts)
        if values[0] != 0 or np.any(np.diff(values) < 0):
            raise ValueError(
                f"query_start_loc: expected to start at 0 and never to fall (query_lens of 0 or more), "
                f"got {values.tolist()}"
            )


def _computed_slots(table: Any, seq_lens: Any, starts: Any, block_size: int, num_tokens: int | None) -> Any:
    if num_tokens is None:
        if not is_concrete(starts):
            raise ValueError(
                f"num_tokens: under jit the number of new tokens can't be read from query_start_loc "
                f"{shape_text(starts.shape)}; expected num_tokens or slot_mapping, got neither"
            )
        num_tokens = int(np.asarray(starts)[-1])
    slots = slot_mapping_from_block_table(table, seq_lens, starts, block_size=block_size, num_tokens=num_tokens)
    return _to_jax(slots)
