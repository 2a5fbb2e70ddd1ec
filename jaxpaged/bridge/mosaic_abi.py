"""Kernels that Mosaic GPU compiles and launches without XLA, through functions of JAX's CUDA plugin: a private ABI.

Seen to work with jax 0.11.2 and 0.12.0, as in their `jax.experimental.mosaic.gpu.core._compile_as_torch_gpu_kernel`.
"""

import ctypes
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jaxlib

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
KNOWN_VERSIONS = ((0, 11), (0, 12))
"""Of jaxlib, and so of the plugin; the launch function took a stream and pointers alone until 0.11."""
SYMBOLS = ("MosaicGpuCompile", "MosaicGpuUnload")
_EARLY = b"mosaic_gpu.uses_pdl"

Launch = Callable[[ctypes.c_void_p, bytes], None]
"""Launches a kernel on a stream, given by its handle; the bytes are the addresses of its buffers, 64 bits each."""


class Kernel(NamedTuple):
    """A kernel that is loaded on a device.

    Attributes:
      launch: launches it.
      pointers: addresses of the launch function, of the kernel's function and of the kernel, which is 0 where the
        launch function takes none (jaxlib 0.11). That of 0.11 takes function, stream and buffers; that of 0.12 kernel,
        function, stream, buffers and the device's index.
      early: whether it may start before the kernel in front of it has ended (programmatic dependent launch).
    """

    launch: Launch
    pointers: tuple[int, int, int]
    early: bool


class UnavailableError(RuntimeError):
    """Kernels can't be compiled or launched without XLA here."""


@functools.cache
def unavailable() -> str | None:
    """Why kernels can't be compiled and launched here, or None."""
    try:
        _library()
    except UnavailableError as error:
        return str(error)
    return None


def compile_kernel(module: bytes) -> Kernel:
    """Compile a kernel for the device of the current CUDA context, and load it there for good.

    Args:
      module: from the backend config of a `mosaic_gpu_v2` custom call.

    Raises:
      UnavailableError: the plugin is missing or unknown, or can't compile the kernel.
    """
    # Imported for what it tells the compiler in the environment: where its runtime library and CUDA's tools are.
    importlib.import_module("jax.experimental.mosaic.gpu")
    compiled = _library().MosaicGpuCompile(module, len(module))
    if not compiled:
        raise UnavailableError("MosaicGpuCompile failed: is a CUDA device in use, and is it a Hopper GPU?")
    function, launch, kernel = compiled[0], compiled[1], compiled[2]
    if not function or not launch:
        raise UnavailableError("MosaicGpuCompile returned no function to launch")
    version = _version()
    pointers = (launch, function, 0 if version < (0, 12) else kernel)
    return Kernel(_launcher(version, function, launch, kernel), pointers, launched_early(module))


def launched_early(module: bytes) -> bool:
    """Whether Mosaic launches a kernel with programmatic dependent launch, which is a mark of its module."""
    return _EARLY in module


def _launcher(version: tuple[int, int], function: int, launch: int, kernel: int) -> Launch:
    """The launch function at an address, as one of a stream and pointers."""
    # Without `argtypes`, and with what stays the same converted once, ctypes takes two thirds of the time. Of its own
    # objects and of bytes it passes the pointer, of an int 32 bits.
    run: Any = ctypes.CFUNCTYPE(None)(launch)
    function_pointer, kernel_pointer = ctypes.c_void_p(function), ctypes.c_void_p(kernel)
    if version < (0, 12):
        return lambda stream, buffers: run(function_pointer, stream, buffers)
    ordinal = _current_device()
    return lambda stream, buffers: run(kernel_pointer, function_pointer, stream, buffers, ordinal)


def _version() -> tuple[int, int]:
    major, minor = jaxlib.__version__.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def _library() -> Any:
    if _version() not in KNOWN_VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in KNOWN_VERSIONS)
        raise UnavailableError(f"how kernels are launched is known for jaxlib {known}, not for {jaxlib.__version__}")
    for name in PLUGINS:
        try:
            plugin = importlib.import_module(name)
        except ImportError:
            continue
        try:
            library = ctypes.CDLL(str(plugin._get_library_path()))
            missing = [symbol for symbol in SYMBOLS if not hasattr(library, symbol)]
        except (AttributeError, OSError) as error:
            raise UnavailableError(f"the library of {name} can't be loaded: {error}") from error
        if missing:
            raise UnavailableError(f"the library of {name} lacks {', '.join(missing)}")
        library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
        library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
        return library
    raise UnavailableError("JAX's CUDA plugin is not installed: pip install 'jaxpaged[cuda13]' or 'jaxpaged[cuda12]'")


def _current_device() -> int:
    device = ctypes.c_int()
    error = cuda_driver().cuCtxGetDevice(ctypes.byref(device))
    if error:
        raise UnavailableError(f"CUDA has no current context (cuCtxGetDevice returned {error})")
    return device.value


@functools.cache
def cuda_driver() -> Any:
    """CUDA's driver library, whose functions return 0 where they succeed."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnavailableError(f"there is no CUDA driver: {error}") from error
