"""PyTorch's operators on a GPU: the results of the CPU's, JAX's bits, and refusals before anything is written."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gpu_steps import (
    BLOCK,
    BLOCKS,
    HEADS,
    KV_HEADS,
    LAYOUTS,
    PLAIN,
    RAGGED,
    SIZE,
    Step,
    new_cache,
    new_step,
    ops,
    per_head,
    scaled,
    tokens,
    unique_slots,
)

import jaxpaged
from jaxpaged import KVCache, PagedBatch
from jaxpaged.bridge import direct

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


SCALES: dict[str, Callable[[], Any]] = {
    "none": lambda: (None, None),
    "tensor": lambda: tuple(torch.tensor([x], device="cuda") for x in (0.3, 0.7)),
    "head": lambda: tuple(torch.rand(KV_HEADS, device="cuda") + 0.1 for _ in range(2)),
    "token": lambda: tuple(torch.rand(BLOCKS, BLOCK, KV_HEADS, device="cuda") for _ in range(2)),
}
WRITES = [
    *[(layout, torch.bfloat16, "auto", "none", 64) for layout in LAYOUTS],
    *[("NHD", torch.bfloat16, "auto", "none", n) for n in (1, 5, 200, 300)],
    ("NHD", torch.float16, "auto", "none", 64),
    ("NHD", torch.float32, "auto", "none", 64),
    ("N2HD", torch.float8_e4m3fn, "fp8", "tensor", 37),
    ("NHD", torch.uint8, "fp8_e5m2", "head", 64),
    ("NHD", torch.float8_e4m3fn, "fp8", "none", 64),
    ("NHD", torch.int8, "int8", "token", 70),
]


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("layout", "dtype", "name", "scales", "n"), WRITES)
def test_writes_have_the_bits_of_the_cpus(
    layout: str, dtype: Any, name: str, scales: str, n: int, slot_dtype: Any
) -> None:
    caches, given = new_cache(layout, dtype), SCALES[scales]()
    activation = dtype if name == "auto" else torch.bfloat16
    key, value, slots = tokens(n, activation), tokens(n, activation), unique_slots(n, slot_dtype)
    on_cpu = [x.cpu() for x in caches]
    cpu_scales = [None if x is None else x.cpu() for x in given]
    ops.reshape_and_cache(key.cpu(), value.cpu(), *on_cpu, slots.cpu(), name, *cpu_scales)
    pointers = [x.data_ptr() for x in caches]
    ops.reshape_and_cache(key, value, *caches, slots, name, *given)
    assert [x.data_ptr() for x in caches] == pointers
    for ours, expected in zip((*caches, *given), (*on_cpu, *cpu_scales), strict=True):
        if ours is not None:
            assert torch.equal(bits(ours).cpu(), bits(expected))


def test_keys_that_are_part_of_a_product_and_slots_that_start_anywhere() -> None:
    """As in engines: keys and values are columns of one matrix, and slots a part of a step's."""
    qkv = torch.randn(40, HEADS + 2 * KV_HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    key, value = qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
    for first in (1, 2, 3):
        slots = unique_slots(43)[first : first + 40]
        caches = new_cache()
        expected = [x.cpu() for x in caches]
        ops.reshape_and_cache(key.cpu(), value.cpu(), *expected, slots.cpu(), "auto", None, None)
        ops.reshape_and_cache(key, value, *caches, slots, "auto", None, None)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(caches, expected, strict=True))


def test_nothing_beside_a_cache_is_written() -> None:
    rows = BLOCKS * BLOCK * KV_HEADS * SIZE
    memory = torch.full((2, 3 * rows), 7.0, device="cuda", dtype=torch.bfloat16)
    caches = [x[rows : 2 * rows].view(BLOCKS, BLOCK, KV_HEADS, SIZE) for x in memory]
    ops.reshape_and_cache(tokens(300), tokens(300), *caches, unique_slots(300), "auto", None, None)
    assert (memory[:, :rows] == 7).all()
    assert (memory[:, 2 * rows :] == 7).all()
    assert (memory[:, rows : 2 * rows] != 7).any()


def mapping(n: int) -> torch.Tensor:
    pairs = torch.randint(-1, BLOCKS + 1, (n, 2))
    return pairs.cuda()


