"""The table of defaults in `docs/explanation/why_three_frameworks_differ.md`, for the test of each framework."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).parents[1] / "docs" / "explanation" / "why_three_frameworks_differ.md"
COLUMNS: Final = ("torch", "tensorflow", "jax")


def stated_defaults(framework: str) -> dict[str, str]:
    """Return row -> cell of a framework's column."""
    table = PAGE.read_text(encoding="utf-8").partition("| default |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: cells[COLUMNS.index(framework)] for name, *cells in rows}


def actual_defaults(arguments: Mapping[str, tuple[Callable[..., Any], str]]) -> dict[str, str]:
    """Return row -> default, of a row's callable and argument, as the page writes it."""
    found = {row: inspect.signature(call).parameters[name].default for row, (call, name) in arguments.items()}
    return {row: re.sub(r"^float\d+\((.*)\)$", r"\1", str(value)) for row, value in found.items()}
