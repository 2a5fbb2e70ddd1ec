"""JAX functions of a user's own on PyTorch's tensors: what they return, what they write, what is refused."""

import contextlib
import gc
import re
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxpaged import PagedBatch, gather_kv, paged_attention, write_kv
from jaxpaged.bridge import imports, stream_order, torch_call
from jaxpaged.bridge.dlpack import int64_words, refuse_capture, tensor_cache, to_jax, words_to_slots
from jaxpaged.bridge.torch_cache import TorchCache, write_kv_

call = torch_call.torch_call
N, S, H, D = 6, 8, 2, 16


def test_a_result_has_tensors_for_arrays() -> None:
    x, flags = torch.randn(3, 4), torch.tensor([True, False, True])

    def function(x: Any, options: Any, add: Any, y: Any) -> Any:
        return {"sum": x + add, "none": None, "flags": (~options["flags"], x.astype(jnp.bfloat16)), "y": y * 2}

    result = call(function, x, {"flags": flags}, 2, np.arange(3, dtype=np.float32))
    assert torch.equal(result["sum"], x + 2) and result["none"] is None
    assert torch.equal(result["flags"][0], ~flags) and torch.equal(result["flags"][1], x.bfloat16())
    assert torch.equal(result["y"], torch.tensor([0.0, 2.0, 4.0]))
    assert torch.equal(call(function, x, {"flags": flags}, 3, jnp.ones(2))["sum"], x + 3)
    assert call(lambda x: x[:0], x).shape == (0, 4)


def test_an_argument_that_is_returned_is_not_the_result() -> None:
    x = torch.randn(4, 16)
    result = call(lambda x: x, x)
    assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()


def test_a_function_is_traced_when_shapes_are_new() -> None:
    traced = []

    def function(x: Any) -> Any:
        traced.append(x.shape)
        return x + 1

    for _ in range(3):
        call(function, torch.zeros(4))
    once = len(traced)
    call(function, torch.zeros(8))
    assert once == traced.count((4,)) and once == traced.count((8,))


def test_what_torch_writes_between_calls_is_seen() -> None:
    x = torch.zeros(16)
    for i in range(3):
        x.fill_(i)
        assert call(jnp.sum, x) == 16 * i


def layouts() -> dict[str, Any]:
    kv = torch.zeros(2, N, S, H, D)
    return {
        "NHD": kv.clone().unbind(0),
        "HND": tuple(torch.zeros(N, H, S, D).transpose(1, 2) for _ in range(2)),
        "N2HD": kv.transpose(0, 1).contiguous().unbind(1),
        "2HND": torch.zeros(2, N, H, S, D).transpose(2, 3).unbind(0),
        "HN2D": torch.zeros(N, H, S, 2 * D).transpose(1, 2).chunk(2, -1),
    }


def new_tokens(n: int = 5) -> Any:
    torch.manual_seed(0)
    return torch.randn(n, H, D), torch.randn(n, H, D), torch.tensor([3, 17, -1, 40, N * S + 2])[:n]


def write(cache: Any, key: Any, value: Any, words: Any) -> Any:
    return None, write_kv(cache, key, value, words_to_slots(words))


def read(cache: Any, table: Any, lens: Any) -> Any:
    return gather_kv(cache, table, lens, total_tokens=N * S)


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_donated_cache_is_written_where_it_lies(layout: str, dtype: torch.dtype) -> None:
    ours, theirs = (tuple(x.to(dtype) for x in layouts()[layout]) for _ in range(2))
    key, value, slots = new_tokens()
    if dtype == torch.bfloat16:
        key, value = key.bfloat16(), value.bfloat16()
    pointers = [x.data_ptr() for x in ours]
    assert call(write, tensor_cache(*ours), key, value, int64_words(slots), donate=[0]) is None
    write_kv_(TorchCache.of(*theirs), key, value, slots)
    assert [x.data_ptr() for x in ours] == pointers
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x.float(), y.float()) and x.float().abs().sum() > 0
    keys, values = call(
        read, tensor_cache(*ours), torch.arange(N, dtype=torch.int32)[None], np.array([N * S], np.int32)
    )
    for x, y in ((keys, ours[0]), (values, ours[1])):
        assert torch.equal(x.float(), y.float().reshape(-1, H, D))


