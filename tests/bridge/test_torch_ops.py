"""PyTorch's operators on the CPU: the engines' functions, schemas that say what is written, and torch.compile."""

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

from jaxpaged.backends import functional
from jaxpaged.bridge import direct, torch_ops
from jaxpaged.bridge.decode_calls import by_column

assert torch_ops.set_fallback  # registers the operators
ops = torch.ops.jaxpaged
SCORES = (0.125, True, -1, -1, 0.0)
DECODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"scores": (0.125, True, 20, -1, 0.0), "expected": {"window_size": (20, -1)}},
    "soft cap": {"scores": (0.125, True, -1, -1, 5.0), "expected": {"softcap": 5.0}},
    "slopes": {"expected": {"alibi_slopes": torch.rand(8)}},
    "slopes of each": {"expected": {"alibi_slopes": torch.rand(3, 8)}},
    "sinks": {"expected": {"s_aux": torch.randn(8)}},
    "speculative": {"query_lens": (3, 1, 2)},
    "batch invariant": {"batch_invariant": True},
    "padding": {"padding": 2},
}


def inputs(query_lens: Any = (1, 1, 1), padding: int = 0) -> Any:
    torch.manual_seed(0)
    kv = torch.randn(2, 40, 16, 2, 64).bfloat16()
    query = torch.randn(sum(query_lens) + padding, 8, 64).bfloat16()
    table = torch.randint(0, 40, (3, 6), dtype=torch.int32)
    lens = torch.tensor([5, 70, 33], dtype=torch.int32)
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    return query, *kv.unbind(0), table, lens, starts


@pytest.mark.parametrize("name", DECODES)
def test_decode_is_what_engines_call(name: str) -> None:
    given = DECODES[name]
    query_lens = given.get("query_lens", (1, 1, 1))
    query, key, value, table, lens, starts = inputs(query_lens, given.get("padding", 0))
    how = (max(query_lens), given.get("batch_invariant", False))
    scores, options = given.get("scores", SCORES), given.get("expected", {})
    plan = ops.plan_decode(query, key, value, table, lens, starts, *how, *scores)
    by_head = {"num_kv_heads": 2, "max_query_len": how[0]}
    slopes, sinks = (
        None if x is None else by_column(x, **by_head) for x in (options.get("alibi_slopes"), options.get("s_aux"))
    )
    out = torch.full_like(query, torch.nan)
    ops.decode(query, key, value, table, *plan, slopes, sinks, *how, *scores, out)
    expected = functional.flash_attn_varlen_func(
        query, key, value, starts, seqused_k=lens, causal=True, block_table=table, **options
    )
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in DECODES if name != "batch invariant"])
def test_prefill_is_what_engines_call(name: str) -> None:
    given = DECODES[name]
    query, key, value, table, lens, starts = inputs((3, 60, 9), given.get("padding", 0))
    scores, options = given.get("scores", SCORES), given.get("expected", {})
    plan = ops.plan_prefill(query, key, value, table, lens, starts, False, *scores)
    slopes, sinks = options.get("alibi_slopes"), options.get("s_aux")
    out, lse = torch.full_like(query, torch.nan), torch.full((8, len(query)), torch.nan)
    by_head = (slopes if slopes is None else slopes.view(-1, 8), sinks, None, None)
    ops.prefill(query, key, value, table, starts, *plan, *by_head, False, *scores, out, None, None, lse)
    expected, expected_lse = functional.flash_attn_varlen_func(
        query, key, value, starts, seqused_k=lens, causal=True, block_table=table, return_softmax_lse=True, **options
    )
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


def attended(query: Any, key: Any, value: Any, table: Any, lens: Any) -> Any:
    """Attention of one new token a request to float32 caches, and its lses."""
    outs, lses = [], []
    for row, blocks, n in zip(query.float(), table.long(), lens.tolist(), strict=True):
        k, v = (x[blocks].flatten(0, 1)[:n].repeat_interleave(4, dim=1) for x in (key, value))
        scores = torch.einsum("hd,shd->hs", row, k) * 0.125
        outs.append(torch.einsum("hs,shd->hd", scores.softmax(-1), v))
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses)


