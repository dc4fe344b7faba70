"""The command `polyamp diagnose`: which modules of a model must stay in float32."""

from __future__ import annotations

import typer

import polyamp
from polyamp.cli.console import exit_with_error, make_console
from polyamp.cli.python_file import run_file
from polyamp.cli.report_output import TRAINING_NAMES, Json, Save, TrainingFile, Write, print_report, write_files


def diagnose(file: TrainingFile, save: Save = None, write: Write = None, json: Json = False) -> None:
    """Train a model in float32 and under its recipe's policy, and find the modules that must stay in float32.

    The file runs in this process. Batches are a list; each is one update, and ten to fifty show most faults.

    Exit status: 0 the policy works, as it is or with overrides; 1 it does not; 2 a wrong argument or file.
    """
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from polyamp.errors import PolyampError

    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        found = run_file(file, TRAINING_NAMES, "diagnose")
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            task = bars.add_task("training 1")
            report = polyamp.diagnose(
                found["model"],
                found["loss_fn"],
                found["batches"],
                found["recipe"],
                on_trial=lambda done, most: bars.update(task, description=f"training {done + 1}"),
            )
        paths = write_files(report, found["recipe"], save, write)
    except PolyampError as error:
        exit_with_error(error)
    print_report(report, paths, json=json)
    raise typer.Exit(0 if report.outcome in ("fits", "overrides") else 1)