@pytest.mark.parametrize("kind", ["number", "tensor", "head", "token_head"])
def test_scales_are_donated_with_their_cache(kind: str) -> None:
    def scale() -> Any:
        shapes = {"tensor": (), "head": (H,), "token_head": (N, S, H)}
        return 0.5 if kind == "number" else torch.full(shapes[kind], 0.5)

    ours, theirs = ([torch.zeros(N, S, H, D, dtype=torch.int8) for _ in range(2)] for _ in range(2))
    our_scales, their_scales = ({"k_scale": scale(), "v_scale": scale()} for _ in range(2))
    key, value, slots = new_tokens()
    call(write, tensor_cache(*ours, **our_scales), key, value, int64_words(slots), donate=[0])
    write_kv_(TorchCache.of(*theirs, **their_scales), key, value, slots)
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    for x, y in zip(our_scales.values(), their_scales.values(), strict=True):
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(y))


def step(cache: Any, query: Any, key: Any, value: Any, batch: PagedBatch) -> Any:
    cache = write_kv(cache, key, value, batch.slot_mapping)
    return paged_attention(query, cache, batch), cache


def test_a_step_of_attention() -> None:
    caches = tuple(x.normal_() for x in layouts()["N2HD"])
    key, value, _ = new_tokens(3)
    query = torch.randn(3, 2 * H, D)
    ints = {"dtype": torch.int32}
    table, lens = torch.tensor([[5, 0], [1, 3], [2, -1]], **ints), torch.tensor([9, 16, 1], **ints)
    slots = torch.tensor([0 * S, 3 * S + 7, 2 * S], **ints)
    batch = PagedBatch(table, lens, torch.arange(4, **ints), slots, 1)
    before = tuple(x.clone() for x in caches)
    output = call(step, tensor_cache(*caches), query, key, value, batch, donate=[0])
    write_kv_(TorchCache.of(*before), key, value, slots)
    assert all(torch.equal(x, y) for x, y in zip(caches, before, strict=True))
    for i, n in enumerate(lens):
        keys, values = (x[table[i].clamp(min=0).long()].reshape(-1, H, D)[:n].repeat_interleave(2, 1) for x in before)
        scores = torch.einsum("hd,khd->hk", query[i], keys) * D**-0.5
        torch.testing.assert_close(output[i], torch.einsum("hk,khd->hd", scores.softmax(-1), values))


def swap_values(x: Any, other: Any, y: Any) -> Any:
    return (x.sum(), y.max()), y + other, x - 1


def test_new_values_go_to_the_arguments_they_belong_to() -> None:
    x, y = torch.full((4, 16), 1.0), torch.full((4, 16), 2.0)
    sums = call(swap_values, x, 10, y, donate=[0, 2])
    assert [float(s) for s in sums] == [64.0, 2.0]
    assert torch.equal(x, torch.full((4, 16), 12.0)) and torch.equal(y, torch.full((4, 16), 0.0))
    call(lambda a, b: (None, b, a), x, y, donate=[1, 0])  # in the order of donate
    assert torch.equal(y, torch.full((4, 16), 0.0)) and torch.equal(x, torch.full((4, 16), 12.0))


def compiled(function: Any, *args: Any, donate: Any) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return torch_call._call(function, tree, donate, (True,) * len(leaves))


def test_donated_memory_is_that_of_the_new_values_and_results() -> None:
    """JAX donates its own memory on the CPU, too, so the program itself can be watched here."""
    shape = jnp.zeros((4, 16))
    made = compiled(lambda x, y: ((x * 2, y), y + 1, x - 1), shape, shape, donate=(0, 1))
    donated, results = [[jnp.full((4, 16), i) for i in range(2)] for _ in range(2)]
    pointers = [x.unsafe_buffer_pointer() for x in (*donated, *results)]
    new, filled, done = made._program(donated, results, [], jnp.zeros(1, jnp.int32))
    assert [x.unsafe_buffer_pointer() for x in (*new, *filled)] == pointers
    assert [float(x[0, 0]) for x in (*new, *filled)] == [2.0, -1.0, 0.0, 1.0] and done[0] == 1


