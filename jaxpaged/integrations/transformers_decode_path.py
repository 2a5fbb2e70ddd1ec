"""transformers' decode path with block tables, for an attention function that isn't FlashAttention.

Continuous batching makes block tables, captures CUDA graphs without being asked, and leaves out the memory of masks,
only for implementations that it takes for FlashAttention, by their names. There is no public way to say that another
one can do the same. This replaces two functions in transformers' own modules; seen to work in 5.17.0.
"""

import functools
from collections.abc import Callable
from typing import Any

_QUESTION, _FUNCTIONS = "is_flash_attention_requested", "lazy_import_paged_flash_attention"


def offer_block_tables(name: str, functions: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    """Have continuous batching treat the implementation `name` as FlashAttention. It may be called again.

    Args:
      functions: `flash_attn_varlen_func` and `flash_attn_with_kvcache`; transformers looks whether the latter is there.

    Raises:
      ImportError: transformers has no such functions where they were.
    """
    from transformers.generation.continuous_batching import cache, initialization

    for module, attribute in ((initialization, _QUESTION), (initialization, _FUNCTIONS), (cache, _QUESTION)):
        if not callable(getattr(module, attribute, None)):
            raise ImportError(
                f"transformers: {module.__name__} has no {attribute}, by which {name} gets block tables; "
                "expected transformers 5.17"
            )
    for module in (initialization, cache):
        setattr(module, _QUESTION, _also_for(name, getattr(module, _QUESTION)))
    setattr(initialization, _FUNCTIONS, _instead_for(name, functions, getattr(initialization, _FUNCTIONS)))


def _also_for(name: str, original: Any) -> Any:
    if getattr(original, "jaxpaged", None) == name:
        return original

    @functools.wraps(original)
    def requested(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        return getattr(config, "_attn_implementation", None) == name or original(config, *args, **kwargs)

    requested.jaxpaged = name  # type: ignore[attr-defined]
    return requested


def _instead_for(name: str, functions: Any, original: Any) -> Any:
    if getattr(original, "jaxpaged", None) == name:
        return original

    @functools.wraps(original)
    def imported(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return functions if implementation == name else original(implementation, *args, **kwargs)

    imported.jaxpaged = name  # type: ignore[attr-defined]
    return imported
