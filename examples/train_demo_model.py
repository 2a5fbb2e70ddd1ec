"""Train the demo language model on the source of Python's standard library.

Reads every UTF-8 ``.py`` file of a standard library (by default, that of the interpreter that runs this script), keeps
about 4% of the files aside by a hash of their names, trains on the rest, and writes what ``jaxpaged/demo/weights``
holds::

    python examples/train_demo_model.py                              # one GPU, some minutes
    python examples/train_demo_model.py --device cpu --steps 2       # a smoke test

Quality is given in bits per byte: the sum of ``-log2 p(byte | the bytes before it)`` over whole held-out files, divided
by their bytes. Each file is read in windows of the training length that overlap by half, so a byte is predicted from
at least half a window of its own file, or from the file's beginning, and never from another file.

The data is small for a model that sees all of it more than twenty times, so two defaults matter. Without dropout the
model learns the files by heart: after as many steps, held-out files take 1.33 bits per byte in place of 0.96. And
without the tests, which are most of the bytes, it does so even with dropout: 1.14 after half as many steps. Muon, which
needs torch 2.9, reaches 1.29 in 550 steps where AdamW at the same learning rate reaches 1.89.
"""

import argparse
import datetime
import hashlib
import json
import math
import platform
import random
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from jaxpaged.demo.config import DemoConfig
from jaxpaged.demo.model import DemoModel, dense_attend
from jaxpaged.demo.text import DOCUMENT_BOUNDARY, decode, encode

HELD_OUT_PER_MILLE = 40
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
AUXILIARY_FOLDERS = {"test", "tests", "idle_test", "encodings"}
LICENSE_TEXT = """\
# Licence and origin of these weights

The weights in `model.safetensors` are offered under this project's licence, Apache-2.0.

They were trained from random values by `examples/train_demo_model.py`, and on nothing but the source code of the
standard library of Python {version}, which is under the Python Software Foundation License Version 2 (PSF-2.0),
copyright the Python Software Foundation.

- Read: every `.py` file of the standard library that is UTF-8 and has no zero byte, without `site-packages`:
  {num_files:,} files, {num_bytes:,} bytes.
- Trained on: {train_files:,} files, {train_bytes:,} bytes. {mixture}
- Held out, and never trained on: {held_out_files:,} files, {held_out_bytes:,} bytes: the files for which the first
  eight bytes of the SHA-256 of the relative path, as a big-endian number, leave less than {per_mille} when divided by
  1000.

`training.json` says how well the model predicts them. The model is a demonstration of the attention library: it writes
text that looks like Python and is not meant for any other use. It may repeat passages of the standard library.
"""


@dataclass(frozen=True)
class Document:
    """One source file: its path inside the standard library, and its bytes."""

    path: str
    data: bytes

    @property
    def auxiliary(self) -> bool:
        """Whether the file is a test or an encoding's table rather than code of the library proper."""
        return not AUXILIARY_FOLDERS.isdisjoint(self.path.split("/"))

    @property
    def held_out(self) -> bool:
        """Whether the file is kept from training. It depends on the path alone, so that no run differs from another."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE


def read_documents(folder: Path) -> list[Document]:
    """Return the standard library's source files that are UTF-8 and free of byte 0, ordered by path."""
    documents = []
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder)
        data = file.read_bytes()
        if not SKIPPED_FOLDERS.isdisjoint(path.parts) or not data or b"\0" in data:
            continue
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        documents.append(Document(path.as_posix(), data))
    return documents


def total_bytes(documents: list[Document]) -> int:
    return sum(len(document.data) for document in documents)


