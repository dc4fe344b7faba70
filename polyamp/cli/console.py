"""The console of the commands, and how they end with a wrong argument."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape


def make_console(*, stderr: bool = False) -> Console:
    """Return a console on standard output or standard error, 100 columns wide if it is not a terminal."""
    console = Console(highlight=False, stderr=stderr)
    return console if console.is_terminal else Console(highlight=False, stderr=stderr, width=100)


def exit_with_error(error: object) -> NoReturn:
    """Print an error and exit with status 2."""
    Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    raise typer.Exit(2)
