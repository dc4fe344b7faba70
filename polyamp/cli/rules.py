"""The command `polyamp rules`: the rules that docstrings and messages cite, such as S12, from `docs/semantics.md`.

A wheel holds that page beside this file; a checkout has it in `docs`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import typer

from polyamp.cli.console import exit_with_error
from polyamp.errors import did_you_mean

_HEADING: Final = re.compile(r"^### (S\d+) (.+)$", re.MULTILINE)
_END: Final = re.compile(r"^##+ ", re.MULTILINE)
Numbers = Annotated[
    list[str] | None, typer.Argument(metavar="[RULE]...", help="Rules to print, such as S12.", show_default=False)
]


def rules(numbers: Numbers = None) -> None:
    """Print the rules that docstrings and messages cite, or list them all.

    \b
    Examples:
      polyamp rules          the number and the title of every rule
      polyamp rules S12 S22  two of them, whole

    Exit status: 0 printed; 2 there is no such rule.
    """
    found = rule_texts(semantics_file().read_text(encoding="utf-8"))
    chosen = [number.upper() if number[:1] in "sS" else f"S{number}" for number in numbers or ()]
    for number in chosen:
        if number not in found:
            exit_with_error(f"there is no rule {number}.{did_you_mean(number, found)} polyamp rules lists them all.")
    if not chosen:
        chosen = sorted(found, key=lambda number: int(number[1:]))
        typer.echo("\n".join(f"{number:4}{found[number].splitlines()[0]}" for number in chosen))
    else:
        typer.echo("\n\n".join(f"{number} {found[number]}" for number in chosen))


def semantics_file() -> Path:
    """Return the page with the rules."""
    shipped = Path(__file__).with_name("semantics.md")
    return shipped if shipped.exists() else Path(__file__).parents[2] / "docs" / "semantics.md"


def rule_texts(page: str) -> dict[str, str]:
    """Return number -> title and text of every rule on the page.

    >>> rule_texts("# Semantics\\n\\n### S1 Three dtypes\\n\\nOne.\\n\\n## Several\\n\\nOther.\\n")
    {'S1': 'Three dtypes\\n\\nOne.'}
    """
    found = {}
    for heading in _HEADING.finditer(page):
        end = _END.search(page, heading.end())
        found[heading[1]] = heading[2] + page[heading.end() : end.start() if end else len(page)].rstrip()
    return found