@pytest.mark.parametrize("layout", layouts())
def test_a_program_copies_no_cache(layout: str) -> None:
    cache = tensor_cache(*layouts()[layout])
    shapes = [jax.ShapeDtypeStruct(tuple(x.shape), "float32") for x in jax.tree.leaves(cache)]
    rows, words = jax.ShapeDtypeStruct((5, H, D), "float32"), jax.ShapeDtypeStruct((5, 2), "int32")
    made = compiled(write, cache, rows, rows, words, donate=(0,))
    token = jax.ShapeDtypeStruct((1,), "int32")
    lowered = made._program.lower(shapes, [], [rows, rows, words], token)
    assert re.findall(r"tf.aliasing_output = (\d+)", lowered.as_text()) == [str(i) for i in range(len(shapes))]
    program = lowered.compile().as_text()
    size = ",".join(map(str, shapes[0].shape))
    assert f"f32[{size}]" in program
    assert not re.search(rf"= f32\[{size}\]\S* (copy|transpose)\(", program)


def test_the_token_is_an_argument_of_the_program() -> None:
    """Whatever the function does with its arguments, the program waits for PyTorch's stream, and the stream for it."""
    made = compiled(lambda x: jnp.ones(3), torch.zeros(4), donate=())
    three, four = (jax.ShapeDtypeStruct((n,), "float32") for n in (3, 4))
    text = made._program.lower([], [three], [four], jax.ShapeDtypeStruct((1,), "int32")).as_text()
    assert re.search(r"@main\(.*%arg2: tensor<1xi32>\) -> \(tensor<3xf32>.*, tensor<1xi32>", text)


def test_each_call_asks_for_what_is_queued_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    queued, wait = stream_order.queued_work, stream_order.wait_for
    monkeypatch.setattr(stream_order, "queued_work", lambda device: seen.append(device) or queued(device))
    monkeypatch.setattr(stream_order, "wait_for", lambda done: seen.append(int(done[0])) or wait(done))
    x = torch.zeros(16)
    for _ in range(2):
        call(lambda x: (None, x + 1), x, donate=[0])
    assert seen == [torch.device("cpu"), 1] * 2 and x[0] == 2


def bad_calls() -> dict[str, Any]:
    x, ints = torch.zeros(4, 16), torch.zeros(4, dtype=torch.int64)
    meta = x.to("meta")
    cache = tensor_cache(*layouts()["NHD"])

    def other_layout(cache: Any) -> Any:
        return None, tensor_cache(*layouts()["HND"])

    return {
        "no tensor": ((jnp.sum, 1.0), {}, TypeError, "args: expected at least one tensor"),
        "gradient": ((jnp.sum, x.clone().requires_grad_()), {}, ValueError, r"args\[0\]: .*gradients"),
        "int64": ((jnp.sum, [x, ints]), {}, ValueError, r"args\[0\]\[1\]: .*int64_words"),
        "strided": ((jnp.sum, x[:, :8]), {}, ValueError, r"args\[0\]: .*compact.*physical_order.*whole tensor"),
        "transposed": ((jnp.sum, x.t()), {}, ValueError, r"args\[0\]: .*physical_order"),
        "devices": ((jnp.add, x, meta), {}, ValueError, r"args\[1\]: expected a tensor on cpu, as args\[0\] is"),
        "meta": ((jnp.sum, meta), {}, ValueError, r"args\[0\]: expected a tensor on the CPU or a CUDA device"),
        "twice": ((jnp.add, x, x), {"donate": [0]}, ValueError, r"args\[1\]: it shares memory with args\[0\]"),
        "overlap": ((jnp.add, x, x[3:]), {"donate": [1]}, ValueError, r"args\[1\]: it shares memory"),
        "no tuple": ((lambda x: x, x), {"donate": [0]}, TypeError, "function: expected to return a tuple.*1 donated"),
        "too few": ((lambda x: (x,), x), {"donate": [0]}, TypeError, "function: expected to return a tuple.*1 values"),
        "shape": ((lambda x: (None, x[1:]), x), {"donate": [0]}, ValueError, r"args\[0\] with float32\[4, 16\]"),
        "dtype": ((lambda x: (None, x > 0), x), {"donate": [0]}, ValueError, r"args\[0\] .*got bool\[4, 16\]"),
        "layout": ((other_layout, cache), {"donate": [0]}, TypeError, r"function: expected to return a new value"),
        "position": ((jnp.sum, x), {"donate": [1]}, ValueError, r"donate: expected positions of 1 arguments.*got 1"),
        "same position": ((jnp.sum, x), {"donate": [0, 0]}, ValueError, "donate: expected each position once"),
        "unhashable": ((Unhashable(), x), {}, TypeError, "function: expected a function that can be hashed"),
        "uint32": ((lambda x: x.astype("uint32"), x), {}, ValueError, "function's result: expected one of float32"),
        "key": ((lambda x: jax.random.key(0), x), {}, TypeError, "function: it returns key"),
    }  # fmt: skip


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("case", bad_calls())
def test_what_does_not_fit_is_refused(case: str) -> None:
    args, how, error, message = bad_calls()[case]
    with pytest.raises(error, match=message):
        call(*args, **how)


