"""PyTorch's operators by XLA and DLPack mean what they mean by kernels; on the CPU they can be compared there."""

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from test_torch_ops import DECODES, QUANTIZED, SCORES, inputs

from jaxpaged.bridge import dlpack_calls, torch_ops
from jaxpaged.bridge.decode_calls import by_column

assert torch_ops.set_fallback  # registers the operators
ops = torch.ops.jaxpaged


def caches(dtype: Any = torch.bfloat16, blocks: int = 12) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return list((torch.randn(blocks, 2, 16, 2, 64) * 40).to(dtype).unbind(1))


def twice(make: Any) -> Any:
    return make(), make()


def test_pieces_begin_where_jax_shares_memory() -> None:
    for n in range(300):
        found = dlpack_calls.aligned_pieces(n)
        assert len(found) <= 3 and all(first % 16 == 0 for first, _ in found)
        assert sorted({i for first, size in found for i in range(first, first + size)}) == list(range(n))
        assert [first + size for first, size in found] == sorted(first + size for first, size in found)
    assert len({size for n in range(2000) for _, size in dlpack_calls.aligned_pieces(n)}) <= 15 + 8


def same(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("n", [0, 1, 16, 39])
@pytest.mark.parametrize("ints", [torch.int32, torch.int64])
def test_writes(n: int, ints: torch.dtype) -> None:
    ours, theirs = twice(caches)
    rows = torch.randn(n, 2, 2, 64).bfloat16().unbind(1)  # with gaps between tokens
    slots = torch.randint(-5, 12 * 16 + 5, (n + 3,)).to(ints)[3:]  # some twice, and not aligned
    pointers = [x.data_ptr() for x in ours]
    dlpack_calls.write_by_dlpack(*rows, *ours, slots, "auto", None, None)
    ops.reshape_and_cache(*rows, *theirs, slots, "auto", None, None)
    assert same(ours, theirs) and same(theirs, caches()) == (n == 0)
    assert [x.data_ptr() for x in ours] == pointers


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.uint8), ("int8", torch.int8)]
)
@pytest.mark.parametrize("shape", [(1,), (2,), (12, 16, 2)])
def test_8_bit_writes(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ours, theirs = twice(lambda: [torch.zeros(12, 16, 2, 64, dtype=dtype) for _ in range(2)])
    our_scales, their_scales = twice(lambda: [torch.full(shape, 0.3), torch.full(shape, 0.7)])
    rows, slots = torch.randn(4, 2, 64), torch.tensor([3, 9, -1, 60])
    dlpack_calls.write_by_dlpack(rows, rows, *ours, slots, name, *our_scales)
    ops.reshape_and_cache(rows, rows, *theirs, slots, name, *their_scales)
    assert same(ours, theirs) and same(our_scales, their_scales)
    assert all(x.view(torch.uint8).any() for x in ours)


@pytest.mark.parametrize("pairs", [[[1, 2], [2, 5], [7, 5], [3, 3]], [[-1, 2], [4, 12], [1, 0], [0, 1]], []])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_copies(pairs: Any, dtype: torch.dtype) -> None:
    ours, theirs = twice(lambda: [x for _ in range(2) for x in caches(dtype)])
    mapping = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    dlpack_calls.copy_by_dlpack(ours[::2], ours[1::2], mapping)
    ops.copy_blocks(theirs[::2], theirs[1::2], mapping)
    assert same(ours, theirs)


@pytest.mark.parametrize("blocks", [12, 9])
def test_swaps(blocks: int) -> None:
    mapping = torch.tensor([[1, 2], [2, 5], [7, 5], [11, 0]], dtype=torch.int32)
    source = torch.randn(12, 16, 2, 64)
    ours, theirs = twice(lambda: torch.zeros(blocks, 16, 2, 64))
    dlpack_calls.swap_by_dlpack(source, ours, mapping)
    ops.swap_blocks(source, theirs, mapping)
    assert torch.equal(ours, theirs) and ours.any()
    within, expected = source.clone(), source.clone()
    dlpack_calls.swap_by_dlpack(within, within, mapping)
    ops.swap_blocks(expected, expected, mapping)
    assert torch.equal(within, expected) and not torch.equal(within, source)


@pytest.mark.parametrize("name", DECODES)
def test_decodes(name: str) -> None:
    given = DECODES[name]
    query_lens = given.get("query_lens", (1, 1, 1))
    query, key, value, table, lens, starts = inputs(query_lens, given.get("padding", 0))
    table = torch.nn.functional.pad(table, (0, 3, 1, 0), value=7)[1:, :6]  # a part of a larger table, not aligned
    how = (max(query_lens), given.get("batch_invariant", False))
    scores, options = given.get("scores", SCORES), given.get("expected", {})
    by_head = {"num_kv_heads": 2, "max_query_len": how[0]}
    slopes, sinks = (
        None if x is None else by_column(x, **by_head) for x in (options.get("alibi_slopes"), options.get("s_aux"))
    )
    outs = []
    for plan, decode in (
        (dlpack_calls.plan_by_dlpack, dlpack_calls.decode_by_dlpack),
        (ops.plan_decode, ops.decode),
    ):
        made = plan(query, key, value, table, lens, starts, *how, *scores)
        out = torch.full_like(query, torch.nan)
        decode(query, key, value, table, *made, slopes, sinks, *how, *scores, out)
        outs.append(out)
    assert torch.equal(*outs) and outs[0].any()


@pytest.mark.parametrize("name", [name for name in DECODES if name != "batch invariant"])
def test_prefills(name: str) -> None:
    given = DECODES[name]
    query, key, value, table, lens, starts = inputs((3, 60, 9), given.get("padding", 0))
    scores, options = given.get("scores", SCORES), given.get("expected", {})
    slopes, sinks = options.get("alibi_slopes"), options.get("s_aux")
    by_head = (slopes if slopes is None else slopes.view(-1, 8), sinks, None, None)
    found = []
    for plan, prefill in (
        (dlpack_calls.plan_prefill_by_dlpack, dlpack_calls.prefill_by_dlpack),
        (ops.plan_prefill, ops.prefill),
    ):
        made = plan(query, key, value, table, lens, starts, False, *scores)
        out, lse = torch.full_like(query, torch.nan), torch.full((8, len(query)), torch.nan)
        prefill(query, key, value, table, starts, *made, *by_head, False, *scores, out, None, None, lse)
        found.append((out, lse))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True)) and found[0][0].any()


