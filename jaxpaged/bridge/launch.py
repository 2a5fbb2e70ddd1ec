"""Our kernels on PyTorch's own memory and stream: no XLA executable, no DLPack, no word from the GPU to the host.

A JAX function that consists of kernels alone (`kernel_functions.py`) is compiled once for each set of shapes, dtypes
and options and each device. Launching it takes a stream and addresses. So PyTorch's rules hold as for its own kernels:
work is ordered by the stream, a CUDA graph captures it, and memory may be freed right after the call.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import torch

from jaxpaged.bridge.kernel_calls import KernelCalls, kernel_calls
from jaxpaged.bridge.mosaic_abi import Kernel, UnavailableError, compile_kernel, cuda_driver, unavailable
from jaxpaged.bridge.process import OncePerThread, forget_after_fork, refuse_after_fork
from jaxpaged.pallas.tuned_file import packaged
from jaxpaged.pallas.tuning import Gpu

ALIGNMENT = 16
"""Bytes: where buffers that TMA reads and writes may begin."""
_WORKSPACE_ALIGNMENT = 256
_MOST_KNOWN = 64
"""Workspaces whose buffers' addresses are remembered: the layers of a step share one."""
_programs: dict[Any, "Program"] = {}
_lowered: dict[Any, KernelCalls] = {}
_compiling = threading.RLock()
_thread = OncePerThread()
_streams: dict[int, ctypes.c_void_p] = {}
_current_device: Callable[[], int] = torch._C._cuda_getDevice if hasattr(torch._C, "_cuda_getDevice") else lambda: -1
_stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


class BoundKernel(NamedTuple):
    """One of the launches of a `Bound`.

    Attributes:
      pointers: see `mosaic_abi.Kernel`.
      buffers: of each the place of an address and how many bytes behind it the buffer begins; the place is -1 for
        memory of the program's own, whose address takes the bytes' place.
      early: see `mosaic_abi.Kernel`.
    """

    pointers: tuple[int, int, int]
    buffers: tuple[tuple[int, int], ...]
    early: bool


class Bound(Protocol):
    """Launches a program on its device's current stream, given addresses; see `Program.bind`.

    Attributes:
      program: whose constants must live as long.
      kernels: what is launched, in order.
    """

    program: "Program"
    kernels: tuple[BoundKernel, ...]

    def __call__(self, addresses: tuple[int, ...], /) -> None: ...


class Launches(NamedTuple):
    """What a call of an operator launches on its arguments' memory, in words that need no Python; see `native.py`.

    Attributes:
      kernels: in order; places in them are those of the operator's arguments.
      device: index of the CUDA device.
      aligned: the arguments that must begin at a multiple of `alignment` bytes.
      alignment: bytes.
      apart: two arguments, and how many bytes behind the first the second must begin; or None.
    """

    kernels: tuple[BoundKernel, ...]
    device: int
    aligned: tuple[int, ...]
    alignment: int
    apart: tuple[int, int, int] | None


class Program:
    """The compiled kernels of a function, in order.

    Attributes:
      calls: what is launched.
      kernels: by which kernels.
      device: index of the CUDA device.
      offsets: of intermediate buffers in the workspace, by buffer.
      workspace_bytes: of memory for what one kernel leaves to the next.
      constants: tensors on the device, by buffer.
    """

    def __init__(self, calls: KernelCalls, kernels: Sequence[Kernel], device: int):
        self.calls, self.kernels, self.device = calls, tuple(kernels), device
        self.offsets, self.workspace_bytes = offsets_in_workspace(calls)
        self.constants = {buffer: torch.from_numpy(x).to(_device(device)) for buffer, x in calls.constants.items()}

    def bind(self, *arguments: int, workspace: int | None = None, results: Sequence[int] = ()) -> Bound:
        """A function that launches the program on the device's current stream, given a tuple of addresses.

        It may be called from many threads at once.

        Args:
          arguments: for each leaf of the function's arguments its place in the tuple.
          workspace: the place of the workspace, needed where there is one.
          results: the places of results that are no arguments.
        """
        calls = self.calls
        if len(arguments) != calls.num_inputs or len(results) != len(calls.results):
            raise ValueError(
                f"arguments, results: expected {calls.num_inputs} and {len(calls.results)} places, "
                f"got {len(arguments)} and {len(results)}"
            )
        if self.workspace_bytes and workspace is None:
            raise ValueError(f"workspace: expected the place of {self.workspace_bytes} bytes, got None")
        num_given = 1 + max(*arguments, *results, -1 if workspace is None else workspace)
        places = dict(enumerate(arguments)) | dict(zip(calls.results, results, strict=True))
        # The program's own addresses come after those given.
        places |= {b: num_given + i for i, b in enumerate((*self.offsets, *self.constants))}
        launch: Any = self._launcher(num_given, places, workspace)
        launch.program, launch.kernels = self, self._bound_kernels(places, workspace)
        bound: Bound = launch
        return bound

    def _bound_kernels(self, places: dict[int, int], workspace: int | None) -> tuple[BoundKernel, ...]:
        at = {buffer: (place, 0) for buffer, place in places.items()}
        at |= {buffer: (-1 if workspace is None else workspace, offset) for buffer, offset in self.offsets.items()}
        at |= {buffer: (-1, x.data_ptr()) for buffer, x in self.constants.items()}
        calls = zip(self.kernels, self.calls.calls, strict=True)
        return tuple(BoundKernel(k.pointers, tuple(at[b] for b in call.buffers), k.early) for k, call in calls)

    def _launcher(
        self, num_given: int, places: dict[int, int], workspace: int | None
    ) -> Callable[[tuple[int, ...]], None]:
        """See `bind`. A launch is microseconds: all that is known beforehand is computed here."""
        device, offsets = self.device, tuple(self.offsets.values())
        constants = tuple(x.data_ptr() for x in self.constants.values())
        num_own, known = len(offsets) + len(constants), dict[int, tuple[int, ...]]()
        buffers = [places[b] for call in self.calls.calls for b in call.buffers]
        pick, pack = _picker(buffers), struct.Struct(f"{len(buffers)}P").pack
        launches = [kernel.launch for kernel in self.kernels]
        steps = tuple(zip(launches, _parts([8 * len(c.buffers) for c in self.calls.calls]), strict=True))
        only = launches[0] if len(launches) == 1 else None

        def launch(addresses: tuple[int, ...]) -> None:
            if _current_device() != device:
                with torch.cuda.device(device):
                    return launch(addresses)
            if not _thread.prepared:
                _prepare_thread(device)
            handle = _stream_of(device)
            stream = _streams.get(handle)
            if stream is None:
                stream = _streams.setdefault(handle, ctypes.c_void_p(handle))
            if num_own:
                base = addresses[workspace] if offsets else 0  # type: ignore[index]
                own = known.get(base)
                if own is None:
                    if len(known) >= _MOST_KNOWN:
                        known.clear()
                    own = known[base] = (*[base + offset for offset in offsets], *constants)
                addresses = addresses[:num_given] + own
            packed = pack(*pick(addresses))
            if only is not None:
                only(stream, packed)
                return None
            for run, part in steps:
                run(stream, packed[part])

        return launch


