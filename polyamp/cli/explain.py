"""The command `polyamp explain`: which operation runs in which dtype, and the difference of two policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

import polyamp
from polyamp.cli.console import exit_with_error
from polyamp.cli.python_file import run_file

_NAMES: Final = ("model", "loss_fn", "batch")
File = Annotated[Path, typer.Argument(metavar="FILE", help="Python file that defines model, loss_fn, batch.")]
Name = Annotated[
    str | None, typer.Option("--policy", metavar="NAME", help="By default the file's `policy`, or mixed_float16.")
]
Diff = Annotated[
    tuple[str, str] | None,
    typer.Option("--diff", metavar="A B", help="Two policies: show what runs in other dtypes under the second."),
]
Save = Annotated[
    list[Path] | None, typer.Option("--save", metavar="PATH", help="Draw the report to .html or .png. Repeatable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def explain(file: File, policy: Name = None, diff: Diff = None, save: Save = None, json: Json = False) -> None:
    """List the operations of one pass: module, dtype, the rule that decided it, and how often.

    The file runs in this process.

    Exit status: 0; 2 a wrong argument or file, or a framework that cannot be explained.
    """
    from json import dumps

    from polyamp.errors import PolyampError

    found = run_file(file, _NAMES, "explain")
    named = diff or (policy or found.get("policy", "mixed_float16"),)
    try:
        reports = [
            polyamp.explain(found["loss_fn"], polyamp.Policy.of(each), found["model"], found["batch"]) for each in named
        ]
        paths = [reports[0].save(path) for path in save or ()]
    except PolyampError as error:
        exit_with_error(error)
    if diff is None:
        typer.echo(dumps(reports[0].to_dict()) if json else str(reports[0]))
    else:
        rows = reports[0].diff(reports[1])
        typer.echo(dumps([row._asdict() for row in rows]) if json else _diff_text(diff, rows))
    for path in paths:
        typer.echo(f"wrote {path}", err=json)


def _diff_text(names: tuple[str, str], rows: Any) -> str:
    if not rows:
        return f"Under {names[0]} and {names[1]} every operation runs in the same dtype."
    cells = [("module", "operation", "direction", *names)]
    cells += [(row.module or ".", row.name, row.direction, row.first or "-", row.second or "-") for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(map(str.rstrip, lines))
