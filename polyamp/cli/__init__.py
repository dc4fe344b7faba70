"""The command line. `main` is the `polyamp` command; the commands are in `polyamp.cli.app`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

_NEEDED: Final = {"typer": "typer", "rich": "rich", "matplotlib": "matplotlib", "sklearn": "scikit-learn"}
"""Import name -> distribution of what the commands use; all of them are in the extra `cli`."""


def main() -> None:
    """Run the command line; without the extra `cli`, say how to get it."""
    missing = [distribution for name, distribution in _NEEDED.items() if find_spec(name) is None]
    if missing:
        sys.stderr.write(f'polyamp: the command line needs {", ".join(missing)}. Run: pip install "polyamp[cli]"\n')
        raise SystemExit(1)
    from polyamp.cli.app import app

    app(prog_name="polyamp")
