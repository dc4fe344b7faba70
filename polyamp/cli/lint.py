"""The command `polyamp lint`: faults of precision in a training set-up that does not use polyamp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

import polyamp
from polyamp.cli.console import exit_with_error
from polyamp.cli.python_file import run_file
from polyamp.cli.report_output import Draw, Json

_OPTIONAL: Final = ("optimizer", "opt_state", "scaler", "loss_fn", "batch", "step", "policy")
File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help=f"Python file that defines model, and some of {', '.join(_OPTIONAL)}."),
]


def lint(file: File, save: Draw = None, json: Json = False) -> None:
    """Name the faults of precision in a training of your own, which need not use polyamp.

    The file runs in this process. Its model, optimizer, scaler, loss_fn(model, batch), batch, step() and policy are
    those of polyamp.lint.

    Exit status: 0 no findings; 1 findings; 2 a wrong argument or file.
    """
    from json import dumps

    from polyamp.errors import PolyampError

    found = run_file(file, ("model",), "lint")
    try:
        report = polyamp.lint(found["model"], **{name: found[name] for name in _OPTIONAL if name in found})
        paths = [report.save(path) for path in save or ()]
    except PolyampError as error:
        exit_with_error(error)
    typer.echo(dumps(report.to_dict()) if json else str(report))
    for path in paths:
        typer.echo(f"wrote {path}", err=json)
    raise typer.Exit(1 if report.findings else 0)