QUANTIZED: dict[str, tuple[Any, Any]] = {
    "float8 without scales": (torch.float8_e4m3fn, (None, None)),
    "float8 by tensor": (torch.float8_e5m2, (torch.tensor(0.5), torch.tensor([3.0]))),
    "float8 by head": (torch.float8_e4m3fn, (torch.tensor([0.5, 0.1]), torch.tensor([0.7, 2.0]))),
    "int8 by head": (torch.int8, (torch.tensor([0.01, 0.02]), torch.tensor([0.02, 0.01]))),
    "int8 by token": (torch.int8, tuple(torch.rand(2, 40, 16, 2) / 50)),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_8_bit_caches_are_decoded_with_scales(name: str) -> None:
    dtype, scales = QUANTIZED[name]
    query, *caches, table, lens, starts = inputs()
    caches = [(x * 30).to(dtype) if dtype == torch.int8 else x.to(dtype) for x in caches]
    given = [None if x is None else x.contiguous() for x in scales]
    plan = ops.plan_decode(query, *caches, table, lens, starts, 1, False, *SCORES, *given)
    out, lse = torch.full_like(query, torch.nan), torch.full((3, 8), torch.nan)
    ops.decode(query, *caches, table, *plan, None, None, 1, False, *SCORES, out, *given, lse)
    factors = [1.0 if x is None else x[..., None] if x.ndim else x for x in given]
    expected, lses = attended(query, *(x.float() * f for x, f in zip(caches, factors, strict=True)), table, lens)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, lses, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", QUANTIZED)
def test_8_bit_caches_are_prefilled_with_scales(name: str) -> None:
    dtype, scales = QUANTIZED[name]
    query, *caches, table, lens, starts = inputs((3, 60, 9))
    caches = [(x * 30).to(dtype) if dtype == torch.int8 else x.to(dtype) for x in caches]
    given = [None if x is None else x.contiguous() for x in scales]
    out, lse = torch.full_like(query, torch.nan), torch.full((8, 72), torch.nan)

    def attend(plan: Any) -> None:
        how = (*[None] * 4, False, *SCORES)
        ops.prefill(query, *caches, table, starts, *plan, *how, out, *given, lse)

    batch = (query, *caches, table, lens, starts, False, *SCORES)
    if name == "int8 by token":
        plan = ops.plan_prefill(*batch, *(torch.ones(()) for _ in range(2)))
        for call in (lambda: ops.plan_prefill(*batch, *given), lambda: attend(plan)):
            with pytest.raises(NotImplementedError, match="per token and head are taken by decode alone"):
                call()
        assert out.isnan().all() and lse.isnan().all()
        return
    attend(ops.plan_prefill(*batch, *given))
    factors = [1.0 if x is None else x[..., None] if x.ndim else x for x in given]
    wide = (x.float() * f for x, f in zip(caches, factors, strict=True))
    expected, lses = functional.flash_attn_varlen_func(
        query.float(), *wide, starts, seqused_k=lens, causal=True, block_table=table, return_softmax_lse=True
    )
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, lses, rtol=1e-3, atol=2e-3)


def test_lses_are_what_engines_get() -> None:
    query, key, value, table, lens, starts = inputs((3, 0, 2), padding=1)
    sinks = torch.randn(8)
    plan = ops.plan_decode(query, key, value, table, lens, starts, 3, False, *SCORES)
    by_head = by_column(sinks, num_kv_heads=2, max_query_len=3)
    out, lse = torch.full_like(query, torch.nan), torch.full((6, 8), torch.nan)
    ops.decode(query, key, value, table, *plan, None, by_head, 3, False, *SCORES, out, None, None, lse)
    expected, lses = functional.flash_attn_varlen_func(
        query, key, value, starts, seqused_k=lens, causal=True, block_table=table, s_aux=sinks, return_softmax_lse=True
    )
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse.T, lses, rtol=1e-3, atol=1e-3)
    assert torch.isneginf(lse[5]).all()


