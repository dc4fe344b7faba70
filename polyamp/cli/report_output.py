"""Options of commands that make a report, and what `diagnose` and `float8-plan` do with theirs: files and text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from polyamp.recipe.recipe import Recipe

TRAINING_NAMES: Final = ("model", "loss_fn", "batches", "recipe")
TrainingFile = Annotated[
    Path, typer.Argument(metavar="FILE", help=f"Python file that defines {', '.join(TRAINING_NAMES)}.")
]
Save = Annotated[
    list[Path] | None,
    typer.Option("--save", metavar="PATH", help="Write the report as .html, .png or .json. Repeatable."),
]
Draw = Annotated[
    list[Path] | None, typer.Option("--save", metavar="PATH", help="Draw the report to .html or .png. Repeatable.")
]
Write = Annotated[
    Path | None,
    typer.Option("--write", metavar="PATH", help="Write the recipe with the overrides, as .toml or .json."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]


def write_files(report: Any, recipe: Recipe, save: Sequence[Path] | None, write: Path | None) -> list[Path]:
    """Write the report to each path of `save`, and its recipe to `write`; return what was written.

    Raises:
        PolyampError: a path, or a recipe that the report cannot be put into.
    """
    paths = [report.save(path) for path in save or ()]
    if write is not None:
        report.recipe(recipe).dump(write)
        paths.append(write)
    return paths


def print_report(report: Any, paths: Sequence[Path], *, json: bool) -> None:
    """Print the report and the files that were written; as JSON the report alone."""
    if json:
        import msgspec

        typer.echo(msgspec.json.encode(report.to_dict()).decode())
        return
    typer.echo(str(report))
    for path in paths:
        typer.echo(f"wrote {path}")
