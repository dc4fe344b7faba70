"""Tables of a demo report, on the console and as Markdown, and the table of `doctor`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polyamp.contract.registry import BackendStatus
from polyamp.demo.comparison_report import (
    COMPARED_STEPS,
    MIXED_FACTOR,
    TOLERANCE,
    DemoReport,
    FrameworkRun,
    PolicyComparison,
)

_RUN_COLUMNS = ("framework", "policy", "loss", "accuracy", "applied", "skipped", "scale", "ms/step")
_DISTANCE_COLUMNS = ("policy", "farthest apart", "distance", "allowed", "from float32", "verdict")
_TEXT_COLUMNS = ("framework", "policy", "farthest apart", "verdict")
"""Columns with text; the others have numbers, right-aligned."""


def print_report(console: Console, report: DemoReport) -> None:
    """Print the results, the distances and the remarks."""
    if report.runs:
        _print_table(console, title(report), _RUN_COLUMNS, [_run_row(run) for run in report.runs])
    if report.comparisons:
        rows = [_distance_row(comparison) for comparison in report.comparisons]
        _print_table(console, "Largest distance between the frameworks' loss curves", _DISTANCE_COLUMNS, rows)
    for remark in remarks(report):
        console.print(f"\n{escape(remark)}")
    for problem in problems(report):
        console.print(f"\n{escape(problem)}", soft_wrap=True)
    console.print()
    verdict = "[green]ok[/]" if report.ok else "[red]not ok[/]"
    console.print(f"{verdict} after {report.seconds:.0f} s")


def title(report: DemoReport) -> str:
    """Return the title: what was trained, with the frameworks' versions."""
    versions = dict.fromkeys(f"{run.backend} {run.version.partition('+')[0]}" for run in report.runs)
    return f"Handwritten digits, {report.steps} steps of {report.batch_size}: {', '.join(versions)}"


def remarks(report: DemoReport) -> list[str]:
    """Return remarks that a reader of the tables needs, one paragraph each."""
    found = []
    if report.comparisons:
        found.append(
            f"A distance is the largest relative difference of the loss over the first {COMPARED_STEPS} steps. "
            f"Allowed: {TOLERANCE:.0e} in float32; elsewhere {MIXED_FACTOR:g} times the larger of the two frameworks' "
            "own distances from float32 (with the same steps skipped)."
        )
    elif report.runs:
        found.append("Only one framework ran, so there is nothing to compare it with.")
    for comparison in report.comparisons:
        found += [
            f"{comparison.policy}: {' and '.join(pair.backends)} skipped different steps from step {pair.parted} on; "
            f"their distance is that of the first {pair.steps} steps."
            for pair in comparison.pairs
            if pair.parted is not None
        ]
    return found


def problems(report: DemoReport) -> list[str]:
    """Return what did not run, and what to do."""
    found = [f"{backend} left out: {message}" for backend, message in report.missing.items()]
    for failure in report.failures:
        where = failure.backend if failure.policy is None else f"{failure.backend}, {failure.policy}"
        found.append(f"{where} failed: {failure.message}")
    if not report.runs:
        found.append("No framework could be run.")
    return found


def markdown(report: DemoReport) -> str:
    """Return the two tables as Markdown."""
    parts = [title(report) + ".\n", _markdown(_RUN_COLUMNS, [_run_row(run) for run in report.runs])]
    if report.comparisons:
        parts.append(_markdown(_DISTANCE_COLUMNS, [_distance_row(comparison) for comparison in report.comparisons]))
    return "\n".join(parts)


def doctor_table(statuses: Mapping[str, BackendStatus], *, broken: Set[str]) -> Table:
    """Return a table with a row per backend; `broken` are those that are installed but do not work."""
    table = Table(box=box.SIMPLE)
    for heading in ("backend", "usable", "version", "devices or problem"):
        table.add_column(heading, overflow="fold")
    for name, status in statuses.items():
        usable = "[green]yes[/]" if status.usable else ("[red]broken[/]" if name in broken else "[yellow]no[/]")
        table.add_row(name, usable, status.version or "", escape(status.problem or ", ".join(status.devices)))
    return table


def power_of_two(value: float) -> str:
    """Return a loss scale as a power of two if it is one, else as a number.

    >>> power_of_two(65536.0), power_of_two(1.0), power_of_two(1000.0)
    ('2^16', '1', '1000')
    """
    exponent = math.log2(value)
    return f"2^{exponent:.0f}" if exponent.is_integer() and value != 1.0 else f"{value:g}"


def _run_row(run: FrameworkRun) -> tuple[str, ...]:
    last = run.losses[-1]
    return (
        run.backend,
        run.policy,
        "not finite" if last is None else f"{last:.4f}",
        f"{100.0 * run.accuracy:.1f}%",
        str(run.applied),
        str(run.skipped),
        power_of_two(run.scales[-1]),
        f"{run.ms_per_step:.1f}",
    )


def _distance_row(comparison: PolicyComparison) -> tuple[str, ...]:
    worst = comparison.pairs[0]
    own = [_distance(comparison.from_float32.get(name, 0.0)) for name in worst.backends]
    return (
        comparison.policy,
        " - ".join(worst.backends),
        _distance(worst.distance),
        _distance(worst.limit),
        " ".join(own) if comparison.from_float32 else "",
        "ok" if comparison.within else "OUTSIDE",
    )


def _distance(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def _print_table(console: Console, heading: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    console.print(f"\n[bold]{escape(heading)}[/]", soft_wrap=True)  # a table's own title wraps at the table's width
    console.print(_table(columns, rows))


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT_COLUMNS else "right", overflow="fold")
    for number, row in enumerate(rows):
        own_group = number + 1 < len(rows) and columns is _RUN_COLUMNS and rows[number + 1][0] != row[0]
        styled = [f"[bold red]{cell}[/]" if cell == "OUTSIDE" else escape(cell) for cell in row]
        table.add_row(*styled, end_section=own_group)
    return table


def _markdown(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    rule = ["---" if column in _TEXT_COLUMNS else "---:" for column in columns]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, rule, *rows))
