"""A small inference engine: a PyTorch model, a paged cache, continuous batching, jaxpaged's attention."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from jaxpaged.backends.functional import flash_attn_varlen_func, reshape_and_cache_flash
from jaxpaged.bridge.dlpack import share_kv_cache, to_numpy
from jaxpaged.bridge.shared_table import SharedTable
from jaxpaged.demo.model import DemoModel, dense_attend
from jaxpaged.demo.scheduler import Request, ScheduledRequest, Scheduler, StepResult
from jaxpaged.metadata.slots import slot_mapping_from_block_table


@dataclasses.dataclass(frozen=True)
class StepTensors:
    """A step's metadata, as engines hand it to attention.

    Attributes:
      slot_mapping: [num_tokens] int64.
      block_table: [num_reqs, max_blocks_per_req] int32.
      seq_lens: [num_reqs] int32.
      query_start_loc: [num_reqs + 1] int32.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int

    @classmethod
    def of(cls, parts: list[ScheduledRequest], block_size: int) -> "StepTensors":
        lens = np.array([part.length for part in parts], np.int32)
        seq_lens = np.array([part.start + part.length for part in parts], np.int32)
        starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(lens, dtype=np.int32)])
        table = np.full((len(parts), max(len(part.request.blocks) for part in parts)), -1, np.int32)
        for row, part in zip(table, parts, strict=True):
            row[: len(part.request.blocks)] = part.request.blocks
        slots = slot_mapping_from_block_table(
            table, seq_lens, starts, block_size=block_size, num_tokens=int(starts[-1])
        )
        return cls(
            slot_mapping=torch.from_numpy(slots.astype(np.int64)),
            block_table=torch.from_numpy(table),
            seq_lens=torch.from_numpy(seq_lens),
            query_start_loc=torch.from_numpy(starts),
            max_query_len=int(lens.max()),
        )


class Engine:
    """Generates greedily for any number of requests at once.

    Attributes:
      kv_caches: of each layer, [2, num_blocks, block_size, num_kv_heads, head_size].
    """

    def __init__(
        self,
        model: DemoModel,
        *,
        num_blocks: int = 96,
        block_size: int = 16,
        max_step_tokens: int = 64,
        max_requests: int = 16,
    ):
        """An engine over a model; see `Scheduler` for the sizes."""
        self.model = model
        self.scheduler = Scheduler(num_blocks, block_size, max_step_tokens=max_step_tokens, max_requests=max_requests)
        config, weight = model.config, model.model.embed_tokens.weight
        shape = (2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        # Never read before it is written: NaN would show if it were.
        self.kv_caches = [
            torch.full(shape, torch.nan, dtype=weight.dtype, device=weight.device)
            for _ in range(config.num_hidden_layers)
        ]
        self._scale = torch.ones((), device=weight.device)
        self.last_tensors: StepTensors | None = None

    def add(self, request: Request) -> None:
        request.check_length(self.model.config.max_position_embeddings)
        self.scheduler.add(request)

    def run(self) -> Iterator[StepResult]:
        """Step until every request is finished."""
        while self.scheduler.busy:
            yield self.step()

    @torch.no_grad()
    def step(self) -> StepResult:
        parts = self.scheduler.schedule()
        if not parts:
            return StepResult([], {}, [])
        return self.scheduler.finish_step(parts, self._forward(parts).argmax(-1, keepdim=True).tolist())

    def _forward(self, parts: list[ScheduledRequest]) -> torch.Tensor:
        """Logits [num_reqs, vocab_size] of the last token of each part."""
        tensors = StepTensors.of(parts, self.scheduler.block_size)
        self.last_tensors = tensors
        tokens = [t for part in parts for t in part.request.tokens[part.start : part.start + part.length]]
        positions = torch.cat([torch.arange(part.start, part.start + part.length) for part in parts])

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            key_cache, value_cache = self.kv_caches[layer].unbind(0)
            reshape_and_cache_flash(
                key, value, key_cache, value_cache, tensors.slot_mapping, "auto", self._scale, self._scale
            )
            output = flash_attn_varlen_func(
                query,
                key_cache,
                value_cache,
                cu_seqlens_q=tensors.query_start_loc,
                seqused_k=tensors.seq_lens,
                max_seqlen_q=tensors.max_query_len,
                causal=True,
                block_table=tensors.block_table,
            )
            assert isinstance(output, torch.Tensor)
            return output

        logits = self.model(torch.tensor(tokens), positions, attend)
        return logits[tensors.query_start_loc[1:].long() - 1]


@torch.no_grad()
def dense_choices(model: DemoModel, request: Request) -> list[int]:
    """What dense attention would have generated at each place of a finished request, given what came before."""
    tokens = torch.tensor(request.tokens[:-1])
    logits = model(tokens, torch.arange(len(tokens)), dense_attend())
    return logits[len(request.prompt) - 1 :].argmax(-1).tolist()


def memory_report(engine: Engine, addresses: list[int]) -> list[tuple[str, str, bool]]:
    """Of each kind of tensor that attention got in the last step: its name, who reads it, and whether it was shared.

    Args:
      addresses: where the caches lay when the engine was built.
    """
    assert engine.last_tensors is not None
    caches = engine.kv_caches
    seen = [share_kv_cache(*cache.unbind(0)).key.unsafe_buffer_pointer() for cache in caches]
    in_place = [cache.data_ptr() for cache in caches] == addresses == seen
    slots = engine.last_tensors.slot_mapping
    pages = SharedTable.of(engine.last_tensors.block_table).head
    start, at = pages.ctypes.data, engine.last_tensors.block_table.data_ptr()
    return [
        (f"KV caches, {len(caches)} layers", "JAX reads and PyTorch writes one memory", in_place),
        ("block table", "JAX reads PyTorch's memory", start <= at < start + pages.nbytes),
        (
            "slot mapping, int64",
            "PyTorch reads it as it is, JAX never does",
            to_numpy(slots).ctypes.data == slots.data_ptr(),
        ),
    ]
