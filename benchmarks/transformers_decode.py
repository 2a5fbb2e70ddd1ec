"""Decode with transformers' continuous batching: tokens per second on jaxpaged and on transformers' own attention.

python benchmarks/transformers_decode.py [--write]

The model has the shape of a Llama 3 8B, or on the CPU a small one, and random weights. FlashAttention 2 is measured
where the package flash-attn is installed.
"""

import dataclasses
import datetime
import gc
import platform
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from forced_logits import forced_logits, relative_error
from harness import versions
from pages import command_of, grid
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

OURS = "paged|jaxpaged"
PEER = "paged|sdpa"
RESULTS = Path(__file__).parent / "results"
TOLERANCE = 1.5
"""How much larger our error may be than that of transformers' attention, in bfloat16, from float32."""

_LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
}
_SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_HEADINGS = ("requests", "prompt", "implementation", "tokens/s", "ms a step", f"over {PEER}", "logits: error", "")


@dataclasses.dataclass(frozen=True)
class Way:
    """An implementation, with CUDA graphs or without; with them transformers also prepares steps in advance."""

    implementation: str
    graphs: bool

    @property
    def name(self) -> str:
        return f"{self.implementation}{', CUDA graphs' if self.graphs else ''}"


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found; `reason` says why there is no rate.

    Attributes:
      rate: tokens per second while every request decoded.
    """

    requests: int
    prompt: int
    name: str
    rate: float | None
    error: float | None
    reason: str = ""


def decode_rate(timestamps: Sequence[Sequence[float]]) -> float:
    """Tokens per second between the last request's first token and the first request's last.

    Args:
      timestamps: for each request the seconds at which it got each token, rising.

    Raises:
      ValueError: the requests never decoded all at once.
    """
    begin, end = max(t[0] for t in timestamps), min(t[-1] for t in timestamps)
    if begin >= end:
        raise ValueError("timestamps: expected requests that decode at the same time; generate more tokens")
    return sum(begin < t <= end for request in timestamps for t in request) / (end - begin)


def main(
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto for the GPU where there is one.")] = "auto",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 16,
    requests: Annotated[str, typer.Option(help="Numbers of requests at once.")] = "16,64",
    prompts: Annotated[str, typer.Option(help="Lengths of their prompts.")] = "1024,4096",
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each.")] = 64,
    block_size: Annotated[int, typer.Option(min=4, help="Tokens a block.")] = 256,
    write: Annotated[bool, typer.Option("--write", help="Write the table to benchmarks/results.")] = False,
) -> None:
    """Measure, print the table, and leave with 1 where our logits are off or ours can't run."""
    from jaxpaged.integrations.transformers import register

    register()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(device, layers)
    errors = _logits_errors(device)
    rows = []
    for num_requests in map(int, requests.split(",")):
        for prompt in map(int, prompts.split(",")):
            for way in _ways(device):
                rows.append(_measure(model, way, num_requests, prompt, new_tokens, block_size, errors))
                print(rows[-1], file=sys.stderr, flush=True)
    cells = _cells(rows)
    _show(cells)
    if write:
        _write(cells, device, layers, block_size)
    ours, peer = errors[OURS], errors[PEER]
    if any(row.rate is None for row in rows if row.name.startswith(OURS)) or not ours <= TOLERANCE * peer:
        print(f"logits are off by {ours:.2e}, those of {PEER} by {peer:.2e}", file=sys.stderr)
        raise typer.Exit(1)


def _ways(device: str) -> list[Way]:
    from transformers.utils import is_flash_attn_2_available

    graphs = [False, True] if device == "cuda" else [False]
    ways = [Way(PEER, False), *(Way(OURS, g) for g in graphs)]
    if is_flash_attn_2_available():
        ways += [Way("paged|flash_attention_2", g) for g in graphs]
    return ways


