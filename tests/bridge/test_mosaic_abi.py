"""Kernels are compiled and launched as the installed JAX does it for PyTorch; needs neither a GPU nor PyTorch."""

import ctypes
import struct
import sys
import types
from collections.abc import Iterator
from typing import Any

import jaxlib
import pytest
from jax.experimental.mosaic.gpu import core

from jaxpaged.bridge import mosaic_abi

STREAM, DEVICE = 0x7F00_1234_5678, 3
POINTERS = (0x7E00_0000_0010, 0x7E00_0000_0020, 0x7E00_0000_0030)
MODULE = b"ML\xefR\0a module, with a zero in it"
NEW = tuple(map(int, jaxlib.__version__.split(".")[:2])) >= (0, 12)


class Plugin:
    """A stand-in for the CUDA plugin's library, which remembers what it is called with."""

    def __init__(self) -> None:
        self.compiled: list[bytes] = []
        self.launched: list[tuple[Any, ...]] = []
        kinds = [ctypes.c_void_p] * (4 if NEW else 3) + [ctypes.c_int] * NEW

        @ctypes.CFUNCTYPE(None, *kinds)
        def launch(*arguments: Any) -> None:
            place = 3 if NEW else 2
            pointers = (ctypes.c_uint64 * len(POINTERS)).from_address(arguments[place])
            self.launched.append((*arguments[:place], *pointers, *arguments[place + 1 :]))

        self.launch = launch
        address = ctypes.cast(launch, ctypes.c_void_p).value
        self.result = (ctypes.c_void_p * 3)(0x1111_2222_3333, address, 0x4444_5555_6666)

        class Compile:
            """Sets `argtypes` and `restype`, as functions of a library do."""

            def __call__(_, module: Any, length: Any) -> Any:
                self.compiled.append(ctypes.string_at(module, getattr(length, "value", length)))
                return ctypes.cast(self.result, ctypes.POINTER(ctypes.c_void_p))

        self.MosaicGpuCompile = Compile()
        self.MosaicGpuUnload = Compile()


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugin]:
    library = Plugin()
    module = types.ModuleType("jax_plugins.xla_cuda13")
    module._get_library_path = lambda: "/plugin.so"  # type: ignore[attr-defined]
    package = types.ModuleType("jax_plugins")
    package.xla_cuda13 = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax_plugins", package)
    monkeypatch.setitem(sys.modules, "jax_plugins.xla_cuda13", module)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *a: library if name == "/plugin.so" else load(name, *a))
    mosaic_abi._library.cache_clear()
    mosaic_abi.unavailable.cache_clear()
    monkeypatch.setattr(mosaic_abi, "_current_device", lambda: DEVICE)
    yield library
    mosaic_abi._library.cache_clear()
    mosaic_abi.unavailable.cache_clear()


def jax_launches(monkeypatch: pytest.MonkeyPatch, pointers: tuple[int, ...]) -> None:
    """Launch a kernel by JAX's own function, with a PyTorch that has one stream."""
    torch = types.ModuleType("torch")
    stream = types.SimpleNamespace(_as_parameter_=ctypes.c_void_p(STREAM))
    torch.cuda = types.SimpleNamespace(init=lambda: None, default_stream=lambda device: stream)  # type: ignore
    torch.device = lambda device: types.SimpleNamespace(index=DEVICE)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    launch, _ = core._compile_as_torch_gpu_kernel(MODULE)
    launch((ctypes.c_void_p * len(pointers))(*pointers), "cuda")


def test_a_launch_is_the_one_of_the_installed_jax(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails after an upgrade, compare `_compile_as_torch_gpu_kernel` of both versions."""
    assert mosaic_abi.unavailable() is None
    mosaic_abi.compile_kernel(MODULE).launch(ctypes.c_void_p(STREAM), struct.pack("3Q", *POINTERS))
    (ours,) = plugin.launched
    assert ours[-len(POINTERS) - NEW :][: len(POINTERS)] == POINTERS
    assert STREAM in ours
    jax_launches(monkeypatch, POINTERS)
    assert plugin.launched == [ours, ours]
    assert plugin.compiled == [MODULE, MODULE]


def test_a_kernel_that_is_launched_early_says_so(plugin: Plugin) -> None:
    modules = MODULE, MODULE + b"\0mosaic_gpu.uses_pdl\0"
    assert [mosaic_abi.compile_kernel(module).early for module in modules] == [False, True]


def test_a_launch_by_the_other_abi_would_be_noticed(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch function of either version gets from a launch of the other one."""
    seen: list[Any] = []
    kinds = [ctypes.c_void_p] * 3
    look = ctypes.CFUNCTYPE(None, *kinds)(lambda *arguments: seen.append(arguments))
    plugin.result[1] = ctypes.cast(look, ctypes.c_void_p).value
    function, kernel = plugin.result[0], plugin.result[2]
    for version, first in (((0, 11), (function, STREAM)), ((0, 12), (kernel, function, STREAM))):
        monkeypatch.setattr(mosaic_abi, "_version", lambda version=version: version)
        mosaic_abi.compile_kernel(MODULE).launch(ctypes.c_void_p(STREAM), struct.pack("3Q", *POINTERS))
        assert seen.pop()[: len(first)] == first


def test_a_failed_compilation_is_an_error(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "MosaicGpuCompile", lambda *_: None)
    with pytest.raises(mosaic_abi.UnavailableError, match="MosaicGpuCompile failed"):
        mosaic_abi.compile_kernel(MODULE)


def test_missing_symbols_are_named(plugin: Plugin) -> None:
    del plugin.MosaicGpuUnload
    assert "lacks MosaicGpuUnload" in str(mosaic_abi.unavailable())


def test_an_unknown_version_is_refused(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_abi, "_version", lambda: (0, 13))
    assert "known for jaxlib 0.11, 0.12" in str(mosaic_abi.unavailable())


def test_a_missing_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_abi, "PLUGINS", ("jax_plugins.no_such_plugin",))
    mosaic_abi._library.cache_clear()
    mosaic_abi.unavailable.cache_clear()
    try:
        assert "not installed" in str(mosaic_abi.unavailable())
    finally:
        mosaic_abi._library.cache_clear()
        mosaic_abi.unavailable.cache_clear()
