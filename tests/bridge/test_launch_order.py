"""Kernels that may be launched early wait for the one before them, before they touch memory; needs no GPU."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from launch_order import fault, steps
from test_kernel_calls import CACHES, PREFILLS, X, array, cache_of, decode_calls, lowered, prefill_calls

from jaxpaged.bridge import kernel_functions
from jaxpaged.pallas import cache_write, decode
from jaxpaged.pallas.block_pairs import BlockPairs
from jaxpaged.pallas.decode_plan_kernel import DecodeCut
from jaxpaged.pallas.mosaic import follow_previous_kernel, kernel, let_next_kernel_start, wait_for_previous_kernel
from jaxpaged.reference.attention import AttentionOptions

PLAIN = AttentionOptions(0.125)


def write_module(name: str = "NHD", words: tuple[int, ...] = ()) -> bytes:
    rows = array((24, 2, 64), jnp.bfloat16)
    calls = lowered(kernel_functions.write_rows, cache_of(**CACHES[name]), rows, rows, array((24, *words), jnp.int32))
    (call,) = calls.calls
    return call.module


@pytest.mark.parametrize("words", [(), (2,)], ids=["int32", "int64"])
@pytest.mark.parametrize("name", CACHES)
def test_a_write_waits_first(name: str, words: tuple[int, ...]) -> None:
    assert fault(write_module(name, words)) is None


DECODES: dict[str, Any] = {
    "plain": {},
    "slopes and sinks": {"slopes": True, "sinks": True},
    "lse": {"lse": True},
    "HN2D": {"layout": "HN2D"},
    "float8 by head": CACHES["float8 by head"],
    "int8 by token": CACHES["int8 by token"] | {"num_kv_heads": 8},
}


@pytest.mark.parametrize("name", DECODES)
def test_decode_waits_first(name: str) -> None:
    calls, _ = decode_calls(PLAIN, **DECODES[name])
    (call,) = calls.calls
    assert fault(call.module) is None


def test_decode_beside_prefill_ends_after_it() -> None:
    """It lets the next kernel start at once, and the warps that store wait when all has been stored."""
    calls, _ = decode_calls(PLAIN, overlaps=True)
    order = steps(calls.calls[0].module)
    assert order[0] == ("trigger", None, 1)
    (end,) = (i for i, step in enumerate(order) if step.kind == "wait")
    assert order[end].depth == 2  # in one of the warpgroups, whatever there is to do
    stores = [i for i, step in enumerate(order) if re.search(r"cp\.async\.bulk.*\.global\.shared", step.kind)]
    assert stores
    assert max(stores) < end


def test_other_kernels_let_nobody_start_and_are_launched_when_all_before_has_ended() -> None:
    cache, each = cache_of(), array((8,), jnp.int32)
    pairs = BlockPairs(each, each, each, array((), jnp.int32))
    states = array((2, 64, 8, 64), jnp.bfloat16), array((2, 8, 64), jnp.float32)
    cut = DecodeCut(PLAIN, 4, 1, 64, 132, 2, False, False)
    batch = (array((4, 6), jnp.int32), array((4,), jnp.int32), array((5,), jnp.int32))
    prefill, merge = prefill_calls(**PREFILLS["in parts"])[0].calls
    found = [
        *lowered(kernel_functions.copy_blocks, cache, pairs).calls,
        *lowered(kernel_functions.merge_states, *states).calls,
        *lowered(kernel_functions.plan_decode, cache, *batch, cut=cut).calls,
        merge,
    ]
    assert len(found) == 5
    for call in found:
        assert not {"wait", "trigger"} & {step.kind for step in steps(call.module)}
        assert b"mosaic_gpu.uses_pdl" not in call.module
    # Prefill lets decode start at once, for which it need not wait: it isn't launched early.
    assert [step for step in steps(prefill.module) if step.kind in ("wait", "trigger")] == [("trigger", None, 1)]
    assert b"mosaic_gpu.uses_pdl" not in prefill.module


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        (lambda x, y: follow_previous_kernel(None), None),
        (lambda x, y: [follow_previous_kernel(None), wait_for_previous_kernel(None)], "waits twice"),
        (lambda x, y: wait_for_previous_kernel(None), "lets the next kernel start late"),
        (
            lambda x, y: [let_next_kernel_start(None), wait_for_previous_kernel(None)],
            "lets the next kernel start before it waits",
        ),
        (lambda x, y: [y.__setitem__(0, jnp.float32(0)), follow_previous_kernel(None)], "memref.store before it waits"),
        (
            lambda x, y: jax.lax.cond(
                jax.lax.axis_index("cta") > 0, lambda: follow_previous_kernel(None), lambda: None
            ),
            "some threads don't wait",
        ),
    ],
    ids=["right", "twice", "late", "trigger first", "store first", "on a condition"],
)
def test_planted_faults_are_found(begin: Any, expected: str | None) -> None:
    def body(x: Any, y: Any) -> None:
        begin(x, y)
        y[...] = x[...]

    def doubled(x: Any) -> Any:
        return kernel(body, interpret=None, out_type=X, grid=(2,), grid_names=("cta",))(x)

    (call,) = lowered(doubled, X).calls
    assert fault(call.module) == expected


@pytest.mark.parametrize("module", [cache_write, decode])
def test_a_kernel_that_does_not_wait_is_found(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "follow_previous_kernel", let_next_kernel_start)
    if module is cache_write:
        assert fault(write_module()) == "lets the next kernel start before it waits"
        return
    calls, _ = decode_calls(PLAIN)
    assert fault(calls.calls[0].module) == "lets the next kernel start before it waits"
