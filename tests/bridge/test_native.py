"""Operators in C++: the first call of its kind is Python's, the next launch the same; kernels are recorded, not run."""

import copy
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_launch import (
    BAD_DECODES,
    BAD_WRITES,
    FLOAT8,
    ROW_SCALES,
    STREAM,
    Recorder,
    address,
    caches,
    decode_arguments,
    recorder,
    rows,
)
from torch.utils import cpp_extension

from jaxpaged.bridge import direct, launch, native, torch_ops, write_calls
from jaxpaged.bridge.decode_calls import by_column, decode_launches, decode_on_gpu
from jaxpaged.bridge.mosaic_abi import Kernel, UnavailableError, launched_early
from jaxpaged.bridge.write_calls import warm_up_writes, write_launches, write_on_gpu

assert recorder  # a fixture of the tests here
NAMESPACE = "jaxpaged_native_test"
ON_GPU = {"reshape_and_cache": (write_on_gpu, write_launches), "decode": (decode_on_gpu, decode_launches)}


@pytest.fixture(scope="module")
def launcher() -> Any:
    try:
        return native.launcher()
    except UnavailableError as error:
        if "there is no" in str(error):
            pytest.skip(str(error))
        raise


class NativeRecorder(Recorder):
    """Kernels whose launch functions have addresses, too."""

    def __init__(self, abi: tuple[int, int]) -> None:
        super().__init__()
        self.native: list[tuple[int, tuple[int, ...]]] = []
        self._abi = abi
        self._num_buffers: dict[int, int] = {}
        self._kept: list[Any] = []

    def compile(self, module: bytes) -> Kernel:
        run = super().compile(module).launch
        number = len(self.modules) - 1

        def launch(stream: Any, pointers: bytes) -> None:
            self._num_buffers[number] = len(pointers) // 8
            run(stream, pointers)

        def got(function: int, stream: int, buffers: Any) -> None:
            assert function == 100 + number
            self.launched(number, stream, tuple(buffers[: self._num_buffers[number]]))

        def got_by_new_abi(kernel: int, function: int, stream: int, buffers: Any, device: int) -> None:
            assert (kernel, device) == (200 + number, -1)
            got(function, stream, buffers)

        words, pointer = ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p
        if self._abi < (0, 12):
            function: Any = ctypes.CFUNCTYPE(None, pointer, pointer, words)(got)
        else:
            function = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, words, ctypes.c_int32)(got_by_new_abi)
        self._kept.append(function)
        kernel = 0 if self._abi < (0, 12) else 200 + number
        pointers = (ctypes.cast(function, ctypes.c_void_p).value or 0, 100 + number, kernel)
        return Kernel(launch, pointers, launched_early(module))

    def launched(self, number: int, stream: int, addresses: tuple[int, ...]) -> None:
        """What a launch function does."""
        assert stream == STREAM
        self.native.append((number, addresses))


