"""The command `polyamp explain`: which operation runs in which dtype, and what runs in other dtypes elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from json import dumps, loads
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import polyamp
from polyamp import backend_lookup
from polyamp.cli.console import exit_with_error
from polyamp.cli.python_file import run_file
from polyamp.cli.report_output import Draw
from polyamp.contract.casting_comparison import FamilyComparison, compare_families
from polyamp.contract.casting_report import CastingReport
from polyamp.display import table_lines
from polyamp.errors import PolicyError, PolyampError, did_you_mean

_NAMES: Final = ("model", "loss_fn", "batch")
_SIDE_NAMES: Final = ("build", "loss_fn", "batch")
_MODES: Final = ("eager", "compiled")
_KERAS: Final = "keras"
"""Name of a side of the tensorflow backend, too."""
_LISTED: Final = 8
"""Number of operations without a counterpart that the text lists; the JSON has all."""
File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="Python file that defines model, loss_fn, batch; of two frameworks build for model."
    ),
]
Name = Annotated[
    str | None, typer.Option("--policy", metavar="NAME", help="By default the file's `policy`, or mixed_float16.")
]
Diff = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--diff",
        metavar="A B",
        help="Show what runs in other dtypes under B than under A: two policies, `eager compiled`, or two frameworks.",
    ),
]
Side = Annotated[
    str | None, typer.Option("--side", metavar="NAME", help="The framework, of a file that defines build.")
]
Interpreters = Annotated[
    list[str] | None,
    typer.Option("--python", metavar="NAME=PATH", help="Python of the environment that a framework is in. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def explain(
    file: File,
    policy: Name = None,
    diff: Diff = None,
    side: Side = None,
    python: Interpreters = None,
    save: Draw = None,
    json: Json = False,
) -> None:
    """List the operations of one pass: module, dtype, the rule that decided it, and how often.

    The file runs in this process; of two frameworks, in a process each. It defines for them build = {"torch":
    make_torch, "jax": make_jax}, functions that make the models, loss_fn (or one per framework), batch in NumPy, and
    names = {"0": "layers/0"} if modules of the first framework have other paths in the second.

    Exit status: 0; 2 a wrong argument or file, or a framework that cannot be explained.
    """
    if diff is not None and save:
        exit_with_error(f"--save draws one report. Received: --save with --diff {' '.join(diff)}.")
    if diff is not None and all(map(_is_framework, diff)):
        _print_frameworks(file, diff, policy, python or (), json)
        return
    if diff is not None and _is_framework(diff[0]) != _is_framework(diff[1]):
        exit_with_error(f"--diff takes two policies, `eager compiled`, or two frameworks. Received: {' '.join(diff)}.")
    found = run_file(file, _NAMES if side is None else _SIDE_NAMES, "explain")
    try:
        arguments = _arguments(found, side)
        chosen = polyamp.Policy.of(policy or found.get("policy", "mixed_float16"))
        if diff is None:
            report = polyamp.explain(arguments[0], chosen, *arguments[1:])
            paths = [report.save(path) for path in save or ()]
        elif set(diff) & set(_MODES):
            if set(diff) != set(_MODES):
                exit_with_error(f"--diff compares eager with compiled. Received: {' '.join(diff)}.")
            first, second = (
                polyamp.explain(arguments[0], chosen, *arguments[1:], compiled=mode == "compiled") for mode in diff
            )
            _print_families(diff, (first, second), compare_families(first, second), json)
            return
        else:
            one, two = (polyamp.explain(arguments[0], polyamp.Policy.of(each), *arguments[1:]) for each in diff)
            rows = one.diff(two)
            typer.echo(dumps([row._asdict() for row in rows]) if json else _diff_text(diff, rows))
            return
    except PolyampError as error:
        exit_with_error(error)
    data = report.to_dict() if side is None else {**report.to_dict(), "names": dict(found.get("names", {}))}
    typer.echo(dumps(data) if json else str(report))
    for path in paths:
        typer.echo(f"wrote {path}", err=json)


def _is_framework(name: str) -> bool:
    return name == _KERAS or name in backend_lookup.names()


def _arguments(found: Mapping[str, Any], side: str | None) -> tuple[Any, Any, Any]:
    """Return loss function, model and batch of a file."""
    loss_fn, batch = found["loss_fn"], found["batch"]
    if side is None:
        return loss_fn, found["model"], batch
    build = found["build"]
    if not isinstance(build, Mapping) or side not in build:
        sides = ", ".join(map(str, build)) if isinstance(build, Mapping) else type(build).__name__
        raise PolicyError(
            f"build must map the frameworks that are compared to functions that make the models. Received: {sides}, "
            f"without {side!r}.{did_you_mean(side, map(str, build) if isinstance(build, Mapping) else ())}"
        )
    return loss_fn[side] if isinstance(loss_fn, Mapping) else loss_fn, build[side](), batch


def _print_frameworks(
    file: Path, sides: tuple[str, str], policy: str | None, python: Sequence[str], json: bool
) -> None:
    """Explain each framework in a process of its own, and print what differs."""
    if not file.is_file():
        exit_with_error(f"FILE must be a Python file. Received: {file}, which does not exist.")
    interpreters = dict(item.partition("=")[::2] for item in python)
    answers = []
    for side in sides:
        command = [interpreters.get(side, sys.executable), "-P", "-m", "polyamp", "explain", str(file), "--side", side]
        command += ["--json", *(["--policy", policy] if policy else [])]
        try:
            ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        except OSError as error:
            exit_with_error(f"--python {side}={command[0]} cannot be started: {error.strerror}.")
        if ended.returncode:
            exit_with_error(f"{side} could not be explained (exit status {ended.returncode}); see above.")
        answers.append(loads(ended.stdout.decode().splitlines()[-1]))  # what the file prints comes before
    first, second = map(CastingReport.from_dict, answers)
    _print_families(sides, (first, second), compare_families(first, second, answers[0]["names"]), json)


def _print_families(
    sides: tuple[str, str], reports: Sequence[CastingReport], found: FamilyComparison, json: bool
) -> None:
    notes = list(dict.fromkeys(note for report in reports for note in report.notes))
    rest = dict(zip(sides, (found.only_first, found.only_second), strict=True))
    if json:
        rows = [row._asdict() for row in found.differences]
        data = {"policy": reports[0].policy.to_dict(), "differences": rows, "compared": found.compared}
        typer.echo(dumps({**data, "without_counterpart": rest, "notes": notes}))
        return
    lines = [str(reports[0].policy), ""]
    if found.differences:
        cells = [("module", "family", "direction", *sides)]
        cells += [
            (
                *(row.module or ".", row.family, row.direction),
                *(f"{row.first} ({row.first_operations})", f"{row.second} ({row.second_operations})"),
            )
            for row in found.differences
        ]
        lines += [*table_lines(cells), ""]
    same = found.compared - len(found.differences)
    lines.append(f"{same} of {found.compared} families of operations run in the same dtype in {' and '.join(sides)}.")
    for side, names in rest.items():
        if names:
            more = f", and {len(names) - _LISTED} more (--json)" if len(names) > _LISTED else ""
            lines.append(f"not compared, in {side} alone: {', '.join(names[:_LISTED])}{more}")
    typer.echo("\n".join([*lines, *notes]))


def _diff_text(names: tuple[str, str], rows: Any) -> str:
    if not rows:
        return f"Under {names[0]} and {names[1]} every operation runs in the same dtype."
    cells = [("module", "operation", "direction", *names)]
    cells += [(row.module or ".", row.name, row.direction, row.first or "-", row.second or "-") for row in rows]
    return "\n".join(table_lines(cells))
