"""The table of the attention benchmark, for the terminal and as Markdown."""

import dataclasses
from collections.abc import Sequence

from attention_cases import (
    CASES,
    FLASH,
    PAGED_READS,
    PLAN,
    READS,
    TRITON,
    Case,
    Target,
    bytes_read,
    memory_bound,
    operations,
)
from attention_results import OURS, Report, Result
from pages import gpu_of, grid, versions_of
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PEERS = (FLASH, TRITON, "ejkernel")
SHORT = {FLASH: "FA3"}
LAYER_LEGEND = (
    '"Ours" is what each layer of a step costs (a program of two layers, each with its own query and cache, less a '
    "program of one), and ratios are of it; the plan, computed on the device, is paid once a step and shared by "
    "the layers, so the first call is both."
)


def reached(target: Target, case: Case, report: Report) -> bool | None:
    """Whether ours reaches a target; None where that was not measured."""
    run = report.run_of(case.name)
    results = run.results_of(case.name)
    ours = results[OURS]
    if ours.microseconds is None or "WRONG" in ours.reason:
        return None
    if target.against == READS:
        if not run.ceilings:
            return None
        return bytes_read(case) / ours.microseconds / 1e6 >= target.ratio * run.ceilings.read
    if target.against == PLAN:
        return None if ours.plan_microseconds is None else ours.plan_microseconds <= target.ratio
    if target.against in PEERS:
        other = results.get(target.against, Result())
    else:  # of another run where this one has none
        other = (run.results_of(target.against) or report.results_of(target.against)).get(OURS, Result())
    if other.microseconds is None or "WRONG" in other.reason:
        return None
    return other.microseconds / ours.microseconds >= target.ratio


def _short(target: Target) -> str:
    """A target in few characters."""
    if target.against == READS:
        return f">={100 * target.ratio:.0f}% reads"
    if target.against == PLAN:
        return f"plan <={target.ratio:.0f} µs"
    if target.against in PEERS:
        return f">={target.ratio:.2f}x {SHORT.get(target.against, target.against)}"
    return f"<={1 / target.ratio:.2f}x plain" if target.ratio < 1 else f">={target.ratio:.2f}x bf16"


@dataclasses.dataclass(frozen=True)
class Rendered:
    """The table's cells as text, and notes on cells that need one."""

    headings: list[str]
    cells: list[list[str]]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Source:
    """A run that cases of a table were measured in; `cases` says how many of them."""

    report: Report
    cases: int
    command: Sequence[str]

    def __str__(self) -> str:
        date, ceilings = self.report.machine.get("date", "unknown"), self.report.ceilings
        read = f", read ceiling {ceilings.read:.2f} TB/s" if ceilings else ""
        return f"{date}, {self.cases} cases{read}: `{' '.join(self.command)}`"


def render(report: Report) -> Rendered:
    """The table of a report, with the peers that were measured."""
    names = tuple(name for name in PEERS if any(name in row.results for row in report.rows))
    by_name = {case.name: case for case in CASES}
    cells, notes = [], list(report.notes)
    reasons: dict[str, list[str]] = {}
    for row in report.rows:
        case = by_name[row.case]
        ours = row.results[OURS]
        peers = [row.results.get(name, Result()) for name in names]
        answers = [reached(target, case, report) for target in case.targets]
        cells.append(
            [
                case.name,
                _time_text(ours),
                _microseconds(ours.plan_microseconds),
                _microseconds(ours.first_microseconds),
                _rate(case, ours.microseconds, report.run_of(case.name)),
                "-" if ours.launches is None else str(ours.launches),
                *(_peer_text(peer, ours) for peer in peers),
                ", ".join(map(_short, case.targets)),
                ", ".join({True: "yes", False: "no", None: "-"}[answer] for answer in answers),
                f"{_error_text(ours)} {_error_text(row.results.get(FLASH, Result()))}",
            ]
        )
        for name, result in row.results.items():
            if result.reason:
                reasons.setdefault(f"{name}: {result.reason}", []).append(row.case)
    for reason, where in reasons.items():
        few = ", ".join(where) if len(where) <= 4 else f"{', '.join(where[:3])} and {len(where) - 3} more"
        notes.append(f"{reason} [{few}]")
    elsewhere = [
        f"{row.case} is set against {target.against} of another run"
        for row in report.rows
        for target in by_name[row.case].targets
        if target.against in by_name and not report.run_of(row.case).results_of(target.against)
    ]
    notes += elsewhere + _plan_notes(report)
    headings = ["case", "ours µs", "plan µs (once a step)", "first call µs", "rate", "kernels"]
    headings += [f"{SHORT.get(name, name)} µs" for name in names]
    return Rendered([*headings, "should reach", "reached", "error, FA3's"], cells, notes)


