"""The command line: jaxpaged demo | doctor | verify."""

import dataclasses
import json
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Paged attention for JAX, and the same functions for PyTorch engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
_STYLES = {"ok": "green", "missing": "yellow", "warning": "red"}


@app.command()
def demo(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Python source to complete; a few examples when none.")
    ] = None,
    engine: Annotated[
        Literal["torch", "jax"], typer.Option(help="The framework of the model and its engine.")
    ] = "torch",
    prefix: Annotated[
        str | None,
        typer.Option(help="Text before every prompt, whose blocks the requests share; a few imports by default."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 120,
    blocks: Annotated[
        int, typer.Option(min=1, help="Blocks in the cache; with few, requests wait or are preempted.")
    ] = 96,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block.")] = 16,
    step_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens a step at most: longer prompts are cut into chunks.")
    ] = 64,
) -> None:
    """Generate text with a small language model in PyTorch or JAX, its attention by jaxpaged over a paged cache."""
    from jaxpaged.demo.show import DEFAULT_PREFIX, DEFAULT_PROMPTS, run_demo

    try:
        good = run_demo(
            Console(),
            list(prompts or DEFAULT_PROMPTS),
            engine=engine,
            prefix=DEFAULT_PREFIX if prefix is None else prefix,
            max_new_tokens=tokens,
            num_blocks=blocks,
            block_size=block_size,
            max_step_tokens=step_tokens,
        )
    except ImportError as error:
        typer.echo(f'The demo needs {error.name}: pip install "jaxpaged[demo]", or --engine jax', err=True)
        raise typer.Exit(2) from None
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if good else 1)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine can do and, for what it can't, why and what to install."""
    from jaxpaged.doctor import examine

    findings = examine()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(f) for f in findings], indent=2))
        return
    table = Table(title="jaxpaged doctor")
    for column in ("", "item", "what was found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(f"[{_STYLES[finding.level]}]{finding.level}[/]", finding.item, finding.detail, finding.fix)
    Console().print(table)


@app.command()
def verify(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    door: Annotated[list[str] | None, typer.Option(help="Only this way in; may be repeated.")] = None,
    case: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
) -> None:
    """Compare every implementation and framework with a float64 oracle, case by case; exit code 1 when one is off."""
    from jaxpaged.testing.report import verify_report

    raise typer.Exit(verify_report(Console(), as_json=as_json, doors=door, case_filter=case))