def _model(device: str, layers: int, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = (_LLAMA_8B if device == "cuda" else _SMALL) | changes
    config = LlamaConfig(
        **shape, num_hidden_layers=layers, max_position_embeddings=131072, pad_token_id=0, eos_token_id=None
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype)
    return model.eval().requires_grad_(False)


def _logits_errors(device: str) -> dict[str, float]:
    """By implementation, how far bfloat16 logits are from float32's, of mixed batches of a few layers."""
    prompts = _random_prompts([5, 64, 130, 33, 257, 1], 1024)
    batching = {"block_size": 32, "num_blocks": 128, "max_batch_tokens": 128}
    # Weights of the usual size make attention near uniform, and errors in it small.
    model = _model(device, 2, torch.float32, vocab_size=1024, initializer_range=0.05)
    expected = forced_logits(model, PEER, prompts, 8, **batching)
    model = model.bfloat16()
    errors = {}
    for implementation in dict.fromkeys(way.implementation for way in _ways(device)):
        logits = forced_logits(model, implementation, prompts, 8, **batching)
        errors[implementation] = relative_error(logits, expected)
    return errors


def _measure(
    model: Any, way: Way, requests: int, prompt: int, new_tokens: int, block_size: int, errors: dict[str, float]
) -> Row:
    """The best rate of two runs, after one that compiles and captures."""
    row = Row(requests, prompt, way.name, None, errors[way.implementation])
    try:
        model.set_attn_implementation(way.implementation)
        rates = [decode_rate(_timestamps(model, way, requests, prompt, new_tokens, block_size)) for _ in range(3)]
    except (RuntimeError, NotImplementedError, MemoryError, ValueError) as error:
        return dataclasses.replace(row, reason=f"{type(error).__name__}: {error}"[:200])
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return dataclasses.replace(row, rate=max(rates[1:]))


def _timestamps(
    model: Any, way: Way, requests: int, prompt: int, new_tokens: int, block_size: int
) -> list[list[float]]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    blocks_per_request = -(-(prompt + new_tokens + 1) // block_size) + 1
    results = model.generate_batch(
        _random_prompts([prompt] * requests, model.config.vocab_size),
        generation_config=GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            block_size=block_size,
            num_blocks=2 * requests * blocks_per_request,  # with few free ones, requests wait
            # Prompts are over in few steps, so that all requests decode before the first has ended.
            max_batch_tokens=max(8192 if model.device.type == "cuda" else 1024, requests),
            max_blocks_per_request=blocks_per_request,
            max_requests_per_batch=requests,
            use_cuda_graph=(False, way.graphs),
            use_async_batching=way.graphs,
            allow_block_sharing=False,
        ),
        record_timestamps=True,
    )
    failed = [result.error for result in results.values() if result.error is not None]
    if failed or len(results) != requests:
        raise RuntimeError(failed[0] if failed else f"{len(results)} of {requests} requests came back")
    return [result.timestamps for result in results.values()]


def _random_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1, vocab_size) for _ in range(length)] for length in lengths]


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    peers = {(row.requests, row.prompt): row.rate for row in rows if row.name == PEER}
    cells = []
    for row in rows:
        peer = peers.get((row.requests, row.prompt))
        figures = ("", "", "")
        if row.rate is not None:
            over = "" if peer is None else f"{row.rate / peer:.2f}"
            figures = (f"{row.rate:.1f}", f"{1e3 * row.requests / row.rate:.2f}", over)
        error = "" if row.error is None else f"{row.error:.1e}"
        cells.append((str(row.requests), str(row.prompt), row.name.replace("|", "/"), *figures, error, row.reason))
    return cells


def _show(cells: Sequence[tuple[str, ...]]) -> None:
    table = Table(title="Decode with transformers' continuous batching", box=SIMPLE)
    for heading in _HEADINGS:
        table.add_column(heading, no_wrap=heading != "")
    for cell in cells:
        table.add_row(*cell)
    Console(width=150).print(table)


def _write(cells: Sequence[tuple[str, ...]], device: str, layers: int, block_size: int) -> None:
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    lines = [
        "# Decode with transformers' continuous batching",
        "",
        f"{datetime.date.today().isoformat()}, {machine}, Python {platform.python_version()}, "
        f"{versions('jax', 'torch', 'transformers')}.",
        "",
        f"    {' '.join(command_of())}",
        "",
        f"A Llama of {layers} layers with random weights, bfloat16, block size {block_size}. Tokens per second from "
        "the last request's first token to the first request's last, the better of two runs. The error of logits is "
        "of the norm, from float32, in mixed batches of two layers.",
        "",
        *grid([heading.replace("paged|", "paged/") for heading in _HEADINGS], cells),
    ]
    (RESULTS / f"transformers_decode_{device}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
