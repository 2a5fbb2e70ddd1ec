"""The entry points of the groups `vllm.general_plugins` and `vllm.platform_plugins`.

An exception in either would end or change the vLLM of people who never asked for this backend, so a vLLM in which they
find nothing of what they know is left alone.
"""

import logging
from importlib.metadata import entry_points

BACKEND = "jaxpaged.integrations.vllm.backend.JaxpagedBackend"
PLATFORM = "jaxpaged_vllm.platform.JaxpagedCpuPlatform"
PLATFORM_GROUP = "vllm.platform_plugins"
_THIS = "jaxpaged_vllm.plugins:platform"

logger = logging.getLogger(__name__)


def register() -> None:
    """Make jaxpaged's backend vLLM's CUSTOM, unless another one is registered as that already."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
        if custom.is_overridden():
            if custom.get_path() != BACKEND:
                logger.warning(
                    "jaxpaged is not attention_backend='CUSTOM' here: %s is registered as that", custom.get_path()
                )
            return
        register_backend(custom, BACKEND)
    except (ImportError, AttributeError) as error:
        logger.info("jaxpaged knows no way to register an attention backend with this vLLM: %s", error)


def platform() -> str | None:
    """The path of the platform class to use, or None to leave the choice to vLLM.

    vLLM's own class for the CPU ignores CUSTOM, so where vLLM would choose that one, the choice is a subclass of it.
    """
    try:
        from vllm import envs, platforms

        builtin = [name for name, detect in platforms.builtin_platform_plugins.items() if _detects(detect)]
        if builtin != ["cpu"]:
            return None
        # vLLM refuses two plugins' platforms at once, and somebody else's is not to be ousted.
        others = [point for point in entry_points(group=PLATFORM_GROUP) if point.value != _THIS]
        allowed = [point for point in others if envs.VLLM_PLUGINS is None or point.name in envs.VLLM_PLUGINS]
        if any(_detects(lambda point=point: point.load()()) for point in allowed):
            return None
    except (ImportError, AttributeError) as error:
        logger.info("jaxpaged finds no platforms that it knows in this vLLM: %s", error)
        return None
    return PLATFORM


def _detects(detect: object) -> bool:
    """Whether a platform's plugin finds its platform; one that fails doesn't, as vLLM sees it."""
    try:
        return callable(detect) and detect() is not None
    except Exception:
        return False
