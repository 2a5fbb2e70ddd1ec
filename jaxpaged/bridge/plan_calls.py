"""The plan of decode for PyTorch's tensors on a GPU: made once a step, by one kernel, for all layers."""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from jaxpaged.bridge import kernel_functions
from jaxpaged.bridge.alike import Alike, alike, never
from jaxpaged.bridge.cache_shapes import check_one_device, places_of, tensor_names
from jaxpaged.bridge.decode_shapes import ScoreOptions, decode_cut, decode_shapes, plan_sizes
from jaxpaged.bridge.launch import program
from jaxpaged.bridge.process import forget_after_fork
from jaxpaged.metadata.checks import check_shape

Plan = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""`DecodePlan.requests` and `.shares`, and a workspace for all layers of the step, one after the other."""
_last: dict[Any, "Planner"] = {}
_planners: dict[Any, "Planner"] = {}
forget_after_fork(_last.clear)
forget_after_fork(_planners.clear)


def plan_on_gpu(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    batch_invariant: bool,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> Plan:
    """The plan of a step, for `decode_on_gpu`. One launch, on the current stream, and three allocations.

    Args:
      query, key_cache, value_cache, k_scale, v_scale: those of a layer; their contents are not read.
      block_table: [num_reqs, max_blocks_per_req] int32.
      seq_lens: [num_reqs] int32.
      query_start_loc: [num_reqs + 1] int32.
      max_query_len: no request has more new tokens; up to `MOST_DECODED`.
      scale, causal, window_left, window_right, soft_cap: see `ScoreOptions`.
    """
    tensors: tuple[torch.Tensor, ...] = (query, key_cache, value_cache, block_table, seq_lens, query_start_loc)
    how: Any = (max_query_len, batch_invariant, scale, causal, window_left, window_right, soft_cap)
    if not (k_scale is v_scale is None):
        tensors += tuple(x for x in (k_scale, v_scale) if x is not None)
        how += (k_scale is None, v_scale is None)
    planner = _last.get(how)
    if planner is None or not planner.alike(*tensors):
        name = how, tensor_names(tensors)
        planner = _planners.get(name)
        if planner is None:
            scores = ScoreOptions(scale, causal, window_left, window_right, soft_cap)
            arguments: tuple[Any, ...] = (*tensors[:6], max_query_len, batch_invariant, scores, k_scale, v_scale)
            planner = _planners[name] = Planner(*arguments)
        planner.alike = alike(*tensors)
        _last[how] = planner
    return planner(block_table, seq_lens, query_start_loc)


class Planner:
    """Makes plans for batches of certain shapes.

    Attributes:
      alike: whether the tensors of a call are such.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        max_query_len: int,
        batch_invariant: bool,
        scores: ScoreOptions,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ):
        how: tuple[Any, ...] = (max_query_len, batch_invariant, scores, k_scale, v_scale)
        found = decode_shapes(query, key_cache, value_cache, block_table, *how)
        self.alike: Alike = never
        num_reqs, columns = block_table.shape
        for name, x, size in (("seq_lens", seq_lens, num_reqs), ("query_start_loc", query_start_loc, num_reqs + 1)):
            check_shape(name, x.shape, (size,))
            check_one_device(query, **{name: x})
            if x.dtype != torch.int32 or not x.is_contiguous():
                raise TypeError(
                    f"{name}: expected torch.int32, one after the other, got {x.dtype}, stride {x.stride()}"
                )
        self._columns, self._stride = columns, block_table.stride(0)
        cut = decode_cut(found, query.shape[0], batch_invariant)
        table = jax.ShapeDtypeStruct((num_reqs, self._stride), jnp.int32)
        lens, starts = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (num_reqs, num_reqs + 1))
        self._device = query.device
        plan = kernel_functions.plan_decode
        made = program(plan, found.cache.cache, table, lens, starts, cut=cut, device=query.get_device())
        self._launch = made.bind(*places_of(found.cache.cache), 4, 5, 6, results=(7, 8))
        self._exact = found.rows == num_reqs
        self._sizes = plan_sizes(query, key_cache, value_cache, block_table, *how)
        self._max_len = columns * found.cache.cache.block_size

    def __call__(self, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> Plan:
        if self._stride != self._columns:
            self._check_rows(block_table)
            seq_lens = seq_lens.clamp(max=self._max_len)  # the kernel sees columns up to the next row
        requests, shares, workspace = self.empty_plan()
        inputs = (block_table.data_ptr(), seq_lens.data_ptr(), query_start_loc.data_ptr())
        self._launch((0, 0, 0, 0, *inputs, requests.data_ptr(), shares.data_ptr()))
        return requests, shares, workspace

    def empty_plan(self) -> Plan:
        make = torch.empty if self._exact else torch.zeros  # rows of no request have no tiles
        *sizes, workspace = self._sizes
        requests, shares = (make(size, dtype=torch.int32, device=self._device) for size in sizes)
        return requests, shares, torch.empty(workspace, dtype=torch.uint8, device=self._device)

    def _check_rows(self, block_table: torch.Tensor) -> None:
        needed = (block_table.storage_offset() + block_table.shape[0] * self._stride) * 4
        if block_table.untyped_storage().nbytes() < needed:
            raise ValueError(
                f"block_table: expected whole rows of {self._stride} columns, of which it is a part, up to its last one"
            )
