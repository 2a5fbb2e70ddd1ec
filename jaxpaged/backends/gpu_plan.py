"""What the layers of a step share on a GPU: plans of which CTA does what, made by the first layer that needs each."""

from typing import Any

import torch

from jaxpaged.backends.checks import check_int_tensor, on_gpu
from jaxpaged.backends.gpu_scales import Scales
from jaxpaged.bridge import direct
from jaxpaged.bridge.cache_shapes import cache_shapes
from jaxpaged.bridge.decode_shapes import ScoreOptions
from jaxpaged.metadata.buckets import next_bucket
from jaxpaged.pallas.attention import MOST_DECODED, most_decoded_lens

_most_decoded: dict[Any, int] = {}


class AttentionPlan:
    """The batch of a step, and the plans that were made for it. Make it with `plan_attention`."""

    def __init__(
        self,
        block_table: torch.Tensor,
        seqused_k: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int | None,
        batch_invariant: bool,
    ):
        num_reqs = block_table.shape[0]
        check_int_tensor("block_table", block_table, ("batch", "max_blocks_per_seq"))
        check_int_tensor("seqused_k", seqused_k, (num_reqs,))
        check_int_tensor("cu_seqlens_q", cu_seqlens_q, (num_reqs + 1,))
        self.block_table, self.max_seqlen_q, self.batch_invariant = block_table, max_seqlen_q, batch_invariant
        self.seq_lens, self.query_start_loc = (x.int().contiguous() for x in (seqused_k, cu_seqlens_q))
        self._given = {"block_table": block_table, "seqused_k": seqused_k, "cu_seqlens_q": cu_seqlens_q}
        self._made: dict[Any, Any] = {}

    def check(self, **tensors: torch.Tensor | None) -> None:
        """Raise ValueError unless a layer's tensors are those of the plan."""
        for name, x in tensors.items():
            ours = self._given[name]
            if x is not None and x is not ours and (x.data_ptr() != ours.data_ptr() or x.shape != ours.shape):
                raise ValueError(f"scheduler_metadata: it was planned for another {name} than this call's")

    def most_decoded(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Scales) -> int:
        """The largest number of new tokens a request for which decode takes all of the batch; 0 for none."""
        name = (q.shape[1], k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype, *_shapes(scales))
        most = _most_decoded.get(name)
        if most is None:
            most = _most_decoded[name] = most_decoded_lens(cache_shapes(k, v, *scales).cache, q.shape[1])
        return min(most, 1) if self.batch_invariant else most

    def decoded_len(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Scales) -> int | None:
        """The number of new tokens a request by which decode takes all of the batch; None where it doesn't."""
        longest = self.max_seqlen_q
        if longest is None or not 1 <= longest <= MOST_DECODED:
            return None
        most = self.most_decoded(q, k, v, scales)
        return None if longest > most else min(next_bucket(longest), most)

    def decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Scales, length: int, scores: ScoreOptions
    ) -> Any:
        """The plan of decode for layers like this one."""
        return self._plan("plan_decode", (q, k, v), (length, self.batch_invariant, *scores), scales)

    def prefill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Scales, scores: ScoreOptions) -> Any:
        """The plan of prefill, and of decode beside it, for layers like this one."""
        return self._plan("plan_prefill", (q, k, v), (self.batch_invariant, *scores), scales)

    def _plan(self, operator: str, tensors: tuple[torch.Tensor, ...], how: tuple[Any, ...], scales: Scales) -> Any:
        q, k, v = tensors
        # How a query is strided makes no difference to a plan.
        name = (operator, q.shape, q.dtype, k.shape, k.stride(), v.shape, v.stride(), k.dtype, *how, *_shapes(scales))
        found = self._made.get(name)
        if found is None:
            batch = (self.block_table, self.seq_lens, self.query_start_loc)
            found = self._made[name] = getattr(direct, operator)(*tensors, *batch, *how, *scales)
        return found


def _shapes(scales: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if x is None else x.shape for x in scales)


def plan_attention(
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int | None = None,
    *,
    batch_invariant: bool = False,
) -> AttentionPlan:
    """What all layers of a step share on a GPU, to be given to each as `scheduler_metadata`.

    Which part of the work each CTA does is computed on the device, from the lengths that it finds there: by a small
    kernel or two in the first layer that is called, and in the first one of other heads or options. The other layers
    find it again. It holds for one step: make another one when lengths or blocks have changed. In a CUDA graph, make it
    within the capture; replayed, the graph plans anew each time. Layers that share a plan must follow each other on one
    stream, since they use the same workspace.

    Args:
      block_table: [batch, max_blocks_per_seq] int32, the tensor that the layers are called with.
      seqused_k: [batch] int32, how many keys each request has, those of the new tokens included.
      cu_seqlens_q: [batch + 1] int32, cumulative numbers of new tokens.
      max_seqlen_q: no request has more new tokens; None when unknown. With 8 or fewer, one kernel takes all requests.
      batch_invariant: a request's result has the same bits whatever else is in the batch.

    Raises:
      TypeError, ValueError: an argument doesn't fit.
    """
    on_gpu(block_table=block_table, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q)
    if max_seqlen_q is not None and (isinstance(max_seqlen_q, bool) or not isinstance(max_seqlen_q, int)):
        raise TypeError(f"max_seqlen_q: expected an int or None, got {max_seqlen_q!r}")
    return AttentionPlan(block_table, seqused_k, cu_seqlens_q, max_seqlen_q, bool(batch_invariant))