class WindowSampler:
    """Random windows over documents joined with the document boundary.

    A window starts at the start of a line and is preceded by the boundary token, so that the model also learns to go on
    from a prompt that is a fragment of a file.
    """

    def __init__(self, documents: list[Document], auxiliary_weight: float, seed: int, device: torch.device) -> None:
        documents = random.Random(seed).sample(documents, len(documents))
        documents.sort(key=lambda document: document.auxiliary)
        stream = b"".join(b"\0" + document.data for document in documents) + b"\0"
        self.stream = torch.frombuffer(bytearray(stream), dtype=torch.uint8).to(device)
        starts_line = functional.pad((self.stream == ord("\n")) | (self.stream == 0), (1, 0))[:-1]
        indices = torch.arange(len(stream), device=device, dtype=torch.int32)
        self.line_starts = torch.where(starts_line, indices, 0).cummax(0).values
        self.main_bytes = sum(len(document.data) + 1 for document in documents if not document.auxiliary)
        weighted = auxiliary_weight * (len(stream) - self.main_bytes)
        self.auxiliary_share = weighted / (weighted + self.main_bytes)

    def sample(self, num_windows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each ``[num_windows, length]`` int64."""
        device = self.stream.device
        auxiliary = torch.rand(num_windows, device=device) < self.auxiliary_share
        fraction = torch.rand(num_windows, device=device, dtype=torch.float64)
        main_place = fraction * self.main_bytes
        auxiliary_place = self.main_bytes + fraction * (len(self.stream) - self.main_bytes)
        place = torch.where(auxiliary, auxiliary_place, main_place).long().clamp(max=len(self.stream) - length - 1)
        first = self.line_starts[place].long()
        targets = self.stream[first[:, None] + torch.arange(length, device=device)].long()
        return shift_right(targets), targets


def shift_right(targets: Tensor) -> Tensor:
    """Return the inputs that predict ``targets`` (``[num_windows, length]``): the boundary, then all but the last."""
    return functional.pad(targets[:, :-1], (1, 0), value=DOCUMENT_BOUNDARY)


def token_losses(model: DemoModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return ``-ln p`` of every target, ``[num_windows, length]`` float32."""
    num_windows, length = inputs.shape
    positions = torch.arange(length, device=inputs.device).repeat(num_windows)
    logits = model(inputs.flatten(), positions, dense_attend(num_windows))
    return functional.cross_entropy(logits, targets.flatten(), reduction="none").unflatten(0, (num_windows, length))


@torch.no_grad()
def bits_per_byte(model: DemoModel, documents: list[Document], length: int, batch_tokens: int) -> float:
    """Return the mean of ``-log2 p`` over all bytes of ``documents``, read in half-overlapping windows."""
    windows, first_scored = [], []
    half = length // 2
    for document in documents:
        data = torch.frombuffer(bytearray(document.data), dtype=torch.uint8).long()
        for start in range(0, max(len(data) - half, 1), half):
            window = data[start : start + length]
            windows.append(functional.pad(window, (0, length - len(window)), value=DOCUMENT_BOUNDARY))
            first_scored.append(half if start else 0)
    device = next(model.parameters()).device
    nats, num_bytes = 0.0, 0
    batch_size = max(batch_tokens // length, 1)
    for begin in range(0, len(windows), batch_size):
        targets = torch.stack(windows[begin : begin + batch_size]).to(device)
        first = torch.tensor(first_scored[begin : begin + batch_size], device=device)
        # Byte 0 is in no document: it marks padding here.
        scored = (torch.arange(length, device=device) >= first[:, None]) & (targets != DOCUMENT_BOUNDARY)
        losses = token_losses(model, shift_right(targets), targets)
        nats += losses[scored].double().sum().item()
        num_bytes += int(scored.sum())
    assert num_bytes == total_bytes(documents)
    return nats / math.log(2) / num_bytes


def initialise(model: DemoModel) -> None:
    """Draw the weights; what is added to the residual stream starts small, in proportion to the depth."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = (2 * model.config.num_hidden_layers) ** -0.5 if residual else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)


def add_dropout(model: DemoModel, probability: float) -> None:
    """Drop out what attention and feed-forward add to the residual stream; the model itself knows no dropout."""

    def drop(module: nn.Module, arguments: tuple, output: Tensor) -> Tensor:
        return functional.dropout(output, probability, module.training)

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


def make_optimizers(model: DemoModel, arguments: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return the optimizers: AdamW for everything, or Muon for the layers' matrices and AdamW for the rest."""
    matrices = [parameter for name, parameter in model.named_parameters() if "_proj" in name]
    embedding = [model.model.embed_tokens.weight]
    scales = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    decay = arguments.weight_decay
    adamw_groups = [{"params": embedding, "weight_decay": decay}, {"params": scales, "weight_decay": 0.0}]
    if arguments.optimizer == "adamw":
        adamw_groups.append({"params": matrices, "weight_decay": decay})
    fused = arguments.device.type == "cuda"
    optimizers = [torch.optim.AdamW(adamw_groups, lr=arguments.learning_rate, betas=(0.9, 0.95), fused=fused)]
    if arguments.optimizer == "muon":
        muon = torch.optim.Muon(
            matrices, lr=arguments.learning_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    return optimizers


def learning_rate(progress: float, peak: float) -> float:
    """Return the learning rate at ``progress`` (0 to 1): a linear warm-up over 2%, then half a cosine to 1%."""
    warm_up = 0.02
    if progress < warm_up:
        return peak * (progress + 1e-3) / (warm_up + 1e-3)
    cosine = 0.5 + 0.5 * math.cos(math.pi * min((progress - warm_up) / (1 - warm_up), 1.0))
    return peak * (0.01 + 0.99 * cosine)


def run_progress(arguments: argparse.Namespace) -> Iterator[float]:
    """Yield, before each step, how much of the training is over: of its steps or its time, whichever ends first."""
    began = time.monotonic()
    step = 0
    while True:
        by_steps = step / arguments.steps if arguments.steps else 0.0
        by_time = (time.monotonic() - began) / 60 / arguments.minutes if arguments.minutes else 0.0
        progress = max(by_steps, by_time)
        if progress >= 1:
            return
        yield progress
        step += 1


def train(
    model: DemoModel, sampler: WindowSampler, validation: list[Document], arguments: argparse.Namespace
) -> dict[str, float]:
    """Train ``model`` in place and return what it took. Compilation happens before the clock starts."""
    device = arguments.device
    optimizers = make_optimizers(model, arguments)
    compute_losses = torch.compile(token_losses, dynamic=False) if arguments.compile else token_losses

    def forward_backward(length: int) -> Tensor:
        inputs, targets = sampler.sample(max(arguments.batch_tokens // length, 1), length)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = compute_losses(model, inputs, targets).mean()
        loss.backward()
        return loss.detach()

    lengths = {arguments.length, arguments.long_length} if arguments.long_share else {arguments.length}
    began = time.monotonic()
    for length in sorted(lengths):
        forward_backward(length).item()
        model.zero_grad()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)

    began = time.monotonic()
    steps = 0
    for steps, progress in enumerate(run_progress(arguments), 1):
        length = arguments.long_length if progress > 1 - arguments.long_share else arguments.length
        loss = forward_backward(length)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress, arguments.learning_rate)
            optimizer.step()
            optimizer.zero_grad()
        if steps % 25 == 0:  # Reading the loss also keeps the host from running far ahead of the GPU.
            bits = loss.item() / math.log(2)
            if steps % 250 == 0:
                print(f"step {steps}  {time.monotonic() - began:.1f} s  {bits:.4f} bits per byte", flush=True)
        if steps % 1000 == 0:
            bits = bits_per_byte(model.eval(), validation, arguments.length, 65536)
            model.train()
            print(f"step {steps}  held out: {bits:.4f} bits per byte", flush=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {
        "steps": steps,
        "tokens_seen": steps * arguments.batch_tokens,
        "seconds": round(time.monotonic() - began, 1),
    }


def within_budget(documents: list[Document], budget: int | None, seed: int) -> list[Document]:
    """Return ``documents``, or a random few of them, about ``budget`` bytes in all."""
    if budget is None:
        return documents
    chosen, size = [], 0
    for document in random.Random(seed).sample(documents, len(documents)):
        if size < budget and len(document.data) < budget:
            chosen.append(document)
            size += len(document.data)
    return chosen


def evaluate(model: DemoModel, documents: list[Document], arguments: argparse.Namespace) -> dict[str, object]:
    """Return the bits per byte of held-out and trained-on files: of the library proper, and of tests and encodings."""
    held_out = [document for document in documents if document.held_out]
    trained_on = [document for document in documents if not document.held_out]
    # About as much of the trained-on files as is held out suffices to see how far the two are apart.
    sample_budget = arguments.max_eval_bytes or total_bytes(held_out) // 2
    sets = {
        "held_out": within_budget([d for d in held_out if not d.auxiliary], arguments.max_eval_bytes, 0),
        "held_out_tests_and_encodings": within_budget(
            [d for d in held_out if d.auxiliary], arguments.max_eval_bytes, 0
        ),
        "train": within_budget([d for d in trained_on if not d.auxiliary], sample_budget, 0),
    }
    report = {}
    for name, chosen in sets.items():
        report[f"{name}_bits_per_byte"] = round(bits_per_byte(model, chosen, arguments.length, 65536), 4)
        report[f"{name}_files_scored"] = len(chosen)
        report[f"{name}_bytes_scored"] = total_bytes(chosen)
    if arguments.long_share:
        long_bits = bits_per_byte(model, sets["held_out"], arguments.long_length, 65536)
        report[f"held_out_bits_per_byte_at_{arguments.long_length}"] = round(long_bits, 4)
    return report


@torch.no_grad()
def complete(model: DemoModel, prompt: str, num_tokens: int) -> str:
    """Return ``prompt`` with its greedy completion, recomputing everything at each token: slow, and plainly right."""
    device = next(model.parameters()).device
    tokens = encode(prompt)
    for _ in range(num_tokens):
        positions = torch.arange(len(tokens), device=device)
        logits = model(torch.tensor(tokens, device=device), positions, dense_attend())
        tokens.append(int(logits[-1].argmax()))
    return decode(tokens)


def write_files(
    model: DemoModel, documents: list[Document], report: dict[str, object], arguments: argparse.Namespace
) -> None:
    """Write the weights (bfloat16), the configuration, the training report and the licence note."""
    output = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    safetensors.torch.save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    (output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    held_out = [document for document in documents if document.held_out]
    trained_on = [d for d in documents if not d.held_out and (arguments.auxiliary_weight or not d.auxiliary)]
    mixture = "Tests and encodings' tables were left out."
    if arguments.auxiliary_weight:
        mixture = f"A byte of the tests or of `encodings` was drawn {arguments.auxiliary_weight:g} times as often as\n"
        mixture += "  one of the library proper."
    license_text = LICENSE_TEXT.format(
        version=arguments.stdlib_version,
        num_files=len(documents),
        num_bytes=total_bytes(documents),
        train_files=len(trained_on),
        train_bytes=total_bytes(trained_on),
        mixture=mixture,
        held_out_files=len(held_out),
        held_out_bytes=total_bytes(held_out),
        per_mille=HELD_OUT_PER_MILLE,
    )
    (output / "LICENSE.md").write_text(license_text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo language model on Python's standard library.")
    parser.add_argument("--output", type=Path, default=Path("demo-model"), help="folder to write the files to")
    parser.add_argument("--minutes", type=float, help="train at most this long")
    parser.add_argument("--steps", type=int, help="train at most this many steps (5304 without --minutes)")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--stdlib-version", default=platform.python_version(), help="for the licence note")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a training window")
    parser.add_argument("--long-length", type=int, default=2048, help="the same, in the last part of the training")
    parser.add_argument("--long-share", type=float, default=0.25, help="how large that last part is")
    parser.add_argument("--batch-tokens", type=int, help="tokens in a step (131072, on a CPU 4096)")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--auxiliary-weight", type=float, default=0.5, help="how often tests are drawn")
    parser.add_argument("--heads", type=int, nargs=3, default=(8, 2, 32), help="query heads, KV heads, head size")
    parser.add_argument("--intermediate-size", type=int, default=624)
    parser.add_argument("--max-eval-bytes", type=int, help="score about this many bytes (all, on a CPU 10000)")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    on_cpu = arguments.device.type == "cpu"
    if not arguments.steps and not arguments.minutes:
        arguments.steps = 5304
    arguments.batch_tokens = arguments.batch_tokens or (4096 if on_cpu else 131072)
    arguments.max_eval_bytes = arguments.max_eval_bytes or (10000 if on_cpu else None)
    arguments.compile = arguments.compile and not on_cpu
    return arguments


def main() -> None:
    """Train, score and write the demo model."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    documents = read_documents(arguments.stdlib)
    trained_on = [d for d in documents if not d.held_out and (arguments.auxiliary_weight or not d.auxiliary)]
    print(f"{len(documents)} files, {total_bytes(documents)} bytes; training on {len(trained_on)} files", flush=True)
    sampler = WindowSampler(trained_on, arguments.auxiliary_weight, arguments.seed, arguments.device)
    num_heads, num_kv_heads, head_size = arguments.heads
    config = DemoConfig(
        intermediate_size=arguments.intermediate_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_size,
    )
    model = DemoModel(config)
    initialise(model)
    if arguments.dropout:
        add_dropout(model, arguments.dropout)
    model.to(arguments.device)
    validation = [document for document in documents if document.held_out and not document.auxiliary]
    effort = train(model, sampler, validation, arguments)
    # What is scored is what is shipped: the weights as bfloat16 holds them.
    model.to(torch.bfloat16).float().eval()
    cuda = arguments.device.type == "cuda"
    report = {
        **evaluate(model, documents, arguments),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **effort,
        "training_bytes": total_bytes(trained_on),
        "training_files": len(trained_on),
        "python_standard_library": arguments.stdlib_version,
        "options": {
            "optimizer": arguments.optimizer,
            "learning_rate": arguments.learning_rate,
            "weight_decay": arguments.weight_decay,
            "dropout": arguments.dropout,
            "batch_tokens": arguments.batch_tokens,
            "length": arguments.length,
            "long_length": arguments.long_length,
            "long_share": arguments.long_share,
            "auxiliary_weight": arguments.auxiliary_weight,
            "seed": arguments.seed,
        },
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    print(json.dumps(report, indent=2), flush=True)
    write_files(model, documents, report, arguments)
    for prompt in ("def __init__(self, ", "import os\nimport "):
        print("---\n" + complete(model, prompt, 200 if cuda else 10), flush=True)


if __name__ == "__main__":
    main()
