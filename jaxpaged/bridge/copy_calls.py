"""Copies of whole blocks between PyTorch's tensors on a GPU, whatever a block holds: launches of the copy kernels."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from jaxpaged.bridge.cache_shapes import check_one_device
from jaxpaged.bridge.kernel_functions import copy_blocks, swap_blocks
from jaxpaged.bridge.launch import ALIGNMENT, program
from jaxpaged.bridge.strides import compact_order
from jaxpaged.bridge.torch_cache import check_ints
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.metadata.checks import check_shape
from jaxpaged.metadata.kv_cache import KVCache
from jaxpaged.pallas import block_copy
from jaxpaged.pallas.block_pairs import BlockPairs


class Blocks(NamedTuple):
    """Blocks that lie one after the other.

    Attributes:
      name: of the argument.
      tensor: a tensor that begins with the first one.
      num_blocks: how many.
      size: bytes of each.
    """

    name: str
    tensor: torch.Tensor
    num_blocks: int
    size: int

    @property
    def first(self) -> int:
        """The first one's address."""
        return self.tensor.data_ptr()


class _Pairs(NamedTuple):
    """`BlockPairs` in PyTorch, each [n] int32 or [] int32."""

    source: torch.Tensor
    target: torch.Tensor
    overwritten: torch.Tensor
    any_overwritten: torch.Tensor


def copy_on_gpu(
    key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor], block_mapping: torch.Tensor
) -> None:
    """`jaxpaged.backends.functional.copy_blocks` for tensors of one CUDA device, on its current stream.

    Raises:
      TypeError, ValueError: an argument doesn't fit; nothing has been written.
    """
    layers = blocks_of_layers(key_caches, value_caches, block_mapping)
    num_pairs = block_mapping.shape[0]
    if num_pairs == 0:
        return
    device = block_mapping.get_device()
    pairs = {n: block_pairs(block_mapping, n, n, within=True) for n in {blocks.num_blocks for blocks in layers}}
    for blocks in layers:
        made = program(copy_blocks, _cache(blocks), _pair_shapes(num_pairs, within=True), device=device)
        workspace = torch.empty(made.workspace_bytes, dtype=torch.uint8, device=block_mapping.device)
        addresses = (x.data_ptr() for x in pairs[blocks.num_blocks])
        made.bind(0, 1, 2, 3, 4, workspace=5)((blocks.first, *addresses, workspace.data_ptr()))


def swap_on_gpu(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor) -> None:
    """`jaxpaged.backends.functional.swap_blocks` where one of both tensors is on a CUDA device, on its current stream.

    Between a GPU and the host, PyTorch copies; it waits for that unless the host's memory is pinned.
    """
    if src.device != dst.device:
        swap_between_devices(src, dst, block_mapping)
        return
    source, target = blocks_to_swap(src, dst, block_mapping)
    num_pairs = block_mapping.shape[0]
    if num_pairs == 0:
        return
    pairs = block_pairs(block_mapping, source.num_blocks, target.num_blocks, within=False)
    shapes = _pair_shapes(num_pairs, within=False)
    made = program(swap_blocks, _cache(source), _cache(target), shapes, device=src.get_device())
    made.bind(0, 1, 2, 3)((source.first, target.first, pairs.source.data_ptr(), pairs.target.data_ptr()))


def block_pairs(src_to_dst: torch.Tensor, num_source: int, num_target: int, *, within: bool) -> _Pairs:
    """`jaxpaged.pallas.block_pairs.block_pairs` by PyTorch where the pairs lie, and filled up to a power of two."""
    n = src_to_dst.shape[0]
    src, dst = torch.nn.functional.pad(src_to_dst.long(), (0, 0, 0, next_bucket(n) - n), value=-1).unbind(1)
    valid = (src >= 0) & (src < num_source) & (dst >= 0) & (dst < num_target)
    order = torch.arange(1, len(src) + 1, device=src.device)
    src, dst = torch.where(valid, src, 0), torch.where(valid, dst, num_target)
    last = torch.zeros(num_target + 1, dtype=torch.int64, device=src.device).scatter_reduce(0, dst, order, "amax")
    kept = valid & (last[dst] == order)
    overwritten = torch.zeros_like(kept)
    if within:
        kept &= src != dst
        overwritten = kept & (last[src] > 0)
    target = torch.where(kept, dst, -1)
    return _Pairs(*(x.int() for x in (src, target, overwritten, overwritten.any())))


def blocks_of_layers(
    key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor], block_mapping: torch.Tensor
) -> list[Blocks]:
    """Of all layers' caches, checked with the pairs that are to be copied."""
    if len(key_caches) != len(value_caches):
        raise ValueError(f"value_caches: expected {len(key_caches)} layers, as in key_caches, got {len(value_caches)}")
    layers = [
        found
        for i, (key, value) in enumerate(zip(key_caches, value_caches, strict=True))
        for found in _of_layer(i, key, value)
    ]
    check_mapping(block_mapping, *key_caches, *value_caches)
    return layers


