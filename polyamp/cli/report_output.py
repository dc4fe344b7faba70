"""What `diagnose` and `float8-plan` do with their report: its files, the recipe with its overrides, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from polyamp.recipe.recipe import Recipe


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
