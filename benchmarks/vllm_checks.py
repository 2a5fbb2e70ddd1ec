"""What a run of vLLM with jaxpaged's attention must show beside one with vLLM's own."""

import dataclasses
from typing import Any

from vllm_environment import FAULT
from vllm_models import ENCODERS, NUM_PROMPTS

LARGEST_DIFFERENCE = 1e-5
"""Of embeddings, relative to the largest."""
SEVERAL_PROCESSES = "VLLM_ENABLE_V1_MULTIPROCESSING"

Run = dict[str, Any]
"""What `vllm_case.run` returns."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How models are run with jaxpaged's attention: in which environment, and with which arguments of `vllm.LLM`."""

    name: str
    variables: dict[str, str]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    workers: int = 1

    @property
    def is_control(self) -> bool:
        """Whether a fault is planted, which must be seen."""
        return FAULT in self.variables


def faults(way: Way, model: str, base: Run, ours: Run) -> list[str]:
    """A sentence for each thing that is wrong; none where all is as it must be."""
    found = _answers(way, model, base, ours)
    if any(worker["calls"] for worker in base["workers"]):
        found.append("jaxpaged was called where vLLM's own backend was asked for")
    if len(ours["workers"]) != way.workers:
        found.append(f"{len(ours['workers'])} workers, expected {way.workers}")
    for worker in ours["workers"]:
        found += _calls(way, model, ours, worker)
    if model not in ENCODERS and not (base["preemptions"] and ours["preemptions"]):
        found.append("nothing was preempted")
    return found


def equal(base: Run, ours: Run) -> int:
    """How many answers are the same, token for token."""
    return sum(a == b for a, b in zip(base["tokens"], ours["tokens"], strict=True))


def difference(base: Run, ours: Run) -> float:
    """Of embeddings, relative to the largest number in them."""
    flat = [[number for embedding in run["embeddings"] for number in embedding] for run in (base, ours)]
    return max(abs(a - b) for a, b in zip(*flat, strict=True)) / max(abs(a) for a in flat[0])


def _answers(way: Way, model: str, base: Run, ours: Run) -> list[str]:
    if model in ENCODERS:
        apart = difference(base, ours)
        return [f"embeddings are {apart:.1e} apart"] if apart > LARGEST_DIFFERENCE else []
    same = equal(base, ours)
    if way.is_control:
        return [f"{same} answers are the same in spite of the fault"] if same > NUM_PROMPTS // 2 else []
    return [f"only {same} of {NUM_PROMPTS} answers are the same"] if same < NUM_PROMPTS else []


def _calls(way: Way, model: str, ours: Run, worker: dict[str, Any]) -> list[str]:
    found = []
    calls = worker["calls"]
    if not calls or len(set(calls.values())) != 1:
        found.append(f"expected as many calls in each layer, got {calls}")
    if model not in ENCODERS and worker["writes"] != calls:
        found.append(f"expected as many writes as calls, got {worker['writes']} and {calls}")
    if (worker["pid"] == ours["pid"]) == (way.variables[SEVERAL_PROCESSES] == "1"):
        found.append(f"worker {worker['pid']} ran in the wrong process; the caller is {ours['pid']}")
    return found