def test_direct_functions_are_the_operators() -> None:
    query, key, value, table, lens, starts = inputs()
    ours, theirs = ([key.clone(), value.clone()] for _ in range(2))
    rows, slots = torch.randn(3, 2, 64).bfloat16(), torch.tensor([3, 9, 70])

    def step(calls: Any, caches: Any) -> torch.Tensor:
        calls.reshape_and_cache(rows, rows, *caches, slots, "auto", None, None)
        plan = calls.plan_decode(query, *caches, table, lens, starts, 1, False, *SCORES)
        out = torch.empty_like(query)
        calls.decode(query, *caches, table, *plan, None, None, 1, False, *SCORES, out)
        prefilled = torch.empty_like(query)
        plan = calls.plan_prefill(query, *caches, table, lens, starts, False, *SCORES)
        calls.prefill(query, *caches, table, starts, *plan, *[None] * 4, False, *SCORES, prefilled)
        eight, scales = [x.to(torch.float8_e4m3fn) for x in caches], (torch.tensor(0.5), torch.tensor([0.1, 0.2]))
        of_8_bits, lse = torch.empty_like(query), torch.empty(8, 3)
        plan = calls.plan_prefill(query, *eight, table, lens, starts, False, *SCORES, *scales)
        calls.prefill(query, *eight, table, starts, *plan, *[None] * 4, False, *SCORES, of_8_bits, *scales, lse)
        return torch.cat([out, prefilled, of_8_bits, lse.T[..., None].expand_as(out)])

    assert torch.equal(step(direct, ours), step(ops, theirs))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    compiled = torch.compile(lambda caches: step(direct, caches), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ours), step(ops, theirs))


def test_cache_operators_are_what_engines_call() -> None:
    _, key, value, *_ = inputs()
    ours, theirs = ([key.clone(), value.clone()] for _ in range(2))
    rows, slots, pairs = torch.randn(4, 2, 64).bfloat16(), torch.tensor([3, 9, -1, 70]), torch.tensor([[1, 2], [2, 5]])
    ops.reshape_and_cache(rows, rows, *ours, slots, "auto", None, None)
    functional.reshape_and_cache_flash(rows, rows, *theirs, slots, "auto", 1.0, 1.0)
    ops.copy_blocks(*([x] for x in ours), pairs)
    functional.copy_blocks(*([x] for x in theirs), pairs)
    ops.swap_blocks(*ours, pairs)
    functional.swap_blocks(*theirs, pairs)
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_8_bit_caches_are_written_with_scales() -> None:
    ours, theirs = ([torch.zeros(4, 16, 2, 64, dtype=torch.float8_e4m3fn) for _ in range(2)] for _ in range(2))
    rows, slots, scale = torch.randn(4, 2, 64), torch.tensor([3, 9, -1, 60]), torch.tensor(0.3)
    ops.reshape_and_cache(rows, rows, *ours, slots, "fp8", scale, scale)
    functional.reshape_and_cache_flash(rows, rows, *theirs, slots, "fp8", scale, scale)
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(ours, theirs, strict=True))


def test_schemas_and_fakes_hold() -> None:
    query, key, value, table, lens, starts = inputs()
    rows, slots, pairs = torch.randn(4, 2, 64).bfloat16(), torch.tensor([3, 9, -1, 70]), torch.tensor([[1, 2], [2, 5]])
    plan = ops.plan_decode(query, key, value, table, lens, starts, 1, False, *SCORES)
    by_head = [by_column(torch.rand(8), num_kv_heads=2, max_query_len=1) for _ in range(2)]
    check = torch.library.opcheck
    check(ops.reshape_and_cache.default, (rows, rows, key, value, slots, "auto", None, None))
    check(ops.copy_blocks.default, ([key], [value], pairs))
    check(ops.swap_blocks.default, (key, value, pairs))
    check(ops.plan_decode.default, (query, key, value, table, lens, starts, 1, False, *SCORES))
    out = torch.empty_like(query)
    check(ops.decode.default, (query, key, value, table, *plan, *by_head, 1, False, *SCORES, out))
    check(ops.plan_prefill.default, (query, key, value, table, lens, starts, False, *SCORES))
    plan = ops.plan_prefill(query, key, value, table, lens, starts, False, *SCORES)
    slopes, sinks, lse = torch.rand(1, 8), torch.rand(8), torch.empty(8, 3)
    for given in (None, lse):
        how = (slopes, sinks, *by_head, False, *SCORES, out, None, None, given)
        check(ops.prefill.default, (query, key, value, table, starts, *plan, *how))
    caches, scales = [x.to(torch.int8) for x in (key, value)], (torch.tensor(0.3), torch.tensor(0.7))
    arguments = (query, *caches, table, lens, starts, 1, False, *SCORES, *scales)
    check(ops.plan_decode.default, arguments)
    plan = ops.plan_decode(*arguments)
    how = (None, None, 1, False, *SCORES, out, *scales, torch.empty(3, 8))
    check(ops.decode.default, (query, *caches, table, *plan, *how))
    arguments = (query, *caches, table, lens, starts, False, *SCORES, *scales)
    check(ops.plan_prefill.default, arguments)
    how = (slopes, sinks, *by_head, False, *SCORES, out, *scales, lse)
    check(ops.prefill.default, (query, *caches, table, starts, *ops.plan_prefill(*arguments), *how))


