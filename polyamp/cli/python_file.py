"""`run_file`: runs a user's Python file for a command, which needs some of its names."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyamp.cli.console import exit_with_error


def run_file(file: Path, names: Sequence[str], command: str) -> dict[str, Any]:
    """Run the file in this process and return what it defines; end the command if a name is not among it.

    Args:
        file: the user's file; its folder is on the path meanwhile.
        names: what it must define.
        command: whose argument it is; its `__name__` is `__polyamp_COMMAND__`.
    """
    if not file.is_file():
        exit_with_error(f"FILE must be a Python file. Received: {file}, which does not exist.")
    sys.path.insert(0, str(file.resolve().parent))
    try:
        found = runpy.run_path(str(file), run_name=f"__polyamp_{command}__")
    finally:
        sys.path.pop(0)
    absent = [name for name in names if name not in found]
    if absent:
        exit_with_error(f"FILE must define {', '.join(names)}. Received: {file}, without {', '.join(absent)}.")
    return found
