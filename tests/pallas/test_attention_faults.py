"""Faults planted in the attention kernels, which the suite and the interpreter's race detection must catch."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxpaged.attention import _mosaic_gpu
from jaxpaged.pallas import attention, decode, decode_step, prefill, prefill_step
from jaxpaged.pallas.mosaic import interpreted
from jaxpaged.testing.cases import Case
from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.verify import Result, compare

DECODE, PREFILL = Case("decode", (1, 1), (70, 130)), Case("prefill", (20,), (70,))
LONG_DECODE, LONG_PREFILL = Case("long-decode", (1,), (1000,)), Case("long-prefill", (20,), (600,))
KERNELS = {"decode": (decode, DECODE, LONG_DECODE), "prefill": (prefill, PREFILL, LONG_PREFILL)}
STEPS = {"decode": decode_step, "prefill": prefill_step}


@pytest.fixture(autouse=True)
def fresh(set_multiprocessors):
    """Nothing compiled before or after sees the fault."""
    set_multiprocessors(2)
    _mosaic_gpu.clear_cache()
    yield
    _mosaic_gpu.clear_cache()


def outcome(case: Case, **how: Any) -> Result:
    with interpreted(**how):
        return compare(case, "kernels", DOORS["kernels"])


def nothing(*_: Any, **__: Any) -> None:
    pass


@pytest.mark.parametrize("name", KERNELS)
def test_values_that_no_row_attends_to_must_be_cleared(monkeypatch, name):
    case = KERNELS[name][1]
    monkeypatch.setattr(STEPS[name], "_clear_unused_values", nothing)
    result = outcome(case)
    assert not result.ok
    assert result.error == float("inf")  # NaN


def test_an_item_dropped_from_the_plan_of_prefill(monkeypatch):
    planned = attention.plan_prefill

    def dropped(*arguments: Any, **more: Any) -> Any:
        plan = planned(*arguments, **more)
        return plan._replace(counts=plan.counts.at[0].add(-1))

    monkeypatch.setattr(attention, "plan_prefill", dropped)
    assert not outcome(PREFILL).ok


def test_a_tile_dropped_from_the_plan_of_decode(monkeypatch):
    planned = attention.plan_decode

    def dropped(*arguments: Any, **more: Any) -> Any:
        plan = planned(*arguments, **more)
        return plan._replace(shares=plan.shares.at[0, 3].add(-1))

    monkeypatch.setattr(attention, "plan_decode", dropped)
    assert not outcome(DECODE).ok


def test_a_request_one_token_too_short(monkeypatch):
    """The smallest fault of a mask."""
    kept = decode_step.kept
    monkeypatch.setattr(decode_step, "kept", lambda options, place, kv_len: kept(options, place, kv_len - 1))
    assert not outcome(DECODE).ok


class _NeverWaited:
    """Stands for barriers that nothing waits for."""

    @property
    def at(self) -> "_NeverWaited":
        return self

    def __getitem__(self, index: Any) -> "_NeverWaited":
        return self


def leave_out_waits(monkeypatch: pytest.MonkeyPatch, module: Any, function: str, barrier: str) -> None:
    """Make `function`, one of a kernel's warpgroups, wait for none of the phases of `barrier`."""
    original, wait = getattr(module, function), module.plgpu.barrier_wait

    def without(*arguments: Any) -> None:
        (memory,) = (x for x in arguments if isinstance(x, module.Memory))
        without_barrier = memory._replace(**{barrier: _NeverWaited()})
        original(*(without_barrier if x is memory else x for x in arguments))

    monkeypatch.setattr(module, function, without)
    monkeypatch.setattr(module.plgpu, "barrier_wait", lambda b: None if isinstance(b, _NeverWaited) else wait(b))


# What the interpreter says of them: jax 0.11 may find a phase that nobody waited for before it finds the race.
REPORTS = ("RACE DETECTED", "no threads observed phase", "had only observed barrier", "Not all copy_smem_to_gmem")


def is_reported(case: Case, complaints: Callable[..., tuple[str | None, str]]) -> bool:
    """Whether the interpreter speaks up."""
    raised, printed = complaints(lambda: outcome(case))
    if raised is not None:
        assert any(report in raised for report in REPORTS), raised
        return True
    return "RACE DETECTED" in printed


@pytest.mark.parametrize("name", KERNELS)
def test_keys_read_before_they_are_there_are_a_race(monkeypatch, complaints, name):
    module, case, _ = KERNELS[name]
    leave_out_waits(monkeypatch, module, "_compute", "k_full")
    assert is_reported(case, complaints)


@pytest.mark.parametrize("barrier", ["k_empty", "v_empty"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_slot_filled_before_it_is_free_is_a_race(monkeypatch, complaints, name, barrier):
    module, _, case = KERNELS[name]
    leave_out_waits(monkeypatch, module, "load_all", barrier)
    assert is_reported(case, complaints)


@pytest.mark.parametrize("name", KERNELS)
def test_output_overwritten_before_it_has_left_is_a_race(monkeypatch, complaints, name):
    module = KERNELS[name][0]
    case = Case("five-decodes", (1,) * 5, (70,) * 5) if name == "decode" else Case("two-tiles", (20, 20), (70, 70))
    monkeypatch.setattr(module.plgpu, "wait_smem_to_gmem", nothing)
    assert is_reported(case, complaints)


def test_without_a_fault_nothing_is_reported(complaints):
    for _, case, _ in KERNELS.values():
        assert not is_reported(case, complaints)
        assert outcome(case).ok
