"""jaxpaged as the attention of Hugging Face transformers' continuous batching: `register()`, then `paged|jaxpaged`.

Importing this needs torch; `register` needs transformers. How it behaves: `docs/transformers.md`.
"""

import importlib.metadata
import warnings

from jaxpaged.backends.functional import flash_attn_varlen_func, flash_attn_with_kvcache
from jaxpaged.integrations.transformers_attention import NAME, attention_forward
from jaxpaged.integrations.transformers_decode_path import offer_block_tables

WRITTEN_FOR = (5, 17)
"""The release of transformers whose calls these are."""


def register() -> str:
    """Register `attention_forward` with transformers as `paged|jaxpaged`. It may be called again.

    Models then take it by `attn_implementation="paged|jaxpaged"`, or by `model.set_attn_implementation`, and continuous
    batching (`model.generate_batch`, `model.continuous_batching_context_manager`) runs on it.

    Returns:
      The name, `paged|jaxpaged`.

    Raises:
      ImportError: transformers is missing, or older than 5.17. A newer release than 5.17 gets a RuntimeWarning.
    """
    _check_version()
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
    offer_block_tables(NAME, (flash_attn_varlen_func, flash_attn_with_kvcache))
    return NAME


def _check_version() -> None:
    wanted = ".".join(map(str, WRITTEN_FOR))
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        hint = 'pip install "jaxpaged[transformers]"'
        raise ImportError(f"transformers: expected {wanted}, but it is not installed: {hint}") from None
    release = tuple(int(part) for part in version.split(".")[:2])
    if release < WRITTEN_FOR:
        raise ImportError(
            f"transformers: expected {wanted}, for which {NAME} was written, got {version}, whose continuous batching "
            'calls attention otherwise: pip install "jaxpaged[transformers]"'
        )
    if release > WRITTEN_FOR:
        warnings.warn(
            f"transformers: {NAME} was written for {wanted} and never tested with {version}; compare its tokens with "
            "those of paged|eager before you rely on them",
            RuntimeWarning,
            stacklevel=3,
        )