def _plan_notes(report: Report) -> list[str]:
    """What planning costs in the cases that have a target for it, and what FA3's preparation takes of its time."""
    notes = []
    for case in CASES:
        target = next((target for target in case.targets if target.against == PLAN), None)
        results = report.results_of(case.name)
        if target is not None and results:
            took = results[OURS].plan_microseconds
            answer = {True: "reached", False: "missed", None: "not measured"}[reached(target, case, report)]
            notes.append(
                f"Plan of {case.name}: {_microseconds(took)} µs of the device and 0 of the host, which plans nothing: "
                f"the plan is computed inside the jitted step (at most {target.ratio:.0f} µs wanted: {answer})"
            )
    prepared = [row.results[FLASH].prepare_microseconds for row in report.rows if FLASH in row.results]
    times = [time for time in prepared if time is not None]
    if times:
        notes.append(
            f"FA3's time includes its kernel that prepares the schedule, {min(times):.1f} to {max(times):.1f} µs, of "
            "which the next kernel may cover a part"
        )
    return notes


def _microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _time_text(result: Result) -> str:
    wrong = " WRONG" if "WRONG" in result.reason else ""
    return f"{_microseconds(result.microseconds)}{wrong}"


def _peer_text(peer: Result, ours: Result) -> str:
    """A peer's time, how many times ours it is, and the variant that was the fastest."""
    text = _time_text(peer)
    if peer.microseconds is not None and ours.microseconds is not None:
        text += f" {peer.microseconds / ours.microseconds:.3f}x"
    return f"{text} {peer.variant}" if peer.microseconds is not None and peer.variant else text


def _error_text(result: Result) -> str:
    return "-" if result.error is None else f"{1e3 * result.error:.2f}e-3"


def _rate(case: Case, microseconds: float | None, report: Report) -> str:
    if microseconds is None:
        return "-"
    if not memory_bound(case):
        return f"{operations(case) / microseconds / 1e6:.0f} TF/s"
    rate = bytes_read(case) / microseconds / 1e6
    share = f" {100 * rate / report.ceilings.read:.1f}%" if report.ceilings else ""
    return f"{rate:.2f} TB/s{share}"


def _ceilings_text(report: Report) -> str:
    if not report.ceilings:
        return "ceilings not measured"
    c = report.ceilings
    paged = "not measured" if c.paged_read is None else f"{c.paged_read:.2f} TB/s ({c.page_reader})"
    return (
        f"read ceiling {c.read:.2f} TB/s ({c.reader}), paged read ceiling {paged}, "
        f"copy {c.copy:.2f} TB/s (read and written), bfloat16 product {c.matmul:.0f} TFLOP/s"
    )


def print_table(rendered: Rendered, report: Report, kernels: bool) -> None:
    """Show a table, with the time of each kernel of ours where that is asked for."""
    console = Console(width=240, highlight=False)
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for heading in rendered.headings:
        table.add_column(heading, justify="left" if heading in ("case", "should reach") else "right", no_wrap=True)
    for cells in rendered.cells:
        table.add_row(*cells)
    if kernels:
        for row in report.rows:
            for kernel, microseconds in row.results[OURS].kernels.items():
                print(f"{row.case}: {microseconds:8.1f} us {kernel[:100]}")
    for note in rendered.notes:
        print(f"- {note}")
    print(", ".join(f"{name} {version}" for name, version in report.machine.items()))
    print(_ceilings_text(report))
    print(LAYER_LEGEND)
    console.print(table)


def markdown(rendered: Rendered, report: Report, sources: Sequence[Source]) -> str:
    """A table with how it was measured, the newest of its sources first."""
    lines = [
        "# Attention on the GPU",
        "",
        *(f"- {source}" for source in sources),
        f"- GPU: {gpu_of(report.machine)}",
        f"- Versions: {versions_of(report.machine)}",
        f"- In the first of these runs: {_ceilings_text(report)}. Percentages and targets are of the read ceiling of a "
        f"case's own run; the paged one is of the keys and values of {PAGED_READS.name}, each block and head by "
        "itself, through the table.",
        "- bfloat16, 32 query heads, 8 kv heads of 128, block size 16, causal, unless the case says otherwise; blocks "
        "in random order.",
        "- µs: time during which kernels of one call ran, by CUPTI; median of the rounds, the implementations in "
        "turns, the L2 flushed before each call. For peers the fastest variant that was right counts; then come their "
        "time over ours and that variant.",
        f"- {LAYER_LEGEND}",
        "- FA3's binding takes no packed queries of several lengths with a paged cache. Padded: one call, which knows "
        "the lengths and works on no tile of padding; N calls: one for each length; dense varlen: keys and values not "
        "paged. Bringing tensors into these forms is not timed.",
        "- Rate: the keys and values that must be read once, or the products of the pairs that are attended to, over "
        "the time.",
        "- Error: of 64 rows against float64, norm of the difference over norm of the result. In ours the slots that "
        "hold no token were NaN, and the block table garbage past each length.",
        "",
        *grid(rendered.headings, rendered.cells),
        "",
        *(f"- {note}" for note in rendered.notes),
    ]
    return "\n".join(lines).rstrip() + "\n"
