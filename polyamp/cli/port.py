"""The command `polyamp port`, which converts a model's file to another framework's format."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from polyamp.errors import ArgumentError, BackendError, PolyampError

Source = Annotated[Path, typer.Argument(metavar="SOURCE", help="A model's file.", show_default=False)]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="The file to be written.", show_default=False)]
Like = Annotated[
    Path | None, typer.Option("--like", metavar="FILE", help="An existing file of the target model, for its layout.")
]
Into = Annotated[
    str | None,
    typer.Option("--into", metavar="MODULE:FUNCTION", help="A function that makes the target model."),
]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--names",
        metavar="REGEX=REPLACEMENT",
        help="Renames the source's paths (divided by /) where names do not tell. Repeatable; applied in turn.",
    ),
]
Rows = Annotated[
    list[str] | None,
    typer.Option(
        "--rows",
        metavar="GLOB=channels|none",
        help="Whether dense layers of the target (paths divided by /) take flattened channels. Repeatable.",
    ),
]
Forms = Annotated[
    list[str] | None,
    typer.Option(
        "--forms",
        metavar="REGEX=LAYOUT",
        help="Layout of an array of no known layer, by its path: transpose, or axes as 'ndh -> d(nh)'. Repeatable.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict/--no-strict", help="Refuse layers without a partner, or leave and report them.")
]
From = Annotated[
    str | None,
    typer.Option("--from", metavar="FRAMEWORK", help="Whose file SOURCE is, where it does not say: torch, jax, ..."),
]
To = Annotated[
    str | None, typer.Option("--to", metavar="FRAMEWORK", help="Whose file TARGET is to be, if not by its suffix.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Report what would be done, and write nothing.")]


def port(
    source: Source,
    target: Target,
    like: Like = None,
    into: Into = None,
    names: Names = None,
    rows: Rows = None,
    forms: Forms = None,
    strict: Strict = True,
    from_: From = None,
    to: To = None,
    dry_run: DryRun = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Convert a model's file to another framework's format, or to polyamp's canonical one.

    SOURCE is a file of polyamp.porting.save, safetensors as on Hugging Face (or model.safetensors.index.json), torch's
    .pt, .pth or .bin, .keras, .weights.h5 or a folder of orbax; no code in it is run. TARGET is replaced atomically at
    the end. Each framework's package is needed only for its own files.

    \b
    Examples:
      polyamp port gpt.pt gpt.safetensors --into my_models.gpt:build
          torch's state_dict, of the model that build() of my_models/gpt.py
          returns, in the canonical layout, for another environment
      polyamp port gpt.safetensors gpt.weights.h5 --like fresh.weights.h5
          into the layout of a Keras model that was saved before it was trained
      polyamp port gpt.safetensors gpt.keras --into keras_models:gpt
          into the Keras model that gpt() of keras_models.py returns
      polyamp port old.pt new.pt --like new.pt --names '^encoder/=backbone/' --dry-run
          only report what would be moved, and what differs

    Exit status: 0 written; 1 the models do not fit or a file is damaged; 2 a wrong argument, or a package is missing.
    """
    from polyamp.porting.convert import convert

    try:
        with exit_on_sigterm():
            report = convert(
                source,
                target,
                like=like,
                into=into,
                names=dict(_parse_renaming(item) for item in names or ()),
                rows=dict(_parse_rows(item) for item in rows or ()) or None,
                forms=dict(_parse_form(item) for item in forms or ()) or None,
                strict=strict,
                source_format=from_,
                target_format=to,
                dry_run=dry_run,
            )
    except (ArgumentError, BackendError, OSError) as error:
        _exit_with_error(error, 2)
    except PolyampError as error:
        _exit_with_error(error, 1)
    if json:
        typer.echo(dumps({**_json_data(report), "source": str(source), "target": str(target), "written": not dry_run}))
    else:
        typer.echo(str(report))
        typer.echo(f"wrote {target}" if not dry_run else f"would write {target}")


def _parse_renaming(item: str) -> tuple[str, str]:
    """Parse REGEX=REPLACEMENT at the last `=`: a replacement contains none."""
    pattern, equals, replacement = item.rpartition("=")
    if not equals or not pattern:
        raise ArgumentError(f"--names takes REGEX=REPLACEMENT, such as '^encoder/=backbone/'. Received: {item!r}.")
    return pattern, replacement


def _parse_rows(item: str) -> tuple[str, Literal["channels"] | None]:
    """Parse GLOB=channels or GLOB=none."""
    glob, _, value = item.rpartition("=")
    if not glob or value not in ("channels", "none"):
        raise ArgumentError(f"--rows takes GLOB=channels or GLOB=none, such as 'fc=channels'. Received: {item!r}.")
    return glob, "channels" if value == "channels" else None


def _parse_form(item: str) -> tuple[str, str]:
    """Parse REGEX=LAYOUT at the last `=`: a layout contains none."""
    pattern, equals, layout = item.rpartition("=")
    if not equals or not pattern:
        raise ArgumentError(f"--forms takes REGEX=LAYOUT, such as 'rel_embedding=transpose'. Received: {item!r}.")
    return pattern, layout.strip()


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """End the block on SIGTERM as on Ctrl-C, so that no partial file remains."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    old = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _json_data(value: Any) -> Any:
    """Return a report as JSON data."""
    if dataclasses.is_dataclass(value):
        return {field.name: _json_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return _json_data(value._asdict())
    if isinstance(value, dict):
        return {str(key): _json_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json_data(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _exit_with_error(error: BaseException, status: int) -> None:
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    typer.echo(f"error: {text}", err=True)
    sys.exit(status)
