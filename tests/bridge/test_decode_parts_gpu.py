"""Requests that CTAs of decode share, on a GPU: parts and flags in memory that holds anything, launch after launch.

The check for parts that are read too early is shown to find a kernel that doesn't wait for them.
"""

import dataclasses
from typing import Any

import pytest
import torch
from gpu_steps import RAGGED, Step, new_step, scaled
from test_launch_order_gpu import forget

from jaxpaged.pallas import decode_parts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

STEPS: dict[str, Any] = {
    "one request": lambda: new_step([30_000]),
    "three": lambda: new_step([9000, 1, 7000]),
    "ragged": lambda: new_step([*RAGGED, 5000]),
    "several new tokens": lambda: new_step([6000, 300, 9000], [4, 1, 3], max_query_len=4),
    "wide": lambda: new_step([6000, 300, 9000], [8, 1, 3], max_query_len=8),
    "float8": lambda: scaled("tensor", [9000, 1, 7000], torch.float8_e4m3fn),
    "int8 by token": lambda: scaled("token", [9000, 1, 7000], torch.int8),
}
"""Longer than the caches: blocks come again and again."""


def attended(step: Step, plan: Any, fill: int) -> torch.Tensor:
    """The output, with a workspace that held a number in each byte."""
    plan[2].fill_(fill)
    return step.attend(plan)


@pytest.mark.parametrize("name", STEPS)
def test_parts_are_taken_up_whatever_memory_held(name: str) -> None:
    step = STEPS[name]()
    plan = step.plan()
    expected = step.on_cpu()
    right = expected.attend(expected.plan()).float()
    first = attended(step, plan, 255)  # NaN
    assert float((first.cpu().float() - right).norm() / right.norm()) < 6e-3
    for fill in (255, 0, 127):
        assert torch.equal(attended(step, plan, fill), first)


def test_a_thousand_launches_have_the_same_bits() -> None:
    """Flags are lowered again, whichever CTA comes first; and a plan of other lengths finds none raised."""
    step, other = new_step([9000, 1, 7000, 64]), new_step([300, 8000, 16, 2000])
    plans = [x.plan() for x in (step, other)]
    plans[1] = (*plans[1][:2], plans[0][2])  # one workspace for both
    expected = [x.attend(plan).clone() for x, plan in zip((step, other), plans, strict=True)]
    outs = [torch.empty_like(x) for x in expected]
    for _ in range(500):
        for x, plan, out in zip((step, other), plans, outs, strict=True):
            out.fill_(torch.nan)
            x.attend(plan, out)
        assert all(torch.equal(x, y) for x, y in zip(outs, expected, strict=True))


def test_other_work_beside_it_changes_nothing() -> None:
    """Where another kernel has the multiprocessors, CTAs come when they can: none waits for one that comes later."""
    step, side = new_step([30_000, 5, 20_000]), torch.cuda.Stream()
    plan, x = step.plan(), torch.randn(4096, 4096, device="cuda")
    expected = step.attend(plan).clone()
    for _ in range(20):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                x @ x
        assert torch.equal(step.attend(plan), expected)


def test_parts_that_are_not_waited_for_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    step = new_step([30_000])
    expected = step.attend(step.plan()).clone()
    monkeypatch.setattr(decode_parts, "wait_and_lower", lambda *arguments: None)
    forget()
    try:
        plan = dataclasses.replace(step).plan()
        assert not torch.equal(attended(step, plan, 255), expected)
    finally:
        forget()
