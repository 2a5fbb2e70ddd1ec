"""Launches on the same memory go to the driver from the third on, as Mosaic gave them to it; needs no GPU."""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_driver import (
    BLOCK,
    CLUSTER,
    EARLY,
    FAILED,
    GLOBAL,
    GRID,
    LAYOUT,
    NAMES,
    RELAXED,
    SHARED,
    FakeDriver,
    Launch,
    function_of,
    parameters,
)
from test_launch import STREAM, Recorder, caches, decode_arguments, recorder
from test_native import NativeRecorder, Operators, at_one_time, launcher, write_arguments

from jaxpaged.bridge import launch, mosaic_abi, write_calls

assert launcher, recorder  # fixtures of the tests here
MOST = 4096
"""Launches that are remembered, as in `replays.h`."""
YES = (1, 0, 0)


class CapturedRecorder(NativeRecorder):
    """Kernels that can be captured by a driver of our own."""

    def __init__(self) -> None:
        super().__init__((0, 12))
        self.driver = FakeDriver()
        self.kernels_a_launch = 1

    def launched(self, number: int, stream: int, addresses: tuple[int, ...]) -> None:
        if stream in self.driver.captures:
            self.driver.captures[stream] += [(number, addresses)] * self.kernels_a_launch
        else:
            super().launched(number, stream, addresses)


class Replayed(Operators):
    """The operators, whose first call, which is Python's, has been made."""

    recorder: CapturedRecorder

    def __init__(self, launcher: Any, found: CapturedRecorder) -> None:
        super().__init__(launcher, found)
        self.driver = found.driver
        self.arguments = write_arguments()
        self.write(*self.arguments)
        ((self.number, self.addresses),), _ = self.launched()

    def kinds(self, calls: int, *arguments: Any) -> list[str]:
        """Who launches in each of so many writes, on the same memory without `arguments`."""
        found = []
        for _ in range(calls):
            self.write(*(arguments or self.arguments))
            mosaic, driver = len(self.launched()[1]), len(self.driver.launches)
            self.driver.launches.clear()
            found.append({(1, 0): "Mosaic", (0, 1): "driver"}[mosaic, driver])
        return found


@pytest.fixture
def operators(launcher: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replayed]:
    found = CapturedRecorder()
    monkeypatch.setattr(launch, "compile_kernel", found.compile)
    monkeypatch.setattr(write_calls, "_also_forgotten", [])
    monkeypatch.setattr(write_calls, "_sizes", {})
    launcher.use_driver(found.driver.addresses())
    made = Replayed(launcher, found)
    yield made
    made.close()
    launcher.use_driver(None)


def test_a_launch_on_the_same_memory_is_captured_once_and_then_the_drivers(operators: Replayed) -> None:
    driver = operators.driver
    operators.write(*operators.arguments)
    assert operators.launched() == ([], [(operators.number, operators.addresses)])
    assert (driver.num_captures, driver.launches) == (0, [])
    expected = Launch(
        STREAM, function_of(operators.number), GRID, BLOCK, SHARED,
        parameters(operators.number, operators.addresses), {EARLY: YES},
    )  # fmt: skip
    for calls in (1, 2, 3):
        operators.write(*operators.arguments)
        assert driver.launches == [expected] * calls
    assert operators.launched() == ([], [])
    assert (driver.num_captures, driver.streams, driver.graphs) == (1, [], {})
    assert driver.modes == [RELAXED, GLOBAL]
    assert operators.python_calls == 1


def test_a_decodes_kernels_are_replayed_each(operators: Replayed) -> None:
    arguments = decode_arguments()
    operators.launched()
    operators.decode(**arguments)
    by_python, _ = operators.launched()
    for _ in range(3):
        operators.decode(**arguments)
    assert operators.launched() == ([], by_python)
    twice = [(function_of(number), parameters(number, addresses)) for number, addresses in by_python * 2]
    assert [(x.function, x.parameters) for x in operators.driver.launches] == twice
    operators.decode(**{**arguments, **dict(zip(("key_cache", "value_cache"), caches(), strict=True))})
    _, by_cpp = operators.launched()
    assert len(by_cpp) == 1


