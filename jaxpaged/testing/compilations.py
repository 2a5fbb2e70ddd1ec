"""How often XLA compiles something, and how long that takes."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compilations:
    """What was compiled since `compilations` was entered.

    Attributes:
      count: programs, those of single operations outside of `jit` included.
      seconds: in XLA and the kernels' compilers, without tracing and lowering.
    """

    count: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def compilations() -> Iterator[Compilations]:
    """Count the compilations within it.

    ```python
    with compilations() as compiled:
        step(cache, query, batch)
    print(compiled.count, compiled.seconds)
    ```
    """
    found = Compilations()

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == _EVENT:
            found.count += 1
            found.seconds += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