def blocks_to_swap(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor) -> tuple[Blocks, Blocks]:
    """Of two tensors on one device, checked with the pairs that are to be copied."""
    _check_alike(src, dst)
    source, target = _of_tensor("src", src), _of_tensor("dst", dst)
    if src.stride()[1:] != dst.stride()[1:]:
        raise ValueError(f"dst: expected blocks strided as those of src, {src.stride()[1:]}, got {dst.stride()[1:]}")
    check_mapping(block_mapping, src, dst)
    return source, target


def _of_layer(layer: int, key: torch.Tensor, value: torch.Tensor) -> list[Blocks]:
    """The blocks of a layer: of keys and of values, or where a block holds both, of both."""
    names = (f"key_caches[{layer}]", f"value_caches[{layer}]")
    distance = value.data_ptr() - key.data_ptr()
    size, apart = (n * key.element_size() for n in (key[0].numel(), key.stride(0))) if key.ndim else (0, 0)
    shared = key.shape == value.shape and key.stride() == value.stride() and 2 * size == apart and 0 < distance < apart
    if shared and key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
        return [_checked(Blocks(f"{names[0]}, {names[1]}", key, key.shape[0], apart))]
    return [_of_tensor(name, x) for name, x in zip(names, (key, value), strict=True)]


def _of_tensor(name: str, x: torch.Tensor) -> Blocks:
    if x.ndim == 0 or x.shape[0] == 0:
        raise ValueError(f"{name}: expected shape [num_blocks, ...], got {list(x.shape)}")
    size = x[0].numel()
    compact = x.stride(0) == size or x.shape[0] == 1
    if not compact or not _is_dense(x[0]):
        raise ValueError(f"{name}: expected blocks one after the other, got strides {x.stride()} for {list(x.shape)}")
    return _checked(Blocks(name, x, x.shape[0], size * x.element_size()))


def _is_dense(block: torch.Tensor) -> bool:
    """Whether a block has no gaps, whatever the order of its axes."""
    return block.permute(compact_order(block)).is_contiguous()


def _checked(blocks: Blocks) -> Blocks:
    if blocks.first % ALIGNMENT:
        raise ValueError(f"{blocks.name}: expected memory from a multiple of {ALIGNMENT} bytes on")
    reason = block_copy.refusal(_cache(blocks)) if blocks.size % 4 == 0 else "blocks of a multiple of 4 bytes"
    if reason is not None:
        raise NotImplementedError(f"{blocks.name}: {reason}, got {blocks.size} bytes")
    return blocks


def _cache(blocks: Blocks) -> KVCache:
    """A cache whose blocks have these bytes: what they mean is nothing to a copy."""
    return KVCache.from_arrays(
        jax.ShapeDtypeStruct((blocks.num_blocks, 2, 1, 1, blocks.size // 4), jnp.bfloat16), layout="N2HD"
    )


def _pair_shapes(num_pairs: int, *, within: bool) -> BlockPairs:
    each = jax.ShapeDtypeStruct((next_bucket(num_pairs),), jnp.int32)
    some = jax.ShapeDtypeStruct((), jnp.int32)
    return BlockPairs(each, each, each, some) if within else BlockPairs(each, each, None, None)


def check_mapping(block_mapping: torch.Tensor, *tensors: torch.Tensor) -> None:
    check_ints("block_mapping", block_mapping)
    check_shape("block_mapping", block_mapping.shape, ("n", 2))
    for x in tensors:
        check_one_device(x, block_mapping=block_mapping)


def _check_alike(src: torch.Tensor, dst: torch.Tensor) -> None:
    check_shape("dst", dst.shape, ("num_blocks", *src.shape[1:]))
    if src.dtype != dst.dtype:
        raise TypeError(f"dst: expected {src.dtype}, the dtype of src, got {dst.dtype}")


def swap_between_devices(src: torch.Tensor, dst: torch.Tensor, block_mapping: torch.Tensor) -> None:
    """By PyTorch, of pairs that the host knows or is told."""
    _check_alike(src, dst)
    pairs: Any = block_pairs(block_mapping.cpu(), src.shape[0], dst.shape[0], within=False)
    kept = pairs.target >= 0
    source, target = pairs.source[kept].long(), pairs.target[kept].long()
    if src.dtype.is_floating_point and src.dtype.itemsize == 1:  # torch can't index float8
        src, dst = src.view(torch.uint8), dst.view(torch.uint8)
    moved = src[source.to(src.device)].to(dst.device)
    dst[target.to(dst.device)] = moved
