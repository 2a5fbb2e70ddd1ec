"""The classes for Aphrodite and vLLM on a GPU: the CPU's results, no word to the host, CUDA graphs."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jaxpaged.backends.flash import FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadata
from jaxpaged.backends.flex import FlexAttentionImpl, FlexAttentionMetadata, physical_to_logical_mapping
from jaxpaged.backends.flex_metadata import _built
from jaxpaged.integrations.vllm.layer import AttentionLayer
from jaxpaged.integrations.vllm.metadata import JaxpagedMetadata

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]
BLOCKS, BLOCK, HEADS, KV_HEADS, SIZE = 128, 16, 16, 4, 128
LAYER: dict[str, Any] = {"num_heads": HEADS, "head_size": SIZE, "scale": SIZE**-0.5, "num_kv_heads": KV_HEADS}
SLOPES = [0.01 * (i + 1) for i in range(HEADS)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"alibi_slopes": None, "sliding_window": None},
    "all": {"alibi_slopes": SLOPES, "sliding_window": 40, "logits_soft_cap": 20.0},
}
BATCHES = {"mixed": ([200, 33, 5, 9, 300], [64, 33, 5, 1, 1], 3), "decodes": ([64, 9, 333, 1], [1] * 4, 0)}
BF16 = torch.bfloat16
STORED = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}
SCALES = (0.03, 0.02)


class Batch:
    """Requests, the prompts' first, on the CPU."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        lens, new, self.num_prefills = BATCHES[kind]
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.starts = torch.tensor([0, *new]).cumsum(0).int()
        self.new, total = torch.tensor(new), sum(new)
        self.table = torch.randperm(BLOCKS)[: len(lens) * 24].view(len(lens), 24).int()
        self.states = [torch.randn(total, n, SIZE).to(BF16) for n in (HEADS, KV_HEADS, KV_HEADS)]
        slots = []
        for row, n, k in zip(self.table.long(), lens, new, strict=True):
            position = torch.arange(n - k, n)
            slots.append(row[position // BLOCK] * BLOCK + position % BLOCK)
        self.slots = torch.cat(slots)

    def flash(self, device: str, whole: bool = False) -> FlashAttentionMetadata:
        split = int(self.starts[self.num_prefills])
        lens = self.new.int() if whole else self.lens
        meta = FlashAttentionMetadata(
            num_prefills=self.num_prefills, num_prefill_tokens=split, num_decode_tokens=int(self.starts[-1]) - split,
            slot_mapping=self.slots, seq_lens=lens.tolist(), seq_lens_tensor=lens, max_query_len=int(self.new.max()),
            max_prefill_seq_len=0, max_decode_seq_len=0, query_start_loc=self.starts,
            seq_start_loc=torch.nn.functional.pad(lens.cumsum(0).int(), (1, 0)), context_lens_tensor=lens - self.new,
            block_tables=self.table[:, :0] if whole else self.table, use_cuda_graph=False,
        )  # fmt: skip
        return moved(meta, device)

    def flex(self, device: str) -> FlexAttentionMetadata:
        starts, lens, table, slots = (x.to(device) for x in (self.starts, self.lens, self.table, self.slots))
        return FlexAttentionMetadata(
            num_actual_tokens=len(self.slots), max_query_len=int(self.new.max()), query_start_loc=starts,
            max_seq_len=int(self.lens.max()), seq_lens=lens, block_table=table, slot_mapping=slots, use_cascade=False,
            common_prefix_len=0, cu_prefix_query_lens=None, prefix_kv_lens=None, suffix_kv_lens=None,
            total_cache_tokens=BLOCKS * BLOCK, block_size=BLOCK, max_possible_sequence_length=1024,
            num_reqs=len(lens), physical_to_logical=physical_to_logical_mapping(table, BLOCKS),
            decode_offset=(self.lens - self.new).to(device),
        )  # fmt: skip

    def vllm(self, device: str) -> JaxpagedMetadata:
        longest = int(self.new.max())
        batch = (int(self.starts[-1]), self.starts, self.lens, self.table, self.slots)
        return moved(JaxpagedMetadata(*batch, causal=True, max_query_len=longest), device)


def moved(meta: Any, device: str) -> Any:
    tensors = {f.name: getattr(meta, f.name) for f in dataclasses.fields(meta)}
    return dataclasses.replace(meta, **{n: x.to(device) for n, x in tensors.items() if isinstance(x, torch.Tensor)})


def flash_layer(batch: Batch, device: str, meta: Any, cache: Any, how: dict[str, Any]) -> Callable[[], torch.Tensor]:
    layer = FlashAttentionImpl(**LAYER | {"kv_cache_dtype": "auto"} | how)
    q, k, v = (x.flatten(1).to(device) for x in batch.states)
    scales = (1.0, 1.0) if layer.kv_cache_dtype == "auto" else SCALES
    return lambda: layer.forward(q, k, v, cache, meta, *scales)


def vllm_layer(batch: Batch, device: str, meta: Any, cache: Any, how: dict[str, Any]) -> Callable[[], torch.Tensor]:
    layer = AttentionLayer(**LAYER, **how)
    q, k, v = (x.to(device) for x in batch.states)
    module, output = SimpleNamespace(), torch.zeros_like(q)
    for side, scale in zip("kv", SCALES, strict=True):
        setattr(module, f"_{side}_scale", torch.tensor(scale, device=device))
        setattr(module, f"_{side}_scale_float", scale)

    def run() -> torch.Tensor:
        layer.do_kv_cache_update(module, k, v, cache, meta.slot_mapping)
        return layer.forward(module, q, k, v, cache, meta, output)

    return run


def flex_layer(batch: Batch, device: str, meta: Any, cache: Any, how: dict[str, Any]) -> Callable[[], torch.Tensor]:
    layer = FlexAttentionImpl(**LAYER | {"kv_cache_dtype": "auto"} | how)
    q, k, v = (x.to(device) for x in batch.states)
    scales = (1.0, 1.0) if layer.kv_cache_dtype == "auto" else SCALES
    module, output = SimpleNamespace(), torch.zeros_like(q)
    module._k_scale, module._v_scale = (torch.tensor(x, device=device) for x in scales)
    return lambda: layer.forward(module, q, k, v, cache, meta, output)


ENGINES: dict[str, tuple[Any, str, tuple[int, ...]]] = {
    "flash": (flash_layer, "flash", (2, BLOCKS, BLOCK, KV_HEADS, SIZE)),
    "flex": (flex_layer, "flex", (2, BLOCKS, BLOCK, KV_HEADS, SIZE)),
    "vllm": (vllm_layer, "vllm", (BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", OPTIONS)
def test_results_are_those_of_the_cpu_and_nothing_waits(engine: str, kind: str, name: str) -> None:
    make, metadata, shape = ENGINES[engine]
    batch = Batch(kind)
    cache = torch.randn(shape).to(BF16)
    ours = cache.cuda()
    expected = make(batch, "cpu", getattr(batch, metadata)("cpu"), cache, OPTIONS[name])()
    meta = getattr(batch, metadata)("cuda")
    run = make(batch, "cuda", meta, ours, OPTIONS[name])
    out = run().clone()
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=4e-3)
    assert torch.equal(ours.cpu(), cache)
    later = make(batch, "cuda", getattr(batch, metadata)("cuda"), ours, OPTIONS["plain"])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run()  # as the next layer: by the same plan
        planned = later()  # as the next step; a layer's slopes are copied to the device once
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, out)
    assert torch.equal(planned, out) == (name == "plain")


def cache_of(shape: tuple[int, ...], kv_cache_dtype: str) -> torch.Tensor:
    """A cache as engines allocate it: float8 in bytes."""
    numbers = torch.randn(shape)
    if kv_cache_dtype == "auto":
        return numbers.to(BF16)
    numbers = (numbers / SCALES[0]).clamp(-127, 127).round().to(STORED[kv_cache_dtype])
    return numbers if kv_cache_dtype == "int8" else numbers.view(torch.uint8)


EIGHT_BITS = [
    ("flash", "fp8"),
    ("flash", "fp8_e5m2"),
    ("flash", "int8"),
    ("flex", "fp8"),
    ("flex", "int8"),
    ("vllm", "fp8"),
    ("vllm", "fp8_e5m2"),
]


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(("engine", "kv_cache_dtype"), EIGHT_BITS)
def test_8_bit_caches_are_written_and_attended_to(engine: str, kv_cache_dtype: str, kind: str) -> None:
    make, metadata, shape = ENGINES[engine]
    batch, how = Batch(kind), OPTIONS["plain"] | {"kv_cache_dtype": kv_cache_dtype}
    cache = cache_of(shape, kv_cache_dtype)
    ours = cache.cuda()
    expected = make(batch, "cpu", getattr(batch, metadata)("cpu"), cache, how)()
    run = make(batch, "cuda", getattr(batch, metadata)("cuda"), ours, how)
    out = run().clone()
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert torch.equal(ours.cpu(), cache)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, out)


@pytest.mark.parametrize(
    ("engine", "kv_cache_dtype"),
    [("flash", "auto"), ("flex", "auto"), ("vllm", "auto"), ("flash", "fp8"), ("vllm", "fp8")],
)
@pytest.mark.parametrize("kind", BATCHES)
def test_a_graph_plans_anew_when_it_is_replayed(engine: str, kind: str, kv_cache_dtype: str) -> None:
    make, metadata, shape = ENGINES[engine]
    batch, how = Batch(kind), OPTIONS["plain"] | {"kv_cache_dtype": kv_cache_dtype}
    cache = cache_of(shape, kv_cache_dtype).cuda()
    meta = getattr(batch, metadata)("cuda")
    run = make(batch, "cuda", meta, cache, how)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    lens = meta.seq_lens_tensor if engine == "flash" else meta.seq_lens
    before = run().clone()
    lens.copy_((lens.float() * 0.7).int().clamp_min(1))
    graph.replay()
    fresh = dataclasses.replace(meta) if engine == "flex" else moved(meta, "cuda")
    if engine == "flash":
        fresh._cached_prefill_metadata = fresh._cached_decode_metadata = None
    expected = make(batch, "cuda", fresh, cache, how)()
    assert torch.equal(captured, expected)
    assert not torch.equal(captured, before)  # what a plan that is not made again would give


def replaced(meta: FlexAttentionMetadata, what: str) -> FlexAttentionMetadata:
    """The metadata with a mask or scores of a user's, which hold tensors of its device."""
    device = meta.block_table.device
    near = torch.tensor(12, device=device)
    bias = torch.linspace(-1, 1, meta.total_cache_tokens, device=device)
    if what == "logical_mask_mod":
        meta.logical_mask_mod = lambda b, h, q, k: (k <= q) & ((k >= near) | (h == 1))
    elif what == "traced into kernels":
        meta.logical_mask_mod = lambda b, h, q, k: (k <= q) & ((q - k < 40) | (k % 3 == 0))
    elif what == "score_mod":
        meta.score_mod = lambda s, b, h, q, k: s + bias[k] * (h + 1) - 0.1 * (q % 5)
    else:
        own = meta.get_mask_mod()
        meta.mask_mod = lambda b, h, q, k: own(b, h, q, k) & ((q + k) % 3 != 0)
        if what == "block_mask":
            block_mask = meta.build_block_mask()
            meta.mask_mod = None
            meta.block_mask = block_mask
            _built.discard(block_mask)
    return meta


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("what", ["logical_mask_mod", "traced into kernels", "score_mod", "mask_mod", "block_mask"])
def test_what_users_replace_takes_effect(what: str, kind: str) -> None:
    batch, shape = Batch(kind), ENGINES["flex"][2]
    cache = torch.randn(shape).to(BF16)
    ours, plain = cache.cuda(), flex_layer(batch, "cuda", batch.flex("cuda"), cache.cuda(), OPTIONS["plain"])()
    expected = flex_layer(batch, "cpu", replaced(batch.flex("cpu"), what), cache, OPTIONS["plain"])()
    run = flex_layer(batch, "cuda", replaced(batch.flex("cuda"), what), ours, OPTIONS["plain"])
    out = run().clone()
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=4e-3)
    assert not torch.allclose(out.float(), plain.float(), rtol=2e-2, atol=4e-3)
    assert torch.equal(ours.cpu(), cache)
    assert torch.equal(run(), out)


@pytest.mark.parametrize("kind", BATCHES)
def test_block_sparse_layers(kind: str) -> None:
    batch, cache = Batch(kind), torch.randn(ENGINES["flash"][2]).to(BF16)
    sparse = {"block_size": 16, "local_blocks": 2, "vert_stride": 4}
    ours, how = cache.cuda(), OPTIONS["plain"] | {"blocksparse_params": sparse}
    expected = flash_layer(batch, "cpu", batch.flash("cpu"), cache, how)()
    out = flash_layer(batch, "cuda", batch.flash("cuda"), ours, how)()
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=4e-3)
    assert torch.equal(ours.cpu(), cache)