def moved(kernels: Sequence[BoundKernel], places: Sequence[int], offsets: Sequence[int] = ()) -> list[BoundKernel]:
    """Kernels that find at `places[i]` what they found at place i, or `offsets[i]` bytes behind."""
    steps = dict(enumerate(offsets))
    return [
        k._replace(buffers=tuple((p, o) if p < 0 else (places[p], o + steps.get(p, 0)) for p, o in k.buffers))
        for k in kernels
    ]


def program(function: Callable[..., Any], *arguments: Any, device: int, **options: Any) -> Program:
    """The compiled program of a function of `kernel_functions.py`, made at the first call.

    Args:
      arguments: pytrees of `jax.ShapeDtypeStruct`.
      device: index of the CUDA device.
      options: hashable.

    Raises:
      GlueError: the function does something besides launching kernels.
      UnavailableError: kernels can't be compiled here.
      RuntimeError: in a child of a fork.
    """
    name = (*_name(function, arguments, options), device)
    found = _programs.get(name)
    if found is None:
        refuse_after_fork()
        with _compiling:
            found = _programs.get(name)
            if found is None:
                found = _programs[name] = _compiled(function, arguments, options, device)
    return found


def lowered_calls(function: Callable[..., Any], *arguments: Any, **options: Any) -> KernelCalls:
    """What the program of a function will launch; needs no GPU."""
    name = _name(function, arguments, options)
    if name not in _lowered:
        traced = jax.jit(lambda *arrays: function(*arrays, **options), keep_unused=True).trace(*arguments)
        _lowered[name] = kernel_calls(traced.lower(lowering_platforms=("cuda",)))
    return _lowered[name]


def offsets_in_workspace(calls: KernelCalls) -> tuple[dict[int, int], int]:
    """Where in a workspace the intermediate buffers lie, by buffer, and its size, in bytes."""
    offsets, end = {}, 0
    for buffer in calls.intermediates:
        offsets[buffer] = end
        end += -(-calls.sizes[buffer] // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
    return offsets, end


def _name(function: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> Any:
    leaves, tree = jax.tree.flatten(arguments)
    shapes = tuple((tuple(x.shape), jnp.dtype(x.dtype)) for x in leaves)
    return function, tree, shapes, tuple(sorted(options.items()))


def _compiled(function: Callable[..., Any], arguments: Any, options: dict[str, Any], device: int) -> Program:
    reason = unavailable()
    if reason is not None:
        raise UnavailableError(reason)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{function.__name__} was not compiled yet for these shapes, and can't be while a CUDA graph is captured: "
            f"call it once before, or warm it up"
        )
    calls = lowered_calls(function, *arguments, **options)
    with torch.cuda.device(device):
        _prepare_thread(device)
        return Program(calls, [compile_kernel(call.module) for call in calls.calls], device)


def _device(index: int) -> torch.device:
    """By the index that `get_device` gives, which is -1 on the CPU."""
    return torch.device("cpu") if index < 0 else torch.device("cuda", index)


def gpu(device: torch.device) -> Gpu:
    """What kernels for a device of PyTorch's are compiled for; the default GPU for the CPU."""
    if device.type != "cuda":
        return packaged().gpu(None)
    properties = torch.cuda.get_device_properties(device)
    return packaged().gpu(properties.name, properties.multi_processor_count)


def _picker(places: list[int]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    if len(places) == 1:
        (place,) = places
        return lambda addresses: (addresses[place],)
    return itemgetter(*places)


def _parts(sizes: Sequence[int]) -> list[slice]:
    """Of bytes that hold parts of these sizes one after the other."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _prepare_thread(device: int) -> None:
    """CUDA's runtime makes a context current in a thread with its first call there; kernels need that before."""
    driver = cuda_driver()
    context = ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) or not context:
        errors = [driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), driver.cuCtxSetCurrent(context)]
        if any(errors):
            raise RuntimeError(f"CUDA device {device}: its context can't be made current (errors {errors})")
    _thread.prepared = True


forget_after_fork(_programs.clear)