@pytest.mark.parametrize("n", [1, 7, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_are_those_of_the_cpu(layout: str, n: int) -> None:
    layers, pairs = [new_cache(layout) for _ in range(2)], mapping(n)
    on_cpu = [[x.cpu() for x in layer] for layer in layers]
    ops.copy_blocks(*map(list, zip(*on_cpu, strict=True)), pairs.cpu())
    ops.copy_blocks(*map(list, zip(*layers, strict=True)), pairs)
    for ours, expected in zip(layers, on_cpu, strict=True):
        assert all(torch.equal(x.cpu(), y) for x, y in zip(ours, expected, strict=True))


@pytest.mark.parametrize("devices", ["cuda cuda", "cuda cpu", "cpu cuda"])
def test_swaps_are_those_of_the_cpu(devices: str) -> None:
    first, second = devices.split()
    (source, _), (target, _), pairs = new_cache(), new_cache(), mapping(20)
    source, target = source.to(first), target.to(second)
    expected = target.cpu().clone()
    ops.swap_blocks(source.cpu(), expected, pairs.cpu())
    ops.swap_blocks(source, target, pairs)
    assert torch.equal(target.cpu(), expected)


MEMORY = ((SIZE, torch.bfloat16), (1, torch.float32))
STEPS: dict[str, Callable[[], Step]] = {
    "ragged": lambda: new_step(RAGGED),
    "float16": lambda: new_step(RAGGED, dtype=torch.float16),
    "5 requests": lambda: new_step([3, 700, 64, 65, 1]),
    "1 request in parts": lambda: new_step([1000]),
    "padding rows": lambda: new_step([3, 700, 64, 65], padding=3),
    "N2HD": lambda: new_step(RAGGED, layout="N2HD"),
    "HN2D": lambda: new_step(RAGGED, layout="HN2D"),
    "HND": lambda: new_step(RAGGED, layout="HND"),
    "window": lambda: new_step(RAGGED, scores=PLAIN._replace(window_left=99)),
    "soft cap": lambda: new_step(RAGGED, scores=PLAIN._replace(soft_cap=20.0)),
    "slopes and sinks": lambda: per_head(new_step(RAGGED), slopes=True, sinks=True),
    "speculative": lambda: new_step([9, 700, 64], [3, 1, 4], max_query_len=4),
    "speculative, 11 tokens": lambda: new_step([9, 700, 64], [3, 4, 4], max_query_len=4),
    "batch invariant": lambda: new_step(RAGGED[:5], batch_invariant=True),
    "float8": lambda: new_step(RAGGED, cache_dtype=torch.float8_e4m3fn),
    "float8 by tensor": lambda: scaled("tensor", RAGGED, torch.float8_e5m2, layout="N2HD"),
    "float8 by head": lambda: scaled("head", RAGGED, torch.float8_e4m3fn, dtype=torch.float16),
    "float8, everything": lambda: per_head(
        scaled("tensor", [9, 700, 64], torch.float8_e4m3fn, query_lens=[3, 1, 2], max_query_len=3), True, True
    ),
    "int8 by head": lambda: scaled("head", RAGGED, torch.int8),
    "int8 by token": lambda: scaled("token", RAGGED, torch.int8),
}


@pytest.mark.parametrize("name", STEPS)
def test_decode_is_what_the_reference_computes(name: str) -> None:
    step = STEPS[name]()
    plan = step.plan()
    lse = step.new_lse()
    ours = step.attend(plan)
    assert torch.equal(step.attend(plan, lse=lse), ours)
    reference = step.on_cpu()
    planned = reference.plan()
    count = len(reference.lens) + 1
    assert torch.equal(plan[0][:count].cpu(), planned[0][:count])
    assert (plan[0][count:] == 0).all()
    lses = reference.new_lse()
    expected = reference.attend(planned, lse=lses)
    # Weights of 8-bit values are rounded, and values are larger there.
    tolerance = 4e-3 if step.caches[0].dtype.itemsize > 1 else 2e-2
    torch.testing.assert_close(ours.cpu().float(), expected.float(), rtol=2e-2, atol=tolerance)
    torch.testing.assert_close(lse.cpu(), lses, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["ragged", "speculative, 11 tokens", "float8 by tensor"])
def test_direct_functions_give_the_operators_bits(name: str) -> None:
    step = STEPS[name]()
    expected, lses = step.attend(step.plan(), lse=(lse := step.new_lse())), lse
    for _ in range(3):  # the later ones are not looked up
        lse = step.new_lse()
        assert torch.equal(step.attend(step.plan(direct), lse=lse, calls=direct), expected)
        assert torch.equal(lse, lses)


def test_nothing_beside_an_output_and_lses_is_written() -> None:
    for query_lens in ([1] * 5, [3, 1, 2, 0, 1]):
        step = new_step([3, 700, 64, 65, 1], query_lens, max_query_len=max(query_lens), padding=1)
        tokens_in, heads = step.query.shape[:2]
        memory = [torch.full((3 * tokens_in, heads, n), 7.0, device="cuda", dtype=t) for n, t in MEMORY]
        (out, lse) = (x[tokens_in : 2 * tokens_in] for x in memory)
        step.attend(step.plan(), out, lse.view(tokens_in, heads))
        for x in memory:
            assert (x[:tokens_in] == 7).all()
            assert (x[2 * tokens_in :] == 7).all()
            assert (x[tokens_in : 2 * tokens_in] != 7).all()


def test_decode_refuses_what_does_not_fit_after_a_call_that_did() -> None:
    step = new_step(RAGGED)
    plan = step.plan()
    out = step.attend(plan).fill_(7.0)
    halves = [x[..., : SIZE // 2] for x in step.caches]
    table = step.table.long()
    for error, word, given in (
        (ValueError, "strides", {"caches": halves}),
        (TypeError, "block_table", {"table": table}),
        (ValueError, "block_table", {"table": step.table.cpu()}),
        (NotImplementedError, "query's dtype", {"query": step.query.half()}),
        (ValueError, "requires grad", {"query": step.query.clone().requires_grad_()}),
        (ValueError, "scale", {"k_scale": torch.ones((), device="cuda")}),
        (ValueError, "slopes", {"slopes": torch.ones(HEADS, device="cuda")}),
    ):
        with pytest.raises(error, match=word):
            dataclasses.replace(step, **given).attend(plan, out)
    with pytest.raises(TypeError, match="lse"):
        step.attend(plan, out, torch.zeros(HEADS, len(RAGGED), device="cuda").T)
    assert (out == 7).all()


@pytest.mark.parametrize("name", ["ragged", "window", "HN2D"])
def test_bits_are_those_of_jax(name: str) -> None:
    """The same kernel through the other door."""
    step = STEPS[name]()
    expected = step.on_cpu()
    arrays = [jnp.asarray(x.contiguous().float().numpy(), jnp.bfloat16) for x in (expected.query, *expected.caches)]
    left = step.scores.window_left
    result = jaxpaged.paged_attention(
        arrays[0],
        KVCache.from_arrays(*arrays[1:]),
        PagedBatch.create(expected.table.numpy(), expected.lens.numpy(), expected.starts.numpy()),
        window=None if left < 0 else (left, None),
        implementation="mosaic_gpu",
    )
    ours = step.attend(step.plan()).cpu().float().numpy()
    np.testing.assert_array_equal(ours, np.asarray(result.astype(jnp.float32)))


def test_a_query_that_is_part_of_a_product_is_read_where_it_lies() -> None:
    step = new_step(RAGGED)
    expected = step.attend(step.plan())
    qkv = torch.randn(len(RAGGED), HEADS + 2 * KV_HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    qkv[:, :HEADS] = step.query
    parted = dataclasses.replace(step, query=qkv[:, :HEADS])
    assert torch.equal(parted.attend(parted.plan(), torch.empty_like(expected)), expected)


def test_a_table_that_is_part_of_a_wider_one() -> None:
    step = new_step(RAGGED)
    expected = step.attend(step.plan())
    wide = torch.full((len(RAGGED) + 5, step.table.shape[1] + 30), -3, dtype=torch.int32, device="cuda")
    wide[: len(RAGGED), : step.table.shape[1]] = step.table
    parted = dataclasses.replace(step, table=wide[: len(RAGGED), : step.table.shape[1]])
    assert torch.equal(parted.attend(parted.plan()), expected)


def test_what_does_not_fit_is_refused_and_nothing_written() -> None:
    caches, rows, slots = new_cache(), tokens(8), unique_slots(8)
    before = [x.clone() for x in caches]
    shifted = torch.empty(8 * KV_HEADS * SIZE + 1, dtype=torch.bfloat16, device="cuda")[1:].view_as(rows)
    grad = rows.clone().requires_grad_()
    for error, word, arguments in (
        (ValueError, "slot_mapping", (rows, rows, *caches, slots.cpu(), "auto", None, None)),
        (ValueError, "multiple of 16 bytes", (shifted, rows, *caches, slots, "auto", None, None)),
        (TypeError, "key", (rows.half(), rows.half(), *caches, slots, "auto", None, None)),
        (ValueError, "key", (rows[..., :64], rows, *caches, slots, "auto", None, None)),
        (ValueError, "strides", (rows, rows, caches[0][:, ::2], caches[1][:, ::2], slots, "auto", None, None)),
        (ValueError, "requires grad", (grad, rows, *caches, slots, "auto", None, None)),
        (ValueError, "kv_cache_dtype", (rows, rows, *caches, slots, "fp4", None, None)),
    ):
        with pytest.raises(error, match=word):
            ops.reshape_and_cache(*arguments)
    assert all(torch.equal(x, y) for x, y in zip(caches, before, strict=True))