def test_memory_that_jax_did_not_keep_on_a_gpu_is_an_error() -> None:
    elsewhere = types.SimpleNamespace(device=torch.device("cuda", 0), data_ptr=lambda: 64, numel=lambda: 4)
    with pytest.raises(RuntimeError, match="donate: JAX didn't keep"):
        torch_call._put(elsewhere, jnp.zeros(4))


def test_a_capture_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        with (
            pytest.raises(RuntimeError, match=r"step: .*no CUDA graph .*outside of the graph")
            if capturing
            else contextlib.nullcontext()
        ):
            refuse_capture(torch.device("cuda", 0), "step")


def test_nothing_is_written_when_the_function_raises() -> None:
    x = torch.zeros(16)

    def function(x: Any, y: Any) -> Any:
        return None, x + y

    with pytest.raises(TypeError, match="shapes"):
        call(function, x, torch.zeros(7), donate=[0])
    assert not x.any()
    call(function, x, torch.ones(16), donate=[0])
    assert torch.equal(x, torch.ones(16))


def test_threads_write_to_caches_of_their_own() -> None:
    tensors = [torch.zeros(64) for _ in range(4)]

    def one_more(x: Any) -> Any:
        return x.sum(), x + 1

    def work(x: torch.Tensor) -> None:
        for _ in range(50):
            call(one_more, x, donate=[0])

    threads = [threading.Thread(target=work, args=(x,)) for x in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(x, torch.full((64,), 50.0)) for x in tensors)


def test_an_import_is_found_again_until_its_memory_goes() -> None:
    x = torch.arange(32.0)
    array = imports.find(x)
    assert array.unsafe_buffer_pointer() == x.data_ptr() and imports.find(x.view(32)) is array
    assert imports.find(x.view(4, 8)) is not array and imports.find(x.view(torch.int32)) is not array
    half = imports.find(x[16:])
    assert half is not array and half.unsafe_buffer_pointer() == x[16:].data_ptr()
    known = len(imports._imports)
    del x
    gc.collect()
    assert len(imports._imports) == known - 4


def test_an_import_keeps_no_memory() -> None:
    freed = []

    class Watched(np.ndarray):
        def __del__(self) -> None:
            freed.append(True)

    memory = np.zeros(32 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    x = torch.from_numpy(memory[start : start + 32].view(Watched))
    assert imports.find(x).shape == (32,)
    freed.clear()
    del x
    gc.collect()
    assert freed


def test_other_memory_at_an_address_is_not_taken_for_what_was_there() -> None:
    memory = np.zeros(64, np.float32)
    memory = memory[-memory.ctypes.data % 64 // 4 :][:32]
    first, second = torch.from_numpy(memory), torch.from_numpy(memory)
    assert first.data_ptr() == second.data_ptr()
    array = imports.find(first)
    other = imports.find(second)
    assert other is not array and imports.find(second) is other
    del first  # is forgotten, and what came in its place is not
    gc.collect()
    assert imports.find(second) is other


def test_an_array_that_is_taken_is_not_found() -> None:
    x = torch.zeros(32)
    array = imports.find(x)
    assert imports.take(x) is array
    assert imports.find(x) is not array
    imports.find(x).delete()
    assert not imports.find(x).is_deleted()


def test_an_array_made_once_passes_as_it_is() -> None:
    weights = to_jax(torch.full((16,), 3.0))
    assert torch.equal(call(jnp.multiply, torch.ones(16), weights), torch.full((16,), 3.0))