def test_some_requests_are_causal_and_some_are_not() -> None:
    batch, cache = Batch("mixed"), torch.randn(ENGINES["vllm"][2]).to(BF16)
    causal, ours = torch.tensor([True, False, True, False, True]), cache.cuda()
    metas = [dataclasses.replace(batch.vllm(device), causal=causal.to(device)) for device in ("cpu", "cuda")]
    expected = vllm_layer(batch, "cpu", metas[0], cache, OPTIONS["plain"])()
    out = vllm_layer(batch, "cuda", metas[1], ours, OPTIONS["plain"])()
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=4e-3)


def test_functions_are_refused_in_a_capture() -> None:
    batch, cache = Batch("decodes"), torch.randn(ENGINES["flex"][2]).to(BF16).cuda()
    before = cache.clone()
    run = flex_layer(batch, "cuda", replaced(batch.flex("cuda"), "score_mod"), cache, OPTIONS["plain"])
    with pytest.raises(RuntimeError, match="PyTorch's operators don't have"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run()
    torch.cuda.synchronize()
    assert torch.equal(cache, before)


def test_blocks_are_copied_and_swapped() -> None:
    shape, pairs = ENGINES["flash"][2], torch.tensor([[0, 5], [5, 6], [7, 1]])
    first, second = (torch.randn(shape).to(BF16) for _ in range(2))
    ours = [first.cuda(), second.cuda()]
    FlashAttentionBackend.swap_blocks(first, second, pairs)
    FlashAttentionBackend.swap_blocks(*ours, pairs.cuda())
    FlashAttentionBackend.copy_blocks([first, second], pairs)
    FlashAttentionBackend.copy_blocks(ours, pairs.cuda())
    assert torch.equal(ours[0].cpu(), first)
    assert torch.equal(ours[1].cpu(), second)


def test_whole_prompts_attend_to_their_own_keys() -> None:
    batch = Batch("mixed")
    batch.num_prefills = len(batch.new)
    cache = torch.zeros(ENGINES["flash"][2], dtype=BF16)
    ours = cache.cuda()
    expected = flash_layer(batch, "cpu", batch.flash("cpu", whole=True), cache, OPTIONS["all"])()
    out = flash_layer(batch, "cuda", batch.flash("cuda", whole=True), ours, OPTIONS["all"])()
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=4e-3)
    assert torch.equal(ours.cpu(), cache)
