"""Text of what was measured of a device: a table, the problems, the recommendation and the known traps."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from polyamp.doctor.float8_times import Float8Capability
from polyamp.doctor.measurements import (
    BASELINE,
    OPERATIONS,
    DtypeCapability,
    KnownTrap,
    OperationCapability,
    Recommendation,
)

_WIDTH: Final = 100
_STYLES: Final = {"native": "green", "emulated": "yellow", "float32 in disguise": "yellow", "fails": "red"}


def render(show: Callable[[Console], None]) -> str:
    """Return what a function prints, and the legend, without colours."""
    console = Console(file=io.StringIO(), width=_WIDTH, highlight=False)
    show(console)
    console.print()
    print_legend(console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def print_heading(console: Console, text: str) -> None:
    """Print the heading of a device."""
    console.print(f"\n[bold]{escape(text)}[/]", soft_wrap=True)


def print_dtypes(console: Console, dtypes: Mapping[str, DtypeCapability]) -> None:
    """Print the table of a device's dtypes, and what does not run."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for heading in ("dtype", "verdict", *OPERATIONS, "error"):
        table.add_column(heading, justify="left" if heading in ("dtype", "verdict") else "right", no_wrap=True)
    for name, dtype in dtypes.items():
        row = dtype_row(name, dtype)
        style = _STYLES.get(dtype.verdict, "dim")
        table.add_row(row[0], f"[{style}]{row[1]}[/]", *row[2:])
    console.print(table)
    for number, line in enumerate(_problem_lines(dtypes)):
        console.print(("" if number else "\n") + escape(line))


def print_float8(console: Console, found: Float8Capability) -> None:
    """Print what products in 8 bits are, and a line for each shape."""
    style = _STYLES.get(found.verdict, "dim")
    console.print(f"\nmixed_float8: [{style}]{found.verdict}[/]; {escape(found.summary())}")
    if found.times:
        how = "compiled" if found.compiled else "eager"
        console.print(f"  {how}; milliseconds of a product and its two gradients, casts and quantization included")
    for row in float8_rows(found):
        console.print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, (20, 11, 11, 6), strict=True)))


def float8_rows(found: Float8Capability) -> list[list[str]]:
    """Return the cells of the shapes, after a heading."""
    rows = [
        [str(each.shape), _number_text(each.bfloat16_ms), _number_text(each.float8_ms), f"{each.speed:.2f}"]
        for each in found.times
    ]
    return [["rows x inputs x out", "bfloat16 ms", "float8 ms", "speed"], *rows] if rows else []


def print_recommendation(console: Console, recommendation: Recommendation) -> None:
    """Print the recommended policy and its reason."""
    console.print(f"\nRecommended: [bold]{escape(recommendation.code)}[/]", soft_wrap=True)
    console.print(Padding(escape(recommendation.reason), (0, 0, 0, 2), expand=False))


def print_traps(console: Console, traps: Sequence[KnownTrap], framework: str) -> None:
    """Print the known traps of a framework's version."""
    if traps:
        console.print(f"\nKnown traps of {escape(framework)}:")
    for trap in traps:
        console.print(Padding(escape(f"- {trap.summary} {trap.advice}"), (0, 0, 0, 2), expand=False))
        console.print(f"    {escape(trap.source)}", soft_wrap=True)


def print_legend(console: Console) -> None:
    """Print what the table's figures are."""
    console.print(
        "Columns of operations: forward / forward and backward; milliseconds of float32, and speeds of the others "
        "relative to it. error: of a product of 4,096 terms against float64."
    )


def dtype_row(name: str, found: DtypeCapability) -> list[str]:
    """Return a dtype's cells: name, verdict, speeds of each operation, accumulation error."""
    cells = [_operation_cell(name, found.operations.get(operation)) for operation in OPERATIONS]
    error = "" if found.accumulation_error is None else f"{found.accumulation_error:.0e}"
    return [name, found.verdict, *cells, error]


def _operation_cell(name: str, found: OperationCapability | None) -> str:
    if found is None:
        return ""
    pair = (
        (found.forward_ms, found.forward_backward_ms)
        if name == BASELINE
        else (found.forward_speed, found.training_speed)
    )
    return "-" if pair == (None, None) else " / ".join(map(_number_text, pair))


def _number_text(value: float | None) -> str:
    """Return three digits.

    >>> _number_text(0.0234), _number_text(5.678), _number_text(12.34), _number_text(None)
    ('0.02', '5.68', '12.3', '-')
    """
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _problem_lines(dtypes: Mapping[str, DtypeCapability]) -> Iterator[str]:
    """Yield a line for each dtype and message of what does not run, and for what was too slow to measure."""
    for name, dtype in dtypes.items():
        if dtype.verdict == "missing":
            continue
        if not dtype.operations or dtype.verdict == "fails":
            yield f"{name}: {dtype.reason}"
            continue
        operations: dict[str, list[str]] = {}
        for operation, times in dtype.operations.items():
            if times.problem is not None:
                which = operation if times.forward_ms is None else f"gradients of {operation}"
                operations.setdefault(times.problem, []).append(which)
        for problem, failed in operations.items():
            yield f"{name}: {', '.join(failed)}: {problem}"