@pytest.mark.parametrize("name", QUANTIZED)
def test_8_bit_decodes(name: str) -> None:
    dtype, scales = QUANTIZED[name]
    query, *kv, table, lens, starts = inputs()
    kv = [(x * 30).to(dtype) if dtype == torch.int8 else x.to(dtype) for x in kv]
    given = [None if x is None else x.clone() for x in scales]
    found = []
    for plan, decode in (
        (dlpack_calls.plan_by_dlpack, dlpack_calls.decode_by_dlpack),
        (ops.plan_decode, ops.decode),
    ):
        made = plan(query, *kv, table, lens, starts, 1, False, *SCORES, *given)
        out, lse = torch.full_like(query, torch.nan), torch.full((3, 8), torch.nan)
        decode(query, *kv, table, *made, None, None, 1, False, *SCORES, out, *given, lse)
        found.append((out, lse))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True)) and found[0][0].any()


@pytest.mark.parametrize("name", QUANTIZED)
def test_8_bit_prefills(name: str) -> None:
    dtype, scales = QUANTIZED[name]
    query, *kv, table, lens, starts = inputs((3, 60, 9))
    kv = [(x * 30).to(dtype) if dtype == torch.int8 else x.to(dtype) for x in kv]
    given = [None if x is None else x.clone() for x in scales]
    batch = (query, *kv, table, lens, starts, False, *SCORES)
    if name == "int8 by token":
        with pytest.raises(NotImplementedError, match="per token and head are taken by decode alone"):
            dlpack_calls.plan_prefill_by_dlpack(*batch, *given)
        return
    found = []
    for plan, prefill in (
        (dlpack_calls.plan_prefill_by_dlpack, dlpack_calls.prefill_by_dlpack),
        (ops.plan_prefill, ops.prefill),
    ):
        made = plan(*batch, *given)
        out, lse = torch.full_like(query, torch.nan), torch.full((8, len(query)), torch.nan)
        prefill(query, *kv, table, starts, *made, *[None] * 4, False, *SCORES, out, *given, lse)
        found.append((out, lse))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True)) and found[0][0].any()


