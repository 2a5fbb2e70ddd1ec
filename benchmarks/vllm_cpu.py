"""vLLM on the CPU with jaxpaged's attention, beside vLLM's own CPU_ATTN: the same answers for the same float32 weights.

python benchmarks/vllm_cpu.py DIRECTORY [--model NAME] [--write]

DIRECTORY is where vLLM's environment is, or is to be made. Any Python 3.12 starts this.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_checks import SEVERAL_PROCESSES, Run, Way, difference, equal, faults
from vllm_environment import FAULT, NO_CONTEXT, build, environment, versions
from vllm_models import ENCODERS, MAX_TOKENS, MODELS, NUM_PROMPTS

RESULT = Path(__file__).parent / "results" / "vllm_cpu.md"
TIMEOUT = 900
ONE, SEVERAL = {SEVERAL_PROCESSES: "0"}, {SEVERAL_PROCESSES: "1"}
OWN = Way("vLLM's own", ONE)
IN_PROCESS, SPAWNED = Way("in process", ONE), Way("worker process", SEVERAL)
CONTROL = Way("worker process that ignores the cache", SEVERAL | {FAULT: NO_CONTEXT})
WAYS = {name: [IN_PROCESS, SPAWNED, CONTROL] for name in MODELS} | {name: [IN_PROCESS, SPAWNED] for name in ENCODERS}
WAYS["llama"] += [
    Way("in process, torch.compile", ONE, {"enforce_eager": False}),
    Way("in process, heads outside of slots", ONE | {"VLLM_KV_CACHE_LAYOUT": "HND"}),
    Way("in process, blocks of 16", ONE, {"block_size": 16, "num_gpu_blocks_override": 48}),
    # vLLM wants a NUMA node for each worker unless it is told their cores.
    Way("tensor parallel", SEVERAL | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, {"tensor_parallel_size": 2}, workers=2),
]


def run(python: Path, models: Path, model: str, backend: str, way: Way) -> Run:
    """One run of vLLM."""
    case = {"models": str(models), "model": model, "backend": backend, "options": way.options}
    return _result(python, "vllm_case.py", json.dumps(case), **way.variables)


def _result(python: Path, script: str, *arguments: str, **variables: str) -> Run:
    """What a script writes, in a process of its own.

    Raises:
      RuntimeError: it failed; the message ends with what it said.
    """
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "result.json")
        done = subprocess.run(
            [python, Path(__file__).with_name(script), *arguments, result],
            env=environment(**variables), capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
        if done.returncode or not result.exists():
            raise RuntimeError(f"{script} failed: {arguments}, {variables}\n{(done.stdout + done.stderr)[-8000:]}")
        found: Run = json.loads(result.read_text(encoding="utf-8"))
    return found


def row(way: Way, model: str, base: Run, ours: Run) -> str:
    same = f"{difference(base, ours):.0e} apart" if model in ENCODERS else f"{equal(base, ours)} of {NUM_PROMPTS}"
    calls = " + ".join(f"{len(worker['calls'])} x {max(worker['calls'].values())}" for worker in ours["workers"])
    cells = [(MODELS | ENCODERS)[model], way.name, same, calls, ours["preemptions"], ours["prefix_hits"]]
    return f"| {' | '.join(map(str, [*cells, f'{base["seconds"]:.0f}, {ours["seconds"]:.0f}']))} |"


def page(rows: list[str], installed: dict[str, str]) -> str:
    """The result's page: these rows, and those that it has of other models."""
    order = list((MODELS | ENCODERS).values())
    models = {_model(line) for line in rows}
    before = RESULT.read_text(encoding="utf-8").splitlines() if RESULT.exists() else []
    rows = [line for line in before if _model(line) in order and _model(line) not in models] + rows
    lines = [
        "# vLLM on the CPU with jaxpaged's attention",
        "",
        f"- Date: {datetime.date.today().isoformat()}",
        f"- Machine: {_processor()}, {os.cpu_count()} cores",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in installed.items())}",
        "- Command: `python benchmarks/vllm_cpu.py .venv-vllm --write`; with `--model NAME` for one model.",
        f"- {NUM_PROMPTS} prompts, {MAX_TOKENS} greedy tokens each, float32; chunks of 48 tokens; 24 blocks of 32, "
        "fewer than all requests need, so some are preempted; prefix caching on. Models but the demo's are random "
        "and small.",
        "- Same answers: as vLLM's own CPU_ATTN gives, token for token; for an encoder, the largest difference of "
        "embeddings, relative. A worker that ignores the cache must give others.",
        "- Calls: layers x batches, counted in each worker; each wrote to the cache as often. CPU_ATTN's run made "
        "none.",
        "- Seconds: CPU_ATTN's, ours. The machine was shared, and ours hold compilation by JAX: these are no speeds.",
        "",
        "| model | run | same answers | calls | preemptions | tokens from prefixes | s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *sorted(rows, key=lambda line: order.index(_model(line))),
    ]
    return "\n".join(lines) + "\n"


def _model(line: str) -> str:
    """The first cell of a row."""
    return line.removeprefix("| ").partition(" | ")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="vLLM's environment")
    parser.add_argument("--model", choices=list(WAYS), help="this one alone")
    parser.add_argument("--write", action="store_true", help=f"write the table to {RESULT.name}")
    arguments = parser.parse_args()
    python = build(arguments.directory)
    rows: list[str] = []
    wrong: list[str] = []

    def note(line: str, found: list[str]) -> None:
        print(line, *found, sep="\n", flush=True)
        rows.append(line)
        wrong.extend(found)

    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory)
        script: list[Any] = [python, Path(__file__).with_name("vllm_models.py"), models]
        subprocess.run(script, env=environment(), check=True)
        for model in [arguments.model] if arguments.model else WAYS:
            base = run(python, models, model, "CPU_ATTN", OWN)
            for way in WAYS[model]:
                ours = run(python, models, model, "CUSTOM", way)
                note(row(way, model, base, ours), faults(way, model, base, ours))
            if model == "demo":
                same = equal(base, _result(python, "vllm_own_engine.py"))
                note(
                    f"| {MODELS[model]} | jaxpaged's own engine | {same} of {NUM_PROMPTS} | | | | |",
                    [] if same == NUM_PROMPTS else [f"jaxpaged's own engine gives {same} of {NUM_PROMPTS} answers"],
                )
    if wrong:
        sys.exit(f"{len(wrong)} faults")
    if arguments.write:
        RESULT.write_text(page(rows, versions(python)), encoding="utf-8")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
