"""The plan of prefill for PyTorch's tensors on a GPU: made once a step, by one kernel or two, for all layers."""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from jaxpaged.bridge import kernel_functions
from jaxpaged.bridge.cache_shapes import check_one_device, places_of, scale_names
from jaxpaged.bridge.decode_shapes import ScoreOptions
from jaxpaged.bridge.launch import program
from jaxpaged.bridge.prefill_shapes import addresses_in, plan_numbers, prefill_shapes, prefill_workspace_bytes
from jaxpaged.bridge.process import forget_after_fork
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.metadata.checks import check_shape

_MOST_COUNTED = 1 << 17
_planners: dict[Any, "_Planner"] = {}
_counts: dict[int, torch.Tensor] = {}
forget_after_fork(_planners.clear)
forget_after_fork(_counts.clear)


def plan_prefill_on_gpu(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    batch_invariant: bool,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan of a step, for `prefill_on_gpu`: its numbers, and a workspace for all layers, one after the other.

    One launch, or two where decode takes requests, on the current stream, and two allocations. Lengths are read on the
    device alone.

    Args:
      query, key_cache, value_cache, k_scale, v_scale: those of a layer; their contents are not read.
      block_table: [num_reqs, max_blocks_per_req] int32.
      seq_lens: [num_reqs] int32.
      query_start_loc: [num_reqs + 1] int32; what it says of rows that `query` doesn't have counts for nothing.
      scale, causal, window_left, window_right, soft_cap: see `ScoreOptions`.
    """
    scores = ScoreOptions(scale, causal, window_left, window_right, soft_cap)
    num_reqs, num_tokens = block_table.shape[0], query.shape[0]
    name = (
        next_bucket(num_tokens), query.shape[1:], query.dtype, key_cache.shape, key_cache.stride(), key_cache.dtype,
        value_cache.shape, value_cache.stride(), value_cache.dtype, next_bucket(num_reqs), block_table.shape[1],
        block_table.stride(), block_table.dtype, query.get_device(), key_cache.get_device(), block_table.get_device(),
        batch_invariant, *scores, scale_names(k_scale, v_scale),
    )  # fmt: skip
    planner = _planners.get(name)
    if planner is None:
        tensors = (query, key_cache, value_cache, block_table)
        planner = _planners[name] = _Planner(*tensors, batch_invariant, scores, k_scale, v_scale)
    for kind, x, size in (("seq_lens", seq_lens, num_reqs), ("query_start_loc", query_start_loc, num_reqs + 1)):
        check_shape(kind, x.shape, (size,))
        check_one_device(key_cache, **{kind: x})
        if x.dtype != torch.int32 or not x.is_contiguous():
            raise TypeError(f"{kind}: expected torch.int32, one after the other, got {x.dtype}, stride {x.stride()}")
    return planner(block_table, seq_lens, query_start_loc, num_tokens)


class _Planner:
    """Makes plans for batches of up to so many requests and tokens."""

    def __init__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        batch_invariant: bool,
        scores: ScoreOptions,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ):
        how: Any = (batch_invariant, scores, k_scale, v_scale)
        self._found = found = prefill_shapes(query, key_cache, value_cache, block_table, *how)
        self._device, self._index = key_cache.device, key_cache.get_device()
        self._columns, self._stride = int(block_table.shape[1]), int(block_table.stride(0))
        self._cache = found.cache.cache
        self._max_len = self._columns * self._cache.block_size
        self._fields = found.fields()
        self._size = plan_numbers(self._fields)
        self._workspace = prefill_workspace_bytes(found, block_table, query)
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        arguments = (self._cache, *self._batch(found.rows), one, one)
        made = program(kernel_functions.plan_prefill, *arguments, cut=found.cut, device=self._index)
        self._launch = made.bind(*places_of(self._cache), 4, 5, 6, 7, 8, results=(9, 10, 11, 12))
        self._decode_planners: dict[int, Any] = {}
        self._numbers = _number_addresses(self._device, 0)

    def __call__(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_reqs = block_table.shape[0]
        _number_addresses(self._device, max(num_reqs, num_tokens))
        if self._stride != self._columns and num_reqs > 1:
            self._check_rows(block_table)
        if self._stride != self._columns:
            seq_lens = seq_lens.clamp(max=self._max_len)  # the kernel sees columns up to the next row
        decode = None if self._found.decode is None else self._decode_planner(num_reqs)
        # Requests that decode has room for, and that there are not, have no tiles.
        plan = torch.zeros(self._size, dtype=torch.int32, device=self._device)
        workspace = torch.empty(self._workspace, dtype=torch.uint8, device=self._device)
        batch = (block_table.data_ptr(), seq_lens.data_ptr(), query_start_loc.data_ptr())
        counts = (self._numbers + 4 * num_reqs, self._numbers + 4 * num_tokens)
        to = addresses_in(plan, self._fields)
        names = ("work", "counts", "tile_starts", "parts")
        self._launch((0, 0, 0, 0, *batch, *counts, *(to[name] for name in names)))
        if decode is not None:
            decode((0, 0, 0, 0, *batch, counts[1], to["requests"], to["shares"]))
        return plan, workspace

    def _batch(self, num_reqs: int) -> tuple[Any, Any, Any]:
        shapes = ((num_reqs, self._stride), (num_reqs,), (num_reqs + 1,))
        table, lens, starts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
        return table, lens, starts

    def _decode_planner(self, num_reqs: int) -> Any:
        found = self._decode_planners.get(num_reqs)
        if found is None:
            arguments = (self._cache, *self._batch(num_reqs), jax.ShapeDtypeStruct((1,), jnp.int32))
            cut = self._found.decode_cut
            made = program(kernel_functions.plan_decode, *arguments, cut=cut, device=self._index)
            found = self._decode_planners[num_reqs] = made.bind(*places_of(self._cache), 4, 5, 6, 7, results=(8, 9))
        return found

    def _check_rows(self, block_table: torch.Tensor) -> None:
        needed = (block_table.storage_offset() + block_table.shape[0] * self._stride) * 4
        if block_table.untyped_storage().nbytes() < needed:
            raise ValueError(
                f"block_table: expected whole rows of {self._stride} columns, of which it is a part, up to its last one"
            )


def _number_addresses(device: torch.device, largest: int) -> int:
    """The address on a device of 0, 1, .. as int32, up to `largest` at least."""
    index = -1 if device.index is None else device.index
    found = _counts.get(index)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("plan_prefill was not called on this device yet: call it once before a CUDA graph")
        found = _counts[index] = torch.arange(_MOST_COUNTED, dtype=torch.int32, device=device)
    if largest >= _MOST_COUNTED:
        raise NotImplementedError(f"query: the kernels take up to {_MOST_COUNTED - 1} tokens, got {largest}")
    return found.data_ptr()
