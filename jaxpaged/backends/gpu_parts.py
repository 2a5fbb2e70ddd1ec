"""The parts of an engine's flattened batch on a GPU: as in `parts.py`, but that no length is read on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch

from jaxpaged.backends.arguments import check_caches
from jaxpaged.backends.checks import check_activation
from jaxpaged.backends.gpu_attention import attend, make_plan
from jaxpaged.backends.gpu_packed import in_blocks
from jaxpaged.backends.gpu_plan import AttentionPlan, plan_attention
from jaxpaged.backends.gpu_scales import Scales, descale_on_gpu
from jaxpaged.backends.outputs import store
from jaxpaged.backends.padded_calls import Options
from jaxpaged.bridge import direct
from jaxpaged.bridge.head_values import on_device
from jaxpaged.bridge.torch_cache import stored_dtype

_PLAN = "_jaxpaged_plan"


@dataclasses.dataclass(frozen=True)
class GpuLayerCache:
    """A layer's cache: see `layer_cache`. Build it with `of`.

    Attributes:
      key, value: [num_blocks, block_size, num_kv_heads, head_size], float8 as such.
      kv_cache_dtype: as the engine calls it.
    """

    key: torch.Tensor
    value: torch.Tensor
    kv_cache_dtype: str
    scales: Scales

    @classmethod
    def of(
        cls, key_cache: torch.Tensor, value_cache: torch.Tensor, kv_cache_dtype: str, k_scale: Any, v_scale: Any
    ) -> Self:
        stored = stored_dtype(kv_cache_dtype)
        sides = (key_cache, value_cache)
        if stored is not None and key_cache.dtype == torch.uint8 and stored != torch.int8:
            sides = (key_cache.view(stored), value_cache.view(stored))
        if sides[0].dtype != stored and (stored is not None or sides[0].dtype.itemsize == 1):
            expected = "16 or 32 bits" if stored is None else stored
            raise TypeError(
                f"kv_cache: expected {expected}, as kv_cache_dtype {kv_cache_dtype!r} says, got {key_cache.dtype}"
            )
        k, v = (descale_on_gpu(n, x, sides[0], 0) for n, x in (("k_scale", k_scale), ("v_scale", v_scale)))
        return cls(*sides, kv_cache_dtype, (k, v))

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        direct.reshape_and_cache(key, value, self.key, self.value, slots, self.kv_cache_dtype, *self.scales)


@dataclasses.dataclass(frozen=True)
class GpuPagedPart:
    """Requests that attend to the cache, by the plan of their step.

    Attributes:
      tokens: which rows of the query are theirs.
    """

    tokens: slice
    plan: AttentionPlan
    options: Options

    def check(self, query: torch.Tensor, cache: GpuLayerCache | None) -> None:
        if cache is None:
            raise ValueError("kv_cache: expected a cache, since requests attend to tokens in it, got none")
        check_caches(query, cache.key, cache.value, ("kv_cache", "kv_cache"))
        make_plan(query[self.tokens], cache.key, cache.value, cache.scales, self.plan, self.options)

    def attend(self, query: torch.Tensor, cache: GpuLayerCache | None, out: torch.Tensor) -> None:
        assert cache is not None  # checked
        options = _on(query.device, self.options)
        attend(query[self.tokens], cache.key, cache.value, cache.scales, self.plan, options, out, False)


@dataclasses.dataclass(frozen=True)
class GpuPackedPart:
    """Requests that attend to their own keys and values, packed as the queries are.

    Attributes:
      tokens: which rows of the query are theirs.
      starts: [num_reqs + 1] int32, where each request's tokens start among these.
      longest: no request has more tokens; None when unknown.
    """

    tokens: slice
    starts: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: Options
    longest: int | None = None

    def check(self, query: torch.Tensor, cache: GpuLayerCache | None) -> None:
        check_activation("key", self.key, ("num_tokens", "num_kv_heads", query.shape[-1]), query.dtype)

    def attend(self, query: torch.Tensor, cache: GpuLayerCache | None, out: torch.Tensor) -> None:
        num_reqs = self.starts.shape[0] - 1
        held = in_blocks(query, self.key, self.value, self.starts, None, num_reqs, self.longest)
        plan = plan_attention(held.block_table, held.seq_lens, self.starts, self.longest)
        caches = (held.k_cache, held.v_cache, (None, None))
        attend(query[self.tokens], *caches, plan, _on(query.device, self.options), out, False)


GpuPart = GpuPagedPart | GpuPackedPart


def attend_on_gpu(
    query: torch.Tensor,
    parts: Sequence[GpuPart],
    cache: GpuLayerCache | None,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Put new tokens into the cache, in place, then let every part attend.

    Args:
      query: [num_tokens, num_heads, head_size].
      parts: of tokens that don't overlap; rows of no part give 0.
      new: keys, values and slots to write, or None.
      out: like `query`, to be written; a new tensor when None.
    """
    check_activation("query", query, ("num_tokens", "num_heads", "head_size"))
    for part in parts:
        part.check(query, cache)
    if new is not None and cache is not None:
        cache.write(*new)
    out = query.new_empty(query.shape) if out is None else out
    if sum(part.tokens.stop - part.tokens.start for part in parts) < query.shape[0]:
        out.zero_()
    for part in parts:
        part.attend(query, cache, out[part.tokens])
    return out


def attend_into(
    output: torch.Tensor,
    output_scale: torch.Tensor | None,
    query: torch.Tensor,
    part: GpuPart,
    cache: GpuLayerCache | None,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> None:
    """`attend_on_gpu` of one part of all rows, into an engine's checked buffer: see `outputs.store`."""
    direct = output_scale is None and output.is_contiguous()
    out = output[: len(query)].view(query.shape) if direct else None
    result = attend_on_gpu(query, [part], cache, new, out)
    if not direct:
        store(result, output, output_scale)


def plan_of(
    metadata: Any,
    block_table: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    longest: int | None,
    names: tuple[str, str] = ("block_tables", "seq_lens_tensor"),
) -> AttentionPlan:
    """The plan that the layers of a step share, kept on the step's metadata.

    What was planned before a CUDA graph's capture is planned again in it, so that replays plan, too.

    Args:
      query_start_loc: None where each request has one token.
      names: of table and lengths.
    """
    for name, x in zip(names, (block_table, seq_lens), strict=True):
        if x is None:
            raise ValueError(f"attn_metadata.{name}: expected a tensor for requests in the cache, got None")
    assert block_table is not None and seq_lens is not None
    capturing = block_table.is_cuda and torch.cuda.is_current_stream_capturing()
    tensors = (block_table, seq_lens, query_start_loc)
    kept = getattr(metadata, _PLAN, None)
    if kept is None or kept[0] != capturing or any(x is not y for x, y in zip(kept[1], tensors, strict=True)):
        starts = query_start_loc
        if starts is None:
            starts = torch.arange(len(block_table) + 1, dtype=torch.int32, device=block_table.device)
        kept = (capturing, tensors, plan_attention(block_table, seq_lens, starts, longest))
        setattr(metadata, _PLAN, kept)
    plan: AttentionPlan = kept[2]
    return plan


def _on(device: torch.device, options: Options) -> Options:
    """Options whose slopes, which layers keep on the CPU, are where the kernels read them."""
    slopes = options.alibi_slopes
    return options if slopes is None else dataclasses.replace(options, alibi_slopes=on_device(slopes, device))
