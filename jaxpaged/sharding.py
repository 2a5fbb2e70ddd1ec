"""Paged attention over many devices: which mesh axis spreads what, as `jax.shard_map` and `jax.jit` want to be told.

- **Tensor parallel**: each device holds some kv heads of every block, and the query heads that belong to them.
  Attention needs no communication.
- **Data parallel**: each device serves requests of its own, from a pool of blocks of its own.
- **Context parallel**: the blocks of one request are spread over devices. Each attends to its own, and the states are
  merged by their lses (Liu et al., Ring Attention, 2023; Flash-Decoding, Dao et al., 2023), with one all-gather.

They go together. All communication is JAX's, and so this works in one process and, under `jax.distributed`, in many.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.attention import paged_attention
from jaxpaged.merge import merge_attention_states
from jaxpaged.metadata.batch import PagedBatch
from jaxpaged.metadata.checks import check_positive
from jaxpaged.metadata.head_sharding import cache_specs
from jaxpaged.metadata.kv_cache import KVCache

__all__ = ["Partition", "concatenate_batches", "context_attention", "own_blocks", "own_pairs", "repeat_kv_heads"]


@dataclasses.dataclass(frozen=True)
class Partition:
    """The mesh axes that requests, heads and blocks are spread over; None for what isn't.

    Attributes:
      mesh: the devices.
      data: axis over requests. A device's block ids, from 0 on, are those of its own pool.
      tensor: axis over heads.
      context: axis over the blocks of each request.

    Raises:
      ValueError: the mesh has no axis of that name, or one is named twice.
    """

    mesh: Mesh
    data: str | None = None
    tensor: str | None = None
    context: str | None = None

    def __post_init__(self) -> None:
        names = [name for name in (self.data, self.tensor, self.context) if name is not None]
        for role in ("data", "tensor", "context"):
            name = getattr(self, role)
            if name is not None and name not in self.mesh.axis_names:
                raise ValueError(f"{role}: expected None or an axis of the mesh, {self.mesh.axis_names}, got {name!r}")
            if name is not None and names.count(name) > 1:
                raise ValueError(f"{role}: expected an axis of its own, got {name!r} for {names.count(name)} of them")

    def size(self, role: str) -> int:
        """Devices along the axis for "data", "tensor" or "context"; 1 where there is none."""
        name = getattr(self, role)
        return 1 if name is None else self.mesh.shape[name]

    @property
    def rows(self) -> PartitionSpec:
        """Of queries, keys, values and outputs [num_tokens, heads, size]."""
        return PartitionSpec(self.data, self.tensor)

    @property
    def lse(self) -> PartitionSpec:
        """Of the lse [num_heads, num_tokens]."""
        return PartitionSpec(self.tensor, self.data)

    @property
    def tokens(self) -> PartitionSpec:
        """Of a slot mapping, token ids and other arrays [num_tokens, ...]."""
        return PartitionSpec(self.data)

    @property
    def batch(self) -> PartitionSpec:
        """Of every array of a PagedBatch (see `concatenate_batches`)."""
        return PartitionSpec(self.data)

    def cache(self, cache: KVCache) -> KVCache:
        """A spec for each array of a cache, whatever its layout and scales, in the cache's place."""
        self._check_cache(cache.num_blocks, cache.num_kv_heads)
        blocks = tuple(name for name in (self.data, self.context) if name is not None)
        return cache_specs(cache, blocks=blocks or None, heads=self.tensor)

    def zeros(self, num_blocks: int, block_size: int, num_kv_heads: int, *args: Any, **options: Any) -> KVCache:
        """`KVCache.zeros`, made on the devices it is spread over.

        Args:
          num_blocks: of all devices together.
          num_kv_heads: of all devices together, copies included (see `repeat_kv_heads`).
          args, options: those of `KVCache.zeros`.

        Raises:
          ValueError: blocks or heads can't be shared out evenly.
        """
        self._check_cache(num_blocks, num_kv_heads)
        make = functools.partial(KVCache.zeros, num_blocks, block_size, num_kv_heads, *args, **options)
        specs = self.cache(jax.eval_shape(make))
        return jax.jit(make, out_shardings=jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs))()

    def put(self, tree: Any, specs: Any) -> Any:
        """`jax.device_put` of a pytree by specs: one for all of it, or a pytree of them.

        In several processes each must give the same values.
        """
        if isinstance(specs, PartitionSpec):
            return jax.device_put(tree, NamedSharding(self.mesh, specs))
        return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs))

    def kv_head_copies(self, num_heads: int, num_kv_heads: int) -> int:
        """How many copies of each kv head there must be, for `repeat_kv_heads`: 1 unless there are more devices.

        Raises:
          ValueError: the heads can't be shared out evenly.
        """
        check_positive("num_heads", num_heads)
        if num_heads % check_positive("num_kv_heads", num_kv_heads):
            raise ValueError(f"num_heads: expected a multiple of {num_kv_heads} kv heads, got {num_heads}")
        devices = self.size("tensor")
        fitting = [
            d for d in range(1, num_heads + 1) if num_heads % d == 0 and 0 in (num_kv_heads % d, d % num_kv_heads)
        ]
        if devices not in fitting:
            raise ValueError(
                f"tensor: {num_heads} query heads and {num_kv_heads} kv heads can't be shared out to {devices} "
                f"devices; expected one of {fitting} along axis {self.tensor!r}"
            )
        return max(1, devices // num_kv_heads)

    def _check_cache(self, num_blocks: int, num_kv_heads: int) -> None:
        shards, heads = self.size("data") * self.size("context"), self.size("tensor")
        if num_blocks % shards:
            raise ValueError(
                f"num_blocks: expected a multiple of the {shards} devices along {self.data!r} and {self.context!r}, "
                f"such as {-(-num_blocks // shards) * shards}, got {num_blocks}"
            )
        if num_kv_heads % heads:
            raise ValueError(
                f"num_kv_heads: expected a multiple of the {heads} devices along {self.tensor!r}, got {num_kv_heads}; "
                f"where there are more devices than heads, let repeat_kv_heads copy them"
            )


def repeat_kv_heads(x: Any, copies: int, *, axis: int = 1) -> Any:
    """Each kv head `copies` times, one after the other: keys, values, or the weights that make them.

    Query head i belongs to kv head `i // (num_heads // num_kv_heads)` before and afterwards. So with 2 kv heads on 8
    devices, as Megatron-LM and vLLM do it, each device holds one of 4 copies of a head.

    Args:
      x: [num_tokens, num_kv_heads, head_size], or any array with kv heads along `axis`.
      copies: as `Partition.kv_head_copies` says.
    """
    return x if copies == 1 else jnp.repeat(x, check_positive("copies", copies), axis=axis)


def concatenate_batches(batches: Sequence[PagedBatch]) -> PagedBatch:
    """The batches of all devices along the data axis as one, to be spread by `Partition.batch`.

    Each is padded to the largest in requests, tokens and table columns first. Packed tokens are laid out alike: pad
    each device's with `pad_tokens` to the length of its part, `slot_mapping.shape[0] // len(batches)`, and concatenate.
    Within `jax.shard_map` each device sees its own batch, as it was given but for the padding. On its own the result
    means nothing: `query_start_loc` has `num_reqs + 1` numbers for each device.

    Raises:
      ValueError: there is none, or some have a slot mapping and some have not.
    """
    if not batches:
        raise ValueError("batches: expected one for each device along the data axis, got none")
    if len({batch.slot_mapping is None for batch in batches}) > 1:
        raise ValueError("batches: expected a slot_mapping in all of them or in none, got both")
    sizes = {
        "num_reqs": max(batch.num_reqs for batch in batches),
        "max_blocks_per_req": max(batch.max_blocks_per_req for batch in batches),
    }
    if batches[0].slot_mapping is not None:
        sizes["num_tokens"] = max(batch.slot_mapping.shape[0] for batch in batches)
    padded = [batch.pad(**sizes) for batch in batches]
    longest = [batch.max_query_len for batch in batches]
    max_query_len = None if None in longest else max(n for n in longest if n is not None)
    shares_prefix = all(batch.shares_prefix for batch in batches)
    alike = [dataclasses.replace(b, max_query_len=max_query_len, shares_prefix=shares_prefix) for b in padded]
    return jax.tree.map(lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *alike)


def own_blocks(batch: PagedBatch, cache: KVCache, *, axis_name: str) -> PagedBatch:
    """Within `jax.shard_map`: a batch as one device along the context axis sees it.

    Device i owns blocks `i * n` to `(i + 1) * n - 1` of the ids that `batch` names, where n is `cache.num_blocks`.
    Its own have ids from 0 on in the result; those of others are none, so their positions are not attended to and their
    slots not written: `write_kv(cache, key, value, own_blocks(...).slot_mapping)`.

    Args:
      batch: the same on all devices along the axis.
      cache: this device's part.
      axis_name: the context axis.
    """
    n = cache.num_blocks
    by = -n * lax.axis_index(axis_name)
    return batch.shift_blocks(by, num_blocks=n * lax.axis_size(axis_name), block_size=cache.block_size)


def own_pairs(src_to_dst: Any, cache: KVCache, *, axis_name: str) -> Any:
    """Within `jax.shard_map`: the pairs for `copy_blocks` whose blocks are this device's, all others as (-1, -1).

    A block can be copied to one of the same device only: take both from that device's pool.

    Args:
      src_to_dst: [n, 2] int32 pairs, the same on all devices along the axis.
      cache, axis_name: as in `own_blocks`.
    """
    n = cache.num_blocks
    own = src_to_dst - n * lax.axis_index(axis_name)
    return jnp.where(((own >= 0) & (own < n)).all(1, keepdims=True), own, -1)


def context_attention(
    query: Any,
    cache: KVCache,
    batch: PagedBatch,
    *,
    axis_name: str,
    sinks: Any = None,
    return_lse: bool = False,
    out_dtype: Any = None,
    **options: Any,
) -> Any:
    """Within `jax.shard_map`: `paged_attention` to blocks that are spread over the devices along an axis.

    Each device attends to its own blocks, as `own_blocks` has them. Their states travel in one all-gather, in the
    query's dtype and each with its lse, and are merged on every device.

    Any device may own any block of a request, but time is saved where they own about as many. A request with one new
    token, without window, ALiBi and functions of positions, costs a device the time of its own blocks; any other
    request that of all positions, those of other devices masked.

    Args:
      query: [num_tokens, num_heads, head_size], the same on all devices along the axis.
      cache: this device's part.
      batch: the same on all devices along the axis, its block ids counted over all of them.
      axis_name: the context axis.
      sinks, return_lse, out_dtype, options: those of `paged_attention`.

    Returns:
      As `paged_attention`, the same on all devices along the axis.
    """
    own = own_blocks(batch, cache, axis_name=axis_name)
    by_position = ("window", "alibi_slopes", "mask_mod", "score_mod")
    if all(options.get(name) is None for name in by_position):
        own = _decodes_packed(own, cache)
    out, lse = paged_attention(query, cache, own, return_lse=True, **options)
    outputs, lses = _gathered(out, lse, axis_name)
    out, lse = merge_attention_states(outputs, lses)
    if sinks is not None:
        out = out * jax.nn.sigmoid(lse.T - jnp.asarray(sinks, jnp.float32))[..., None]
    out = out.astype(query.dtype if out_dtype is None else out_dtype)
    return (out, lse) if return_lse else out


def _decodes_packed(batch: PagedBatch, cache: KVCache) -> PagedBatch:
    """The requests with one new token as if a device's own blocks were all that they have.

    A single query attends to every position, wherever it is: to it, blocks that are left out need not be walked over.
    The last block, which may not be full, stays the last.
    """
    table, block_size = batch.block_table, cache.block_size
    start = jnp.arange(table.shape[1], dtype=jnp.int32) * block_size
    in_block = jnp.clip(batch.kv_lens(block_size)[:, None] - start, 0, block_size)
    in_block = jnp.where((table >= 0) & (table < cache.num_blocks), in_block, 0)
    order = jnp.argsort(in_block == 0, axis=1, stable=True)
    single = batch.query_lens == 1
    return dataclasses.replace(
        batch,
        block_table=jnp.where(single[:, None], jnp.take_along_axis(table, order, 1), table),
        seq_lens=jnp.where(single, in_block.sum(1), batch.seq_lens),
    )


def _gathered(out: Any, lse: Any, axis_name: str) -> tuple[Any, Any]:
    """The states of all devices, [devices, ...]: as words of the output's size, so that one collective takes both."""
    word = {2: jnp.uint16, 4: jnp.uint32}[out.dtype.itemsize]
    lse_words = lax.bitcast_convert_type(lse.T, word)
    lse_words = lse_words.reshape(*lse.T.shape, -1)
    state = jnp.concatenate([lax.bitcast_convert_type(out, word), lse_words], axis=-1)
    states = lax.all_gather(state, axis_name, to="invarying")
    outputs = lax.bitcast_convert_type(states[..., : out.shape[-1]], out.dtype)
    lses = states[..., out.shape[-1] :]
    lses = lax.bitcast_convert_type(lses if word == jnp.uint16 else lses[..., 0], jnp.float32)
    return outputs, lses.swapaxes(1, 2)