def test_other_memory_is_mosaics(operators: Replayed) -> None:
    assert operators.kinds(3) == ["Mosaic", "driver", "driver"]
    others = [write_arguments() for _ in range(3)]
    for arguments in others:
        operators.write(*arguments)
    _, by_cpp = operators.launched()
    assert [addresses[:3] for _, addresses in by_cpp] == [(*[x.data_ptr() for x in (*a[:2], a[4])],) for a in others]
    assert operators.driver.launches == []
    assert operators.kinds(1) == ["driver"]
    assert operators.kinds(2, *others[0]) == ["driver", "driver"]


def test_each_of_two_memories_has_its_own_parameters(operators: Replayed) -> None:
    first, second = operators.arguments, write_arguments()
    for _ in range(3):
        operators.write(*first)
        operators.write(*second)
    operators.driver.launches.clear()
    for arguments in (first, second):
        operators.write(*arguments)
    got = [x.parameters[1][:8] for x in operators.driver.launches]
    assert got == [x[0].data_ptr().to_bytes(8, "little") for x in (first, second)]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("cluster", [(0, 0, 0), (2, 1, 1)])
def test_attributes_come_along(
    operators: Replayed, monkeypatch: pytest.MonkeyPatch, early: bool, cluster: tuple[int, int, int]
) -> None:
    if not early:
        monkeypatch.setattr(mosaic_abi, "_EARLY", b"no such mark")
    operators.driver.cluster = cluster
    arguments = write_arguments(16)  # other kernels than those that are compiled
    for _ in range(3):
        operators.write(*arguments)
    expected = ({CLUSTER: cluster} if cluster[0] else {}) | ({EARLY: YES} if early else {})
    assert [x.attributes for x in operators.driver.launches] == [expected]


def test_a_replay_goes_to_the_calls_own_stream(operators: Replayed) -> None:
    assert operators.kinds(2) == ["Mosaic", "driver"]
    operators.stream = STREAM + 1
    operators.write(*operators.arguments)
    assert [x.stream for x in operators.driver.launches] == [STREAM + 1]


@pytest.mark.parametrize("name", [name for name in NAMES if "Destroy" not in name and name != "cuLaunchKernelEx"])
def test_what_fails_while_capturing_leaves_the_launch_to_mosaic(operators: Replayed, name: str) -> None:
    driver = operators.driver
    driver.errors[name] = FAILED
    if name == "cuStreamEndCapture":
        driver.errors["cuStreamDestroy_v2"] = FAILED  # it is still being captured
    assert operators.kinds(4) == ["Mosaic"] * 4
    assert driver.num_captures <= 1
    driver.errors.clear()
    # What says nothing of the kernel is asked again.
    later = ["driver"] if name == "cuStreamIsCapturing" else ["Mosaic"]
    assert operators.kinds(1) == later
    operators.served["reshape_and_cache"].forget()
    operators.write(*operators.arguments)  # Python's
    operators.launched()
    assert operators.kinds(2) == ["Mosaic", "driver"]


UNEXPECTED: dict[str, Callable[[Replayed], None]] = {
    "two kernels": lambda x: setattr(x.recorder, "kernels_a_launch", 2),
    "no kernel": lambda x: setattr(x.recorder, "kernels_a_launch", 0),
    "no kernel's node": lambda x: setattr(x.driver, "node_kind", 1),
    "a cooperative launch": lambda x: setattr(x.driver, "cooperative", 1),
    "no parameters": lambda x: setattr(x.driver, "layout", ()),
    "a parameter of no size": lambda x: setattr(x.driver, "layout", (*LAYOUT[:2], (192, 0))),
    "parameters that overlap": lambda x: setattr(x.driver, "layout", (*LAYOUT[:2], (184, 8))),
    "more than a kernel takes": lambda x: setattr(x.driver, "layout", (*LAYOUT[:2], (32764, 8))),
}


@pytest.mark.parametrize("name", UNEXPECTED)
def test_what_is_not_expected_of_a_kernel_leaves_it_to_mosaic(operators: Replayed, name: str) -> None:
    UNEXPECTED[name](operators)
    assert operators.kinds(4) == ["Mosaic"] * 4
    driver = operators.driver
    assert (driver.num_captures, driver.streams, driver.graphs, driver.mode) == (1, [], {}, GLOBAL)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_function_all_is_mosaics(operators: Replayed, launcher: Any, name: str) -> None:
    found = operators.driver.addresses()
    del found[name]
    launcher.use_driver(found)
    assert operators.kinds(4) == ["Mosaic"] * 4
    assert operators.driver.modes == []


