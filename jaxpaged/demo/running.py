"""The demo's engines, by name, with what is shown and checked of each."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

from jaxpaged.demo.scheduler import Request, Scheduler, StepResult


class RunningEngine(Protocol):
    """What the demo needs of an engine."""

    @property
    def scheduler(self) -> Scheduler: ...

    def add(self, request: Request) -> None: ...

    def run(self) -> Iterator[StepResult]: ...


@dataclasses.dataclass(frozen=True)
class Running:
    """An engine, and what is known about it.

    Attributes:
      dense_choices: what dense attention would have generated in the place of a finished request's tokens.
      memory_report: of each kind of memory its name, who uses it, and whether it was never copied.
    """

    engine: RunningEngine
    framework: str
    num_parameters: int
    dense_choices: Callable[[Request], list[int]]
    memory_report: Callable[[], list[tuple[str, str, bool]]]


def run_torch(**sizes: int) -> Running:
    from jaxpaged.demo.engine import Engine, dense_choices, memory_report
    from jaxpaged.demo.model import load_demo_model

    model = load_demo_model()
    engine = Engine(model, **sizes)
    addresses = [cache.data_ptr() for cache in engine.kv_caches]
    return Running(
        engine,
        "PyTorch",
        sum(p.numel() for p in model.parameters()),
        lambda request: dense_choices(model, request),
        lambda: memory_report(engine, addresses),
    )


def run_jax(**sizes: int) -> Running:
    import jax

    from jaxpaged.demo.jax_engine import Engine, dense_choices
    from jaxpaged.demo.jax_model import load_jax_model

    config, params = load_jax_model()
    engine = Engine(config, params, **sizes)

    def addresses() -> list[int]:
        return [buffer.unsafe_buffer_pointer() for buffer in jax.tree.leaves(engine.cache)]

    before = addresses()
    return Running(
        engine,
        "JAX",
        sum(x.size for x in jax.tree.leaves(params)),
        lambda request: dense_choices(config, params, request),
        lambda: [("KV cache of all layers", "donated, every step writes the same memory", addresses() == before)],
    )


RUNNING = {"torch": run_torch, "jax": run_jax}