def bad_calls() -> dict[str, Any]:
    rows, slots = torch.zeros(4, 2, 64).bfloat16(), torch.zeros(4, dtype=torch.int64)
    pairs = torch.zeros(1, 2, dtype=torch.int64)
    query, key, value, table, lens, starts = inputs()
    write, copy, swap = dlpack_calls.write_by_dlpack, dlpack_calls.copy_by_dlpack, dlpack_calls.swap_by_dlpack
    plan = (dlpack_calls.plan_by_dlpack, query, key, value, table)
    decode = (dlpack_calls.decode_by_dlpack, query, key, value, table)
    rest = (lens, lens, None, None, 1, False, *SCORES)
    requests, *_ = dlpack_calls.plan_by_dlpack(query, key, value, table, lens, starts, 1, False, *SCORES)
    return {
        "slots": ((write, rows, rows, *caches(), slots.float(), "auto", None, None), "slot_mapping: .*torch.int32"),
        "heads": ((write, rows[:, :1], rows, *caches(), slots, "auto", None, None), r"key: expected shape"),
        "dtype": ((write, rows, rows, *caches(torch.int8), slots, "auto", None, None), "kv_cache_dtype: .*not 'auto'"),
        "gradient": (
            (write, rows.clone().requires_grad_(), rows, *caches(), slots, "auto", None, None),
            "gradients are not supported",
        ),
        "layers": ((copy, [key], [], pairs), "value_caches: expected 1 layers"),
        "mapping": ((copy, [key], [value], pairs[0]), "block_mapping: expected shape"),
        "swap": ((swap, key, value[:, :8], pairs), "dst: expected shape"),
        "lens": ((*plan, lens.long(), starts, 1, False, *SCORES), "seq_lens: expected torch.int32"),
        "device": ((*plan, lens.to("meta"), starts, 1, False, *SCORES), "seq_lens: expected a tensor on cpu"),
        "plan": ((*decode, lens, *rest, query), "requests: expected shape"),
        "out": ((*decode, requests, *rest, query.float()), "out: expected torch.bfloat16"),
        "starts": ((*plan, lens, starts[:-1], 1, False, *SCORES), "query_start_loc: expected shape"),
    }


@pytest.mark.parametrize("case", bad_calls())
def test_what_does_not_fit_is_refused(case: str) -> None:
    (function, *args), message = bad_calls()[case]
    with pytest.raises((TypeError, ValueError), match=message):
        function(*args)


def test_a_table_whose_last_row_ends_too_early_is_refused() -> None:
    query, key, value, table, lens, starts = inputs()
    part = torch.nn.functional.pad(table, (3, 0))[:, 3:]
    plan = dlpack_calls.plan_by_dlpack(query, key, value, part, lens, starts, 1, False, *SCORES)
    with pytest.raises(ValueError, match="block_table: expected whole rows of 9 columns"):
        dlpack_calls.decode_by_dlpack(
            query, key, value, part, *plan, None, None, 1, False, *SCORES, torch.empty_like(query)
        )


def test_operators_are_served_with_one_warning_where_kernels_cannot_be_launched() -> None:
    """What is registered on a machine with a GPU whose plugin lacks the symbols."""
    program = """
        import warnings, torch
        from jaxpaged.bridge import torch_ops
        torch_ops.set_fallback("copy_blocks", None)
        serve = {name: torch_ops._fallback(name, "the library lacks MosaicGpuCompile") for name in torch_ops._SCHEMAS}
        caches, rows = [torch.zeros(4, 16, 2, 64) for _ in range(2)], torch.ones(3, 2, 64)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                serve["reshape_and_cache"](rows, rows, *caches, torch.tensor([0, 5, 63]), "auto", None, None)
            serve["swap_blocks"](*caches, torch.tensor([[0, 1]]))
            try:
                serve["copy_blocks"]([caches[0]], [caches[1]], torch.tensor([[0, 1]]))
            except NotImplementedError as error:
                print(error)
        print(len(caught), caught[0].message)
        print(int(caches[0].sum()), int(caches[1].sum()))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused, warning, sums = done.stdout.splitlines()
    assert refused == "copy_blocks: the library lacks MosaicGpuCompile"
    assert warning.startswith("1 jaxpaged's kernels can't run on PyTorch's stream: the library lacks MosaicGpuCompile.")
    assert "no CUDA graph" in warning
    assert sums == f"{3 * 2 * 64} {3 * 2 * 64 + 2 * 2 * 64}"
