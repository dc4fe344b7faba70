"""`polyamp parity FILE.py`: run the comparison that a Python file defines, with one process per side.

The file defines the arguments of `polyamp.parity.run` by their names. It is a module, so that tests may import it too.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer
from rich.console import Console

from polyamp.cli.port import exit_on_sigterm
from polyamp.cli.progress import show_progress
from polyamp.errors import ArgumentError, PolyampError, did_you_mean
from polyamp.parity.execution.function_ref import MAIN_MODULE, load_module_file
from polyamp.parity.execution.runner import run
from polyamp.parity.report.report import Report

_REQUIRED_NAMES: Final = ("build", "data")
_OPTIONAL_NAMES: Final = ("loss_fn", "recipe", "steps", "names", "inputs", "randomness", "interpreters", "timeout",
                          "options", "at_once", "out")  # fmt: skip
EXIT_INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as in shells."""


class CompareOptions(NamedTuple):
    """Options of the command line, which override the file; None if not given.

    Attributes:
        sides: labels to run.
        steps, timeout, out: as for `run`.
        interpreters: label -> Python.
    """

    sides: Sequence[str] | None
    steps: int | None
    timeout: float | None
    out: Path | None
    interpreters: Mapping[str, str]


def compare_file(file: Path, given: CompareOptions, console: Console, *, json: bool) -> int:
    """Run the comparison of a file, print the report and write its files.

    Args:
        file: the Python file.
        given: options of the command line.
        console: for progress and the report.
        json: whether the report goes to standard output as JSON.

    Returns:
        The exit status: 0 if all agree, 1 if they do not or a side failed, 130 after Ctrl-C.

    Raises:
        PolyampError: the file, or a value in it, is invalid.
    """
    arguments = _run_arguments(_module_values(file), given, file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with exit_on_sigterm(), show_progress(console) as on_event:
                report: Report = run(on_event=on_event, **arguments)
        except (KeyboardInterrupt, SystemExit) as error:
            for note in getattr(error, "__notes__", []):
                typer.echo(note, err=True)
            return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else int(error.code or 0)
    typer.echo(str(report), err=json)
    for each in caught:
        typer.echo(f"warning: {each.message}", err=True)
    if arguments.get("out") is not None:
        for name in ("report.html", "report.png", "report.json"):
            if (path := Path(arguments["out"]) / name).exists():
                typer.echo(f"wrote {path}", err=json)
    if json:
        typer.echo(report.to_json())
    return 0 if report.agrees else 1


def _module_values(file: Path) -> dict[str, Any]:
    """Return the names that the file defines. Imports in it resolve as with `python FILE.py`."""
    resolved = file.resolve()
    sys.path.insert(0, str(resolved.parent))
    name = resolved.stem if resolved.stem.isidentifier() and resolved.stem not in sys.modules else MAIN_MODULE
    try:
        return vars(load_module_file(name, resolved))
    except PolyampError:
        raise
    except Exception as error:
        stack = "".join(traceback.format_exception(error)[-6:]).rstrip()
        raise ArgumentError(f"{file} cannot be imported:\n{stack}") from error


def _run_arguments(values: Mapping[str, Any], given: CompareOptions, file: Path) -> dict[str, Any]:
    """Return the arguments of `run`."""
    own = {
        name
        for name, value in values.items()
        if not name.startswith("_") and getattr(value, "__module__", None) in (None, values["__name__"])
    }
    for name in _REQUIRED_NAMES:
        if name not in values:
            raise ArgumentError(
                f"{file} must define {' and '.join(_REQUIRED_NAMES)}, as polyamp.parity.run takes them. Received a "
                f"file without {name}.{did_you_mean(name, own)} It may define {', '.join(_OPTIONAL_NAMES)}."
            )
    found = {name: values[name] for name in (*_REQUIRED_NAMES, *_OPTIONAL_NAMES) if name in values}
    build = found["build"]
    if given.sides is not None and isinstance(build, Mapping):
        unknown = [label for label in given.sides if label not in build]
        if unknown:
            raise ArgumentError(
                f"--backends must be among the labels of build in {file}: {', '.join(map(str, build))}. Received: "
                f"{unknown[0]!r}.{did_you_mean(unknown[0], map(str, build))}"
            )
        found["build"] = {label: build[label] for label in given.sides}
        for name, value in found.items():
            if name not in ("build", "data") and isinstance(value, Mapping) and set(value) == set(build):
                found[name] = {label: value[label] for label in given.sides}
    if given.interpreters:
        found["interpreters"] = {**(found.get("interpreters") or {}), **given.interpreters}
    caught = {"steps": given.steps, "timeout": given.timeout, "out": given.out}
    return found | {name: value for name, value in caught.items() if value is not None}