class Operators:
    """The operators as C++ serves them, on tensors of the CPU, and how often Python was called."""

    def __init__(self, launcher: Any, found: NativeRecorder) -> None:
        self.recorder, self.python_calls, self.device, self.stream = found, 0, -1, STREAM
        self._current = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(ctypes.c_int32))(self._tell_device)
        self._stream = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))(
            self._tell_stream
        )
        self._library = torch.library.Library(NAMESPACE, "DEF")
        self.served: dict[str, Any] = {}
        addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in (self._current, self._stream)]
        for name, (function, launches) in ON_GPU.items():
            self._library.define(name + torch_ops._SCHEMAS[name])
            arguments = (NAMESPACE, name, "CPU", *addresses, self._counted(function), launches)
            self.served[name] = launcher.Served(*arguments)
        self.write = getattr(torch.ops, NAMESPACE).reshape_and_cache
        self.decode = getattr(torch.ops, NAMESPACE).decode

    def without_the_dispatcher(self) -> "Operators":
        """The same, called as `direct.py` does."""
        names = [argument.name for argument in self.decode.default._schema.arguments]

        def decode(**given: Any) -> None:
            last = max(names.index(name) for name in given)
            self.served["decode"].call(*(given.get(name) for name in names[: last + 1]))

        found = copy.copy(self)
        found.write, found.decode = self.served["reshape_and_cache"].call, decode
        return found

    def _counted(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            self.python_calls += 1
            function(*arguments)

        return call

    def _tell_device(self, device: Any) -> int:
        device[0] = self.device
        return 0

    def _tell_stream(self, device: int, stream: Any) -> int:
        stream[0] = self.stream
        return 0

    def launched(self) -> tuple[list[Any], list[Any]]:
        """What Python launched, and C++, since the last time."""
        found = self.recorder.launches[:], self.recorder.native[:]
        self.recorder.launches.clear()
        self.recorder.native.clear()
        return found

    def close(self) -> None:
        self.served.clear()
        self._library._destroy()


@pytest.fixture
def operators(request: Any, launcher: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    found = NativeRecorder(getattr(request, "param", (0, 12)))
    monkeypatch.setattr(launch, "compile_kernel", found.compile)
    monkeypatch.setattr(write_calls, "_also_forgotten", [])
    monkeypatch.setattr(write_calls, "_sizes", {})
    launcher.use_driver({})  # no kernel here is one that CUDA could launch
    made = Operators(launcher, found)
    yield made
    made.close()
    launcher.use_driver(None)


def write_arguments(n: int = 8, layout: str = "NHD") -> tuple[Any, ...]:
    return rows(n), rows(n), *caches(layout), torch.arange(n), "auto", None, None


WRITES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "plain": write_arguments,
    "one buffer": lambda: write_arguments(layout="N2HD"),
    "two runs of tokens": lambda: write_arguments(23),
    "no tokens": lambda: write_arguments(0),
    "a tensor twice": lambda: (write_arguments()[0],) * 2 + write_arguments()[2:],
    "scales": lambda: (*write_arguments()[:2], *FLOAT8, torch.arange(8), "fp8", torch.ones(2), torch.ones(2)),
    "a scale": lambda: (*write_arguments()[:2], *FLOAT8, torch.arange(8), "fp8", None, torch.ones(2)),
    "scales that are not read": lambda: (*write_arguments()[:6], torch.ones(2), torch.ones(2)),
    "scales that are written": lambda: (
        *write_arguments()[:2], *(x.view(torch.int8) for x in FLOAT8), torch.arange(8), "int8", *ROW_SCALES.values()
    ),
}  # fmt: skip


DOORS: dict[str, Callable[[Operators], Operators]] = {
    "dispatcher": lambda operators: operators,
    "direct": Operators.without_the_dispatcher,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("operators", [(0, 11), (0, 12)], ids=["jax 0.11", "jax 0.12"], indirect=True)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_like_an_earlier_one_is_launched_without_python(operators: Operators, name: str, door: str) -> None:
    made, operators = operators, DOORS[door](operators)
    first, second = WRITES[name](), WRITES[name]()
    operators.write(*first)
    by_python, by_cpp = operators.launched()
    assert by_cpp == []
    operators.write(*first)
    assert operators.launched() == ([], by_python)
    write_on_gpu(*second)
    by_python, _ = operators.launched()
    operators.write(*second)
    assert operators.launched() == ([], by_python)
    assert made.python_calls == 1


DECODES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": decode_arguments,
    "one buffer": lambda: decode_arguments(caches("N2HD")),
    "several new tokens": lambda: decode_arguments(max_query_len=3),
    "sinks": lambda: decode_arguments() | {"sinks": by_column(torch.zeros(8), num_kv_heads=2, max_query_len=1)},
    "slopes": lambda: decode_arguments() | {"slopes": by_column(torch.zeros(3, 8), num_kv_heads=2, max_query_len=1)},
    "scales": lambda: decode_arguments(FLOAT8, k_scale=torch.ones(2), v_scale=torch.ones(2)),
    "lse": lambda: decode_arguments() | {"lse": torch.zeros(3, 8)},
    "all": lambda: (
        decode_arguments(FLOAT8, v_scale=torch.ones(1))
        | {"lse": torch.zeros(3, 8), "sinks": by_column(torch.zeros(8), num_kv_heads=2, max_query_len=1)}
    ),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", DECODES)
def test_a_decode_like_an_earlier_one_is_launched_without_python(operators: Operators, name: str, door: str) -> None:
    made, operators = operators, DOORS[door](operators)
    first, second = DECODES[name](), DECODES[name]()
    operators.launched()
    operators.decode(**first)
    by_python, by_cpp = operators.launched()
    assert len(by_python) == 1
    assert by_cpp == []
    operators.decode(**first)
    assert operators.launched() == ([], by_python)
    decode_on_gpu(**second)
    by_python, _ = operators.launched()
    operators.decode(**second)
    assert operators.launched() == ([], by_python)
    assert made.python_calls == 1


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", [name for name in BAD_WRITES if "device" not in name])
def test_what_does_not_fit_is_refused_after_a_call_too(operators: Operators, name: str, door: str) -> None:
    operators = DOORS[door](operators)
    error, words, given = BAD_WRITES[name]
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale")
    arguments = dict(zip(names, write_arguments(), strict=True))
    for _ in range(2):
        operators.write(*arguments.values())
    operators.launched()
    with pytest.raises(error, match=words):
        operators.write(*{**arguments, **given}.values())
    assert operators.launched() == ([], [])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", [name for name in BAD_DECODES if "device" not in name])
def test_what_does_not_fit_decode_is_refused_after_a_call_too(operators: Operators, name: str, door: str) -> None:
    operators = DOORS[door](operators)
    error, words, given = BAD_DECODES[name]
    arguments = decode_arguments()
    for _ in range(2):
        operators.decode(**arguments)
    operators.launched()
    with pytest.raises(error, match=words):
        operators.decode(**{**arguments, **given})
    assert operators.launched() == ([], [])


def test_values_in_another_buffer_are_refused(operators: Operators) -> None:
    key, value, k_cache, v_cache, *others = write_arguments(layout="N2HD")
    for _ in range(2):
        operators.write(key, value, k_cache, v_cache, *others)
    operators.launched()
    with pytest.raises(ValueError, match="value_cache: expected to begin 4096 bytes after key_cache"):
        operators.write(key, value, k_cache, caches("N2HD")[1], *others)
    assert operators.launched() == ([], [])


def test_whatever_kernels_are_compiled_for_makes_a_difference(operators: Operators) -> None:
    """Were one of these taken for the first call, it would go to kernels for other numbers."""
    arguments = decode_arguments()
    operators.decode(**arguments)
    other_scores = ("scale", 0.5), ("causal", False), ("window_left", 7), ("soft_cap", 3.0), ("batch_invariant", True)
    for calls, (name, value) in enumerate(other_scores, 2):
        changed = arguments | {name: value}
        if name == "batch_invariant":  # its plan is another one, which is refused before anything is launched
            with pytest.raises(ValueError, match="expected a plan"):
                operators.decode(**changed)
        else:
            operators.decode(**changed)
        assert operators.python_calls == calls
    more = torch.zeros(3, 12, dtype=torch.int32)
    operators.decode(**{**arguments, "block_table": more[:, :6]})
    assert operators.python_calls == 7


def test_rows_that_are_copied_stay_with_python(operators: Operators) -> None:
    qkv = rows(8, 12)
    arguments = (qkv[:, 8:10], qkv[:, 10:], *write_arguments()[2:])
    for calls in (1, 2, 3):
        operators.write(*arguments)
        assert operators.python_calls == calls
    assert operators.launched()[1] == []


def test_a_warm_up_finds_better_launches(operators: Operators) -> None:
    arguments = write_arguments(23)
    write_calls.forget_with_writers(operators.served["reshape_and_cache"].forget)
    for _ in range(2):
        operators.write(*arguments)
    assert len(operators.launched()[1]) == 2
    warm_up_writes([23], *arguments)
    for _ in range(2):
        operators.write(*arguments)
    assert [len(x) for x in operators.launched()] == [1, 1]


def test_the_first_call_of_a_thread_is_pythons(operators: Operators) -> None:
    """It makes the context of the device current there."""
    arguments = write_arguments()
    operators.write(*arguments)
    counts = []

    def call() -> None:
        for _ in range(2):
            operators.write(*arguments)
            counts.append(operators.python_calls)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert counts == [2, 2]


def test_another_current_device_is_left_to_python(operators: Operators) -> None:
    arguments = write_arguments()
    operators.write(*arguments)
    operators.device = 1
    operators.write(*arguments)
    assert operators.python_calls == 2


def at_one_time(step: Callable[[int, int], None]) -> None:
    """Take 200 steps in each of three threads, a step being given its number and one of its call."""
    errors: list[Exception] = []

    def run(seed: int) -> None:
        try:
            for i in range(200):
                step(i, (i * seed + i // 7) % 4)
        except Exception as error:  # shown below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []


def test_threads_launch_at_one_time(operators: Operators) -> None:
    calls = [write_arguments(n) for n in (8, 16, 32, 64)]

    def step(i: int, call: int) -> None:
        operators.write(*calls[call])
        if i % 50 == 0:
            operators.served["reshape_and_cache"].forget()

    at_one_time(step)
    by_python, by_cpp = operators.launched()
    assert len(by_python) + len(by_cpp) == 600
    starts = {address(*arguments[:2]): arguments for arguments in calls}
    assert all(got[:2] in starts and got[2] == starts[got[:2]][4].data_ptr() for _, got in by_python + by_cpp)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_of_a_fork_is_turned_away(operators: Operators) -> None:
    arguments = write_arguments()
    for _ in range(2):
        operators.write(*arguments)
    child = os.fork()
    if child == 0:
        try:
            operators.write(*arguments)
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) and not operators.recorder.native[1:] else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_without_cuda_nothing_changes() -> None:
    before = dict(torch_ops.serving)
    with pytest.raises(UnavailableError, match="no CUDA"):
        native.launch_natively()
    assert torch_ops.serving == before


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_tools", lambda: "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UnavailableError, match=r"there is no c\+\+ and no ninja here"):
        native.launcher.__wrapped__()


@pytest.mark.usefixtures("launcher")
def test_a_source_that_does_not_compile_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("#error no\n", encoding="utf-8")
    monkeypatch.setattr(native, "_SOURCE", broken)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"broken\.cpp can't be compiled"):
        native.launcher.__wrapped__()


@pytest.mark.usefixtures("launcher")  # so a compiler is there
def test_a_change_in_either_file_makes_another_extension(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Whatever their times are."""
    names: list[str] = []
    monkeypatch.setattr(cpp_extension, "load", lambda name, sources, **how: names.append(name))
    native.launcher.__wrapped__()
    native.launcher.__wrapped__()
    for file in ("_SOURCE", "_HEADER"):
        changed = tmp_path / "changed"
        changed.write_bytes(getattr(native, file).read_bytes() + b"\n")
        with monkeypatch.context() as patch:
            patch.setattr(native, file, changed)
            native.launcher.__wrapped__()
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_direct_functions_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setitem(torch_ops.serving, "reshape_and_cache", lambda *arguments: called.append(arguments))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    arguments = write_arguments()
    direct.reshape_and_cache(*arguments)
    assert called == [arguments]


def test_both_doors_share_what_was_found(operators: Operators) -> None:
    """Numbers and tensors are told apart alike, and what is left out at the end is None."""
    arguments, direct_doors = decode_arguments(), operators.without_the_dispatcher()
    operators.launched()
    operators.decode(**arguments)
    by_python, _ = operators.launched()
    direct_doors.decode(**arguments)
    assert operators.launched() == ([], by_python)
    assert operators.python_calls == 1


@pytest.mark.parametrize("wrong", [(), (1, 2), ({},) * 8, (None,) * 9])
def test_what_is_no_call_is_pythons_to_refuse(operators: Operators, wrong: Any) -> None:
    for _ in range(2):
        with pytest.raises((TypeError, AttributeError, ValueError)):
            operators.served["reshape_and_cache"].call(*wrong)
    assert operators.launched() == ([], [])


def test_a_function_outlives_what_made_it(operators: Operators) -> None:
    arguments, call = write_arguments(), operators.served["reshape_and_cache"].call
    call(*arguments)
    operators.served.clear()
    call(*arguments)
    assert [len(launches) for launches in operators.launched()] == [1, 1]
