"""The command `polyamp float8-plan`: which layers of a model are faster in 8 bits."""

from __future__ import annotations

from typing import Annotated

import typer

import polyamp
from polyamp.cli.console import exit_with_error
from polyamp.cli.python_file import run_file
from polyamp.cli.report_output import TRAINING_NAMES, Json, Save, TrainingFile, Write, print_report, write_files

Compiled = Annotated[bool, typer.Option("--compiled", help="Measure compiled products (torch). JAX always compiles.")]
LeastSpeed = Annotated[
    float, typer.Option("--least-speed", help="Speed relative to bfloat16 from which on a layer runs in 8 bits.")
]


def float8_plan(
    file: TrainingFile,
    compiled: Compiled = False,
    least_speed: LeastSpeed = 1.0,
    save: Save = None,
    write: Write = None,
    json: Json = False,
) -> None:
    """Measure which layers of a model are faster in 8 bits than in bfloat16, on the model's device.

    The file is that of `polyamp diagnose`, with a recipe whose policy has products in 8 bits, and runs in this process.
    The first batch gives the sizes.

    Exit status: 0 the times decide; 1 the products are emulated, or there are none; 2 a wrong argument or file.
    """
    from polyamp.errors import ArgumentError, PolyampError, describe_value

    try:
        found = run_file(file, TRAINING_NAMES, "float8-plan")
        if not isinstance(found["batches"], list) or not found["batches"]:
            raise ArgumentError(
                f"batches must be a list of at least one batch. Received: {describe_value(found['batches'])}."
            )
        report = polyamp.float8_plan(
            found["loss_fn"],
            found["recipe"].policy,
            found["model"],
            found["batches"][0],
            compiled=compiled,
            least_speed=least_speed,
        )
        paths = write_files(report, found["recipe"], save, write)
    except PolyampError as error:
        exit_with_error(error)
    print_report(report, paths, json=json)
    raise typer.Exit(0 if report.layers and not report.emulated else 1)