def test_a_schema_that_hides_a_write_would_be_found() -> None:
    library = torch.library.Library("jaxpaged_test", "FRAGMENT")
    library.define("hidden(Tensor x) -> ()")

    def add(x: torch.Tensor) -> None:
        x.add_(1)

    library.impl("hidden", add, "CPU")
    torch.library.register_fake("jaxpaged_test::hidden", lambda x: None, lib=library)
    with pytest.raises(Exception, match=r"mutat"):
        torch.library.opcheck(torch.ops.jaxpaged_test.hidden.default, (torch.zeros(3),), test_utils="test_schema")


def test_compiled_whole_and_without_a_copy_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of an engine, whose keys and values are views of one buffer."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    # What is kept on disk knows operators' results as they were when it was compiled.
    monkeypatch.setattr(config, "force_disable_caches", True)
    query, *_, table, lens, starts = inputs()
    layers = [torch.randn(40, 2, 16, 2, 64).bfloat16() for _ in range(2)]
    rows, slots = torch.randn(3, 2, 64).bfloat16(), torch.tensor([3, 9, 70])

    def step(query: Any, layers: Any, table: Any, lens: Any, starts: Any, rows: Any, slots: Any) -> Any:
        plan = ops.plan_decode(query, *layers[0].unbind(1), table, lens, starts, 1, False, *SCORES)
        for layer in layers:
            caches = layer.unbind(1)
            ops.reshape_and_cache(rows, rows, *caches, slots, "auto", None, None)
            out = torch.empty_like(query)
            ops.decode(query, *caches, table, *plan, None, None, 1, False, *SCORES, out)
            query = out
        return query

    eager = [x.clone() for x in layers]
    expected = step(query, eager, table, lens, starts, rows, slots)
    pointers = [x.data_ptr() for x in layers]
    compiled = torch.compile(step, fullgraph=True)
    result, (code, *_) = run_and_get_code(compiled, query, layers, table, lens, starts, rows, slots)
    assert torch.equal(result, expected)
    assert all(torch.equal(x, y) for x, y in zip(layers, eager, strict=True))
    assert [x.data_ptr() for x in layers] == pointers
    # What is allocated is as large as queries are; a cache has 163,840 elements.
    assert "163840" not in code


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)


def test_jax_leaves_memory_to_torch_unless_it_is_too_late() -> None:
    done = run("""
        import os, warnings
        os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
        os.environ.pop("XLA_PYTHON_CLIENT_ALLOCATOR", None)
        import jax
        from jaxpaged.bridge import process
        process.leave_memory_to_torch()
        assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
        process.leave_memory_to_torch()
        assert os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE") == "true"
        assert not process._backends_started()
        jax.devices()
        assert process._backends_started()
        process.leave_memory_to_torch()  # a backend of the CPU alone reserves nothing
        assert os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE") == "false"
        jax.local_devices = lambda: [type("Device", (), {"platform": "gpu"})]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            process.leave_memory_to_torch()
        assert "has reserved most of the GPU's memory" in str(caught[0].message), caught
        assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ
    """)
    assert done.returncode == 0, done.stderr


def test_an_interpreter_ends_cleanly() -> None:
    done = run("import jaxpaged.bridge.torch_ops, torch; print(torch.ops.jaxpaged.decode.default)")
    assert (done.returncode, done.stderr) == (0, "")
