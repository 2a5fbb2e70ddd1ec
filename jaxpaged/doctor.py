"""What this machine can do with jaxpaged and, for what it can't, why and what to install."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
from typing import Literal

import jax

Level = Literal["ok", "missing", "warning"]
_JAX_RANGE = ((0, 11, 2), (0, 13))


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report; `fix` is empty when there is nothing to do."""

    item: str
    level: Level
    detail: str
    fix: str = ""


def examine() -> list[Finding]:
    """Look at this machine; everything found is tried, not only looked up."""
    return [_python(), _jax(), _devices(), _reference(), _gpu_kernels(), _torch(), _sharing(), _demo(), _memory()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} on {platform.machine()}")


def _jax() -> Finding:
    numbers = tuple(int(n) for n in jax.__version__.split(".")[:3] if n.isdigit())
    low, high = _JAX_RANGE
    if low <= numbers < high:
        return Finding("JAX", "ok", jax.__version__)
    return Finding("JAX", "warning", f"{jax.__version__} was never tested", 'pip install "jax>=0.11.2,<0.13"')


def _devices() -> Finding:
    devices = jax.devices()
    names = sorted({f"{d.platform} ({d.device_kind})" for d in devices})
    detail = f"{len(devices)}: {', '.join(names)}"
    if any(d.platform == "gpu" for d in devices):
        return Finding("JAX devices", "ok", detail)
    if _has_nvidia_driver():
        return Finding(
            "JAX devices", "missing", f"{detail}; the NVIDIA GPU is not used", 'pip install "jaxpaged[cuda13]"'
        )
    return Finding("JAX devices", "ok", f"{detail}; no GPU on this machine")


def _has_nvidia_driver() -> bool:
    return os.path.exists("/proc/driver/nvidia/version")


def _reference() -> Finding:
    import numpy as np

    from jaxpaged import KVCache, PagedBatch, paged_attention

    cache = KVCache.zeros(num_blocks=1, block_size=8, num_kv_heads=1, head_size=8, dtype="float32")
    out = paged_attention(np.ones((1, 1, 8), np.float32), cache, PagedBatch.create([[0]], [1]))
    if out.shape == (1, 1, 8) and not out.any():
        return Finding("paged attention, reference", "ok", f"runs on {next(iter(out.devices()))}")
    return Finding("paged attention, reference", "warning", "gives wrong values here", "run: jaxpaged verify")


def _gpu_kernels() -> Finding:
    return Finding(
        "paged attention, GPU kernels", "missing", "this version has none yet; JAX runs the reference on a GPU"
    )


def _torch() -> Finding:
    version = _version("torch")
    if version is None or importlib.util.find_spec("torch") is None:
        return Finding("PyTorch", "missing", "not installed; JAX needs none of it", 'pip install "jaxpaged[torch]"')
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no CUDA device"
    return Finding("PyTorch", "ok", f"{version}, {cuda}; jaxpaged.backends.functional works on CPU tensors")


def _sharing() -> Finding:
    item = "memory shared with PyTorch"
    if _version("torch") is None:
        return Finding(item, "missing", "needs PyTorch", 'pip install "jaxpaged[torch]"')
    import torch

    from jaxpaged.bridge.dlpack import to_jax, to_torch

    tensor = torch.arange(64, dtype=torch.float32)
    array = to_jax(tensor)
    if array.unsafe_buffer_pointer() == tensor.data_ptr() == to_torch(array).data_ptr():
        return Finding(item, "ok", "both ways, on the CPU, without a copy")
    return Finding(item, "warning", "a copy was made", "report it with the versions above")


def _demo() -> Finding:
    missing = [package for package in ("torch", "safetensors") if _version(package) is None]
    if missing:
        return Finding("demo", "missing", f"needs {' and '.join(missing)}", 'pip install "jaxpaged[demo]"')
    from jaxpaged.demo.model import load_demo_model

    parameters = sum(p.numel() for p in load_demo_model().parameters())
    return Finding("demo", "ok", f"weights load, {parameters:,} parameters; run: jaxpaged demo")


def _memory() -> Finding:
    item = "GPU memory beside PyTorch"
    if all(d.platform != "gpu" for d in jax.devices()):
        return Finding(item, "ok", "no GPU that JAX could reserve")
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0"):
        return Finding(item, "ok", "JAX takes what it needs, as it needs it")
    return Finding(
        item,
        "warning",
        "JAX reserves most of the GPU's memory when it starts, which starves an engine in the same process",
        "export XLA_PYTHON_CLIENT_PREALLOCATE=false",
    )
