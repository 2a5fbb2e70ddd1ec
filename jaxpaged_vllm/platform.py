"""vLLM's platform for the CPU, with `attention_backend="CUSTOM"` honoured. Importing this needs vLLM."""

from typing import Any

from vllm.logger import init_logger
from vllm.platforms import builtin_platform_plugins
from vllm.utils.import_utils import resolve_obj_by_qualname

from jaxpaged_vllm.plugins import BACKEND

logger = init_logger(__name__)

# There are several such classes; this is the one that vLLM would choose for this machine.
_CpuPlatform: Any = resolve_obj_by_qualname(builtin_platform_plugins["cpu"]())


class JaxpagedCpuPlatform(_CpuPlatform):
    """vLLM's own platform for this CPU in all but one answer."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> str:
        """The path of the attention backend: jaxpaged's where CUSTOM was asked for and is jaxpaged's.

        Raises:
          ImportError: vLLM has another version than the backend was written for.
          ValueError: the backend can't do what a layer needs; the message says what.
        """
        if not _is_ours(selected_backend):
            path: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kwargs)
            return path
        backend = resolve_obj_by_qualname(BACKEND)
        reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(
                f"attention_backend='CUSTOM': jaxpaged can't run a layer of this model: {', '.join(reasons)} "
                f"({attn_selector_config})"
            )
        logger.info_once("Using jaxpaged's attention backend.")
        return BACKEND


def _is_ours(selected_backend: Any) -> bool:
    if selected_backend is None or selected_backend.name != "CUSTOM":
        return False
    return bool(selected_backend.is_overridden() and selected_backend.get_path() == BACKEND)
