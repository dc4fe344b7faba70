"""`start`: a program in a process with another Keras backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def start(program: str, backend: str, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start Python code with a Keras backend in a folder. It imports what this process can, tests included."""
    paths = os.pathsep.join([*filter(None, sys.path), os.getcwd()])  # noqa: PTH109  # entries are str
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": paths}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=folder, env=environment)
