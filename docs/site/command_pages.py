"""The reference page of the command line: `reference/commands.md`, made of what `polyamp --help` is made of."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from typer.main import get_command

from polyamp.cli.app import app


def write_commands(page: Path) -> None:
    """Write the page."""
    page.write_text(commands_markdown(), encoding="utf-8")


def commands_markdown() -> str:
    """Return the page: each command with its arguments and options."""
    parts = ["# Command line\n\nExit status: 0 success; 1 the result is negative or a framework failed; 2 a wrong "]
    parts[0] += "argument or file, or an extra that is not installed.\n"
    group: Any = get_command(app)
    for name, command in sorted(group.commands.items()):
        parts.append(f"## `polyamp {name}`\n\n```{{program}} polyamp {name}\n```\n")
        parts.append(f"{inspect.cleandoc(command.help)}\n")
        parts += [_parameter(each) for each in command.params if each.name != "help"]
    return "\n".join(parts)


def _parameter(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    value = "" if getattr(parameter, "is_flag", False) else f" {parameter.metavar or parameter.name.upper()}"
    heading = (
        (parameter.metavar or parameter.name.upper())
        if is_argument
        else ", ".join(f"{option}{value}" for option in parameter.opts)
    )
    notes = [parameter.help or ""]
    if _has_default(parameter):
        notes.append(f"Default: `{parameter.default}`.")
    return f"````{{option}} {heading}\n\n{' '.join(notes)}\n````\n"


def _has_default(parameter: Any) -> bool:
    return (
        parameter.default not in (None, False, ())
        and "default" not in (parameter.help or "")
        and not callable(parameter.default)
        and not parameter.required
    )
