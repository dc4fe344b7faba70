"""Command line. `main` is the `polyamp` command and `python -m polyamp`; the commands are in `polyamp.cli.app`."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from polyamp.cli.app import app

    app(prog_name="polyamp")
