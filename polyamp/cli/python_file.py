"""`run_file`: runs a user's Python file for a command, which needs some of its names."""

from __future__ import annotations

import sys
import types
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
    module = types.ModuleType(f"__polyamp_{command}__")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # torch.compile imports the module of a function that it traces
    sys.path.insert(0, str(file.resolve().parent))
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), vars(module))  # noqa: S102  # the user's own file
    finally:
        sys.path.pop(0)
    found = vars(module)
    absent = [name for name in names if name not in found]
    if absent:
        exit_with_error(f"FILE must define {', '.join(names)}. Received: {file}, without {', '.join(absent)}.")
    return found
