"""The demo as a person sees it: completions as they grow, the batch, the blocks in use, and a table at the end."""

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxpaged.demo.running import RUNNING, RunningEngine
from jaxpaged.demo.scheduler import Request, Status, StepResult
from jaxpaged.demo.text import DOCUMENT_BOUNDARY, decode, encode

DEFAULT_PREFIX = '"""Tools for text files."""\n\nimport os\nimport sys\n\n\n'
DEFAULT_PROMPTS = (
    'class Stack:\n    """A stack of items."""\n\n    def __init__(self):\n        self._items = []\n\n'
    "    def push(self, item):\n",
    'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a text file."""\n    with open(path',
    "def main(argv=None):\n    import argparse\n    parser = argparse.ArgumentParser(",
    'class TestFiles(unittest.TestCase):\n    def test_read_lines(self):\n        """A file is read line by line."""\n',
)
_STEPS_BETWEEN_ARRIVALS = 4
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


def run_demo(
    console: Console,
    prompts: list[str],
    *,
    engine: str,
    prefix: str,
    max_new_tokens: int,
    num_blocks: int,
    block_size: int,
    max_step_tokens: int,
) -> bool:
    """Run the demo on the "torch" or the "jax" engine; whether every token equals dense attention's and nothing was
    copied."""
    running = RUNNING[engine](num_blocks=num_blocks, block_size=block_size, max_step_tokens=max_step_tokens)
    requests = [
        Request(
            name=str(i + 1),
            prompt=encode(prefix + prompt),
            max_new_tokens=max_new_tokens,
            arrival=i * _STEPS_BETWEEN_ARRIVALS,
            stop_token=DOCUMENT_BOUNDARY,
        )
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        running.engine.add(request)
    console.print(
        f"[bold]jaxpaged demo[/]: a byte-level language model of {running.num_parameters:,} parameters in "
        f"{running.framework}; "
        f"attention by jaxpaged, over a paged cache of {num_blocks} blocks of {block_size} tokens. "
        "The first steps compile.\n"
    )
    steps, seconds, peak = _watch(console, running.engine, requests)
    checked = [request.generated == running.dense_choices(request) for request in requests]
    memory = running.memory_report()
    for request in requests:
        console.print(_completion(request, len(encode(prefix)), len(request.generated)))
    console.print(_request_table(requests, checked))
    console.print(_summary(requests, steps, seconds, peak, num_blocks, checked, memory))
    return all(checked) and all(shared for _, _, shared in memory)


def _watch(
    console: Console, engine: RunningEngine, requests: list[Request]
) -> tuple[list[StepResult], list[float], int]:
    """Run all steps, showing each; the steps, the seconds each took, and the most blocks in use."""
    steps, seconds, peak = [], [], 0
    with Live(console=console, refresh_per_second=12, transient=True, auto_refresh=console.is_terminal) as live:
        begin = time.perf_counter()
        for step in engine.run():
            seconds.append(time.perf_counter() - begin)
            steps.append(step)
            peak = max(peak, engine.scheduler.pool.num_used)
            if console.is_terminal:
                live.update(_frame(engine, requests, step, len(steps)))
            else:
                _log_changes(console, engine, step, len(steps))
            begin = time.perf_counter()
    return steps, seconds, peak


def _log_changes(console: Console, engine: RunningEngine, step: StepResult, number: int) -> None:
    """For logs: a line for each step in which a request joins, is filled in chunks, or leaves."""
    events = []
    for part in step.parts:
        request = part.request
        if part.start == request.num_shared and len(request.generated) <= len(step.new_tokens.get(request.name, [])):
            events.append(f"{request.name} joins, {request.num_shared} tokens shared")
        if part.length > 1:
            events.append(f"{request.name} prefills tokens {part.start} to {part.start + part.length - 1}")
    events += [f"{request.name} leaves" for request in step.finished]
    if events:
        pool = engine.scheduler.pool
        console.print(
            f"step {number:3}: {len(step.parts)} requests, {step.num_tokens:3} tokens, "
            f"{pool.num_used:3}/{pool.num_blocks} blocks in use; " + "; ".join(events),
            highlight=False,
        )


def _frame(engine: RunningEngine, requests: list[Request], step: StepResult, number: int) -> RenderableType:
    pool = engine.scheduler.pool
    blocks = Table.grid(padding=(0, 1))
    blocks.add_row(
        "blocks in use", ProgressBar(pool.num_blocks, pool.num_used, width=40), f"{pool.num_used}/{pool.num_blocks}"
    )
    batch = Table(title=f"step {number}: {step.num_tokens} tokens of {len(step.parts)} requests", expand=False)
    for column in ("request", "status", "in this step", "cached", "shared", "blocks"):
        batch.add_column(column)
    lengths = {part.request.name: part.length for part in step.parts}
    for request in requests:
        if request.arrival < engine.scheduler.step:
            batch.add_row(
                request.name,
                request.status.value,
                str(lengths.get(request.name, 0)),
                str(request.num_computed),
                str(request.num_shared),
                " ".join(map(str, request.blocks[:12])) + (" …" if len(request.blocks) > 12 else ""),
            )
    texts = [
        _completion(r, len(r.prompt) - 60, 160) for r in requests if r.generated and r.status is not Status.FINISHED
    ]
    return Group(batch, blocks, *texts[-4:])


def _completion(request: Request, first: int, newest: int) -> RenderableType:
    """The end of a request's prompt from token `first` on, and its newest generated tokens in colour."""
    text = Text(decode(request.prompt[max(first, 1) :]), style="dim")
    text.append(decode(request.generated[-newest:]), style=_COLOURS[int(request.name) % len(_COLOURS)])
    return Panel(text, title=f"request {request.name}", title_align="left", width=100)


def _request_table(requests: list[Request], checked: list[bool]) -> Table:
    table = Table(title="requests")
    for column in ("request", "prompt tokens", "of them shared", "generated", "preempted", "equals dense attention"):
        table.add_column(column, justify="right")
    for request, same in zip(requests, checked, strict=True):
        table.add_row(
            request.name,
            str(len(request.prompt)),
            str(request.num_shared),
            str(len(request.generated)),
            str(request.num_preemptions),
            "[green]every token[/]" if same else "[red]no[/]",
        )
    return table


def _summary(
    requests: list[Request],
    steps: list[StepResult],
    seconds: list[float],
    peak: int,
    num_blocks: int,
    checked: list[bool],
    memory: list[tuple[str, str, bool]],
) -> Table:
    table = Table(title="summary", show_header=False)
    generated = sum(len(request.generated) for request in requests)
    # A step that compiles takes seconds; the median is what a warm engine does.
    decodes = sorted(s for s, step in zip(seconds, steps, strict=True) if step.num_tokens == len(step.parts) > 0)
    batch = sum(len(s.parts) for s in steps if s.num_tokens == len(s.parts)) / max(1, len(decodes))
    table.add_row("tokens generated", f"{generated} in {len(steps)} steps")
    table.add_row("tokens per second, compiling included", f"{generated / sum(seconds):.1f}")
    if decodes:
        table.add_row("tokens per second, median decode step", f"{batch / decodes[len(decodes) // 2]:.1f}")
    table.add_row("most blocks in use", f"{peak} of {num_blocks}")
    table.add_row("tokens equal to dense attention's", "[green]all[/]" if all(checked) else "[red]not all[/]")
    for name, how, shared in memory:
        table.add_row(name, f"[green]shared[/]: {how}" if shared else "[red]copied[/]")
    table.add_row("copied", "nothing" if all(shared for _, _, shared in memory) else "[red]see above[/]")
    return table
