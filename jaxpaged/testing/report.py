"""What `jaxpaged verify` prints."""

import dataclasses
import json

import jax
from rich.console import Console
from rich.table import Table

from jaxpaged.testing.cases import named_cases
from jaxpaged.testing.doors import DOORS
from jaxpaged.testing.verify import Result, run


def verify_report(console: Console, *, as_json: bool, doors: list[str] | None, case_filter: str | None) -> int:
    """Run and print the comparison; the exit code: 1 when a result is out of tolerance, 2 with nothing to run."""
    unknown = set(doors or ()) - set(DOORS)
    cases = [case for case in named_cases() if case_filter is None or case_filter in case.name]
    if unknown or not cases:
        wrong = (
            f"door: expected {', '.join(DOORS)}, got {', '.join(sorted(unknown))}"
            if unknown
            else f"case: none contains {case_filter!r}"
        )
        Console(stderr=True).print(f"Error: {wrong}", markup=False)
        return 2
    chosen = {name: door for name, door in DOORS.items() if not doors or name in doors}
    if as_json:
        results = run(chosen, cases)
        report = {
            "jax": jax.__version__,
            "device": str(jax.devices()[0]),
            "results": [dataclasses.asdict(r) for r in results],
        }
        console.file.write(json.dumps(report, indent=2) + "\n")
    else:
        with console.status("comparing with the oracle") as status:
            results = run(chosen, cases, lambda r: status.update(f"{r.case} through {r.door}"))
        console.print(_table(results, list(chosen)))
        ran = [r for r in results if r.skipped is None]
        bad = [r for r in ran if not r.ok]
        console.print(f"{len(ran) - len(bad)} of {len(ran)} within tolerance, {len(results) - len(ran)} not applicable")
    return 1 if any(not result.ok for result in results) else 0


def _table(results: list[Result], doors: list[str]) -> Table:
    table = Table(title="error of the output, and of the lse, relative to the float64 oracle's largest")
    table.add_column("case")
    table.add_column("tolerance", justify="right")
    for door in doors:
        table.add_column(door, justify="right")
    rows: dict[str, list[str]] = {}
    for r in results:
        row = rows.setdefault(r.case, [r.case, f"{r.tolerance:.1e}"])
        if r.skipped is not None:
            row.append("[dim]-[/]")
        else:
            row.append(f"[{'green' if r.ok else 'red'}]{r.error:.1e}  {r.lse_error:.1e}[/]")
    for row in rows.values():
        table.add_row(*row)
    return table
