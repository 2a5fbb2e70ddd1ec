"""The attention of transformers' continuous batching on a GPU: the CPU's results, no word to the host, CUDA graphs."""

import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_transformers_step import DECODES, LATER, NUM_HEADS, NUM_KV_HEADS, PROMPTS  # noqa: E402
from transformers_fake_cache import FakeCache, step_arguments  # noqa: E402

from jaxpaged.integrations.transformers_attention import attention_forward  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]
SIZE, BF16 = 64, torch.bfloat16


def on_gpu(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.cuda()
    if isinstance(x, dict):
        return {name: on_gpu(y) for name, y in x.items()}
    return [on_gpu(y) for y in x] if isinstance(x, list) else x


def twins(window: int | None) -> tuple[FakeCache, FakeCache]:
    """A cache on the CPU, and one on the GPU whose tokens lie in the same slots."""
    caches = []
    for _ in range(2):
        torch.manual_seed(0)
        caches.append(FakeCache(window=window, block_size=16, head_size=SIZE, dtype=BF16))
    caches[1].key_cache, caches[1].value_cache = (on_gpu(x) for x in (caches[1].key_cache, caches[1].value_cache))
    return caches[0], caches[1]


def states(parts: Any, padding: int = 0) -> list[torch.Tensor]:
    tokens = sum(part.length for part in parts) + padding
    return [torch.randn(1, tokens, n, SIZE).to(BF16).transpose(1, 2) for n in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]


def run(cache: FakeCache, layer: int, given: Any, arguments: Any) -> torch.Tensor:
    module = types.SimpleNamespace(layer_idx=layer)
    return attention_forward(module, *given, None, cache=cache, **arguments)[0]


@pytest.mark.parametrize(("window", "with_table"), [(None, False), (None, True), (32, False)])
def test_results_are_those_of_the_cpu(window: int | None, with_table: bool) -> None:
    here, there = twins(window)
    for parts in [*PROMPTS, *DECODES, *LATER]:
        table = with_table and all(part.length == 1 and part.past for part in parts)
        arguments = step_arguments(here, parts, with_table=table)
        ours = on_gpu(arguments)
        for layer in here.layer_index_to_group_indices:
            given = states(parts)
            expected = run(here, layer, given, arguments)
            out = run(there, layer, on_gpu(given), ours)
            torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=2e-2, atol=4e-3)
    for x, y in zip(here.key_cache + here.value_cache, there.key_cache + there.value_cache, strict=True):
        assert torch.equal(x.nan_to_num(9), y.cpu().nan_to_num(9))


@pytest.mark.parametrize("with_table", [False, True])
def test_a_graph_of_a_decode_step_replays_over_other_steps(with_table: bool) -> None:
    here, there = twins(None)
    for parts in PROMPTS:
        given, arguments = states(parts), step_arguments(here, parts)
        run(here, 0, given, arguments)
        run(there, 0, on_gpu(given), on_gpu(arguments))
    given, arguments = states(DECODES[0]), step_arguments(here, DECODES[0], with_table=with_table)
    buffers, ours = on_gpu(given), on_gpu(arguments)
    out = run(there, 0, buffers, ours).clone()
    torch.testing.assert_close(out.cpu().float(), run(here, 0, given, arguments).float(), rtol=2e-2, atol=4e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = dict(ours, read_index=list(ours["read_index"]))  # another step, which plans anew
        assert run(there, 0, buffers, ours).shape == out.shape
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(there, 0, buffers, ours)
    graph.replay()
    assert torch.equal(captured, out)
    for x in buffers:
        x.normal_()
    graph.replay()
    expected = run(here, 0, [x.cpu() for x in buffers], arguments)
    torch.testing.assert_close(captured.cpu().float(), expected.float(), rtol=2e-2, atol=4e-3)