def test_a_captured_stream_is_replayed_on_but_nothing_is_captured_beside(operators: Replayed) -> None:
    driver = operators.driver
    driver.capturing = {STREAM}
    assert operators.kinds(4) == ["Mosaic"] * 4
    assert driver.num_captures == 0
    driver.capturing = set()
    assert operators.kinds(1) == ["driver"]
    driver.capturing = {STREAM}
    assert operators.kinds(1) == ["driver"]
    assert driver.num_captures == 1


def test_a_launch_that_fails_is_mosaics_from_then_on(operators: Replayed) -> None:
    assert operators.kinds(2) == ["Mosaic", "driver"]
    operators.driver.errors["cuLaunchKernelEx"] = FAILED
    assert operators.kinds(1) == ["Mosaic"]
    operators.driver.errors.clear()
    assert operators.kinds(2) == ["Mosaic", "Mosaic"]
    assert operators.kinds(2, *write_arguments()) == ["Mosaic", "driver"]


def test_forgotten_kernels_replays_are_too(operators: Replayed) -> None:
    assert operators.kinds(2) == ["Mosaic", "driver"]
    operators.served["reshape_and_cache"].forget()
    operators.write(*operators.arguments)
    assert operators.python_calls == 2
    operators.launched()
    assert operators.kinds(2) == ["Mosaic", "driver"]
    assert operators.driver.num_captures == 2


def test_no_more_than_so_many_replays_are_kept(operators: Replayed) -> None:
    """Each after its own capture; when there is no room, all are forgotten."""
    key, value, *others, slots, kind, _, _ = operators.arguments
    room = torch.zeros(MOST + 2, 8, dtype=slots.dtype)

    def kinds(calls: int, i: int) -> list[str]:
        return operators.kinds(calls, key, value, *others, room[i], kind, None, None)

    for i in range(MOST):
        assert kinds(2, i) == ["Mosaic", "driver"]
    assert kinds(1, 0) == kinds(1, MOST - 1) == ["driver"]
    assert kinds(2, MOST) == ["Mosaic", "driver"]
    assert kinds(1, MOST) == ["driver"]
    assert kinds(2, 0) == ["Mosaic", "driver"]
    assert operators.driver.num_captures == MOST + 2


def test_no_more_than_so_many_first_launches_are_remembered(operators: Replayed) -> None:
    """Addresses that don't come again take no replay's place."""
    key, value, *others, slots, kind, _, _ = operators.arguments
    room = torch.zeros(MOST + 1, 8, dtype=slots.dtype)
    assert operators.kinds(2) == ["Mosaic", "driver"]
    for i in range(MOST + 1):
        operators.write(key, value, *others, room[i], kind, None, None)
    assert len(operators.launched()[1]) == MOST + 1
    assert operators.kinds(1) == ["driver"]
    assert operators.kinds(2, key, value, *others, room[0], kind, None, None) == ["Mosaic", "driver"]
    assert operators.kinds(1, key, value, *others, room[MOST], kind, None, None) == ["driver"]


def test_threads_replay_at_one_time(operators: Replayed) -> None:
    calls = [write_arguments(n) for n in (8, 8, 16, 32)]
    made: list[int] = []

    def step(i: int, call: int) -> None:
        operators.write(*calls[call])
        made.append(calls[call][0].data_ptr())
        if i % 50 == 49:
            operators.served["reshape_and_cache"].forget()

    at_one_time(step)
    by_python, by_cpp = operators.launched()
    launches = operators.driver.launches
    assert len(launches) > 300
    by_mosaic = {(function_of(number), parameters(number, addresses)) for number, addresses in by_python + by_cpp}
    assert {(x.function, x.parameters) for x in launches} <= by_mosaic
    keys = [addresses[0] for _, addresses in by_python + by_cpp]
    keys += [int.from_bytes(x.parameters[1][:8], "little") for x in launches]
    assert Counter(keys) == Counter(made)


def test_the_driver_is_found_by_its_functions_names() -> None:
    """Those of a CUDA driver, where there is one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("there is no CUDA driver")
    assert [name for name in NAMES if not hasattr(library, name)] == []
