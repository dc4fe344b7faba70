"""The environments that `bench.py` measures in: one for each framework, with polyamp and that framework's peers.

Peers pin other libraries than polyamp's users have, and each framework is kept out of the others' processes and
environments. `benchmarks/<framework>/requirements.txt` names the peers at versions that run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = ("torch", "jax", "tensorflow")


def variables() -> dict[str, str]:
    """What a script is started with: this process's variables, and this checkout first where modules are looked for."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def folder(framework: str) -> Path:
    """Where a framework's environment lies."""
    return ROOT / f".venv-bench-{framework}"


def interpreter(framework: str) -> Path:
    """Its Python."""
    return folder(framework) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def requirements(framework: str) -> Path:
    """The file that names its peers."""
    return ROOT / "benchmarks" / framework / "requirements.txt"


def is_current(framework: str) -> bool:
    """Whether it is installed, from the files as they are now."""
    stamp = folder(framework) / ".installed"
    return stamp.exists() and stamp.read_text() == _digest(framework)


def install(framework: str) -> None:
    """Make the environment, or bring it up to date; minutes, the first time.

    Raises:
        RuntimeError: pip failed; the message holds what it said.
    """
    if is_current(framework):
        return
    _run([sys.executable, "-m", "venv", str(folder(framework))])
    pip = [str(interpreter(framework)), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    _run([*pip, *constraints, "--editable", f"{ROOT}[{framework}]", "--requirement", str(requirements(framework))])
    (folder(framework) / ".installed").write_text(_digest(framework))


def _digest(framework: str) -> str:
    files = (requirements(framework), ROOT / "constraints.txt", ROOT / "pyproject.toml")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
