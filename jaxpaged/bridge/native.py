"""Operators that launch without Python, where a C++ compiler is at hand.

PyTorch's dispatcher takes 1 µs to get to an operator in C++, and 2 more to hand its arguments to one in Python, which
then needs as long as a launch to look at them. So for tensors like those of an earlier call `launcher.cpp` launches
what that call did; whatever is new, and whatever is refused, is Python's. Launches on the same memory again are the
driver's alone, without Mosaic's launch function: `replays.h`. Called without PyTorch's dispatcher, as by `direct.py`,
they are spared what that makes of arguments: beside its launch a write takes 0.6 µs and not 2.4, decode 1.6 and not
5.1.
"""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from jaxpaged.bridge import torch_ops
from jaxpaged.bridge.decode_calls import decode_launches
from jaxpaged.bridge.launch import Launches
from jaxpaged.bridge.mosaic_abi import UnavailableError, unavailable
from jaxpaged.bridge.write_calls import forget_with_writers, write_launches

_SOURCE = Path(__file__).with_name("launcher.cpp")
_HEADER = Path(__file__).with_name("replays.h")
_LAUNCHES: dict[str, Callable[..., Launches | None]] = {"reshape_and_cache": write_launches, "decode": decode_launches}
_served: dict[str, Any] = {}


def launch_natively() -> None:
    """Serve `torch.ops.jaxpaged.reshape_and_cache` and `decode` on GPUs without Python from now on.

    To be called once, before the engine serves: the first time on a machine, and for each version of PyTorch, it
    compiles for half a minute. `jaxpaged.bridge.direct` and the engines' classes and functions follow: they call C++
    without PyTorch's dispatcher.

    Raises:
      UnavailableError: there is no CUDA, no C++17 compiler or no ninja, or kernels can't be launched on PyTorch's
        stream; nothing has changed.
    """
    reason = unavailable() if torch.cuda.is_available() else "PyTorch has no CUDA here"
    if reason is not None:
        raise UnavailableError(reason)
    module, addresses = launcher(), _device_functions()
    for name, launches in _LAUNCHES.items():
        if name not in _served:
            function = torch_ops.release_on_gpu(name)
            served = module.Served("jaxpaged", name, "CUDA", *addresses, function, launches)
            _served[name] = served
            torch_ops.serving[name] = served.call
            forget_with_writers(served.forget)


@functools.cache
def launcher() -> Any:
    """The compiled `launcher.cpp`.

    Raises:
      UnavailableError: it can't be compiled.
    """
    from torch.utils import cpp_extension

    missing = [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool, path=_tools()) is None]
    if missing:
        raise UnavailableError(f"{_SOURCE.name} can't be compiled: there is no {' and no '.join(missing)} here")
    version = re.sub(r"\W", "_", torch.__version__)
    # PyTorch looks for changes in the source alone, and by times, which an installed file may keep from its package.
    text = hashlib.sha256(_SOURCE.read_bytes() + _HEADER.read_bytes()).hexdigest()[:12]
    path = os.environ.get("PATH", "")
    os.environ["PATH"] = _tools()
    try:
        name = f"jaxpaged_launcher_{version}_{text}"
        return cpp_extension.load(name, [str(_SOURCE)], extra_cflags=["-O2"], extra_ldflags=["-ldl"])
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"{_SOURCE.name} can't be compiled: {error}") from error
    finally:
        os.environ["PATH"] = path


def _tools() -> str:
    """Where programs are looked for: also beside Python, where pip puts ninja, in an environment not activated too."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


def _device_functions() -> tuple[int, int]:
    """Addresses of the functions of PyTorch's stable C interface that tell the current device and its stream."""
    names = ("aoti_torch_get_current_device_index", "aoti_torch_get_current_cuda_stream")
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cuda.so"))
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    except (OSError, AttributeError) as error:
        raise UnavailableError(f"PyTorch's library lacks {' or '.join(names)}: {error}") from error
    device, stream = found
    assert device is not None and stream is not None
    return device, stream
