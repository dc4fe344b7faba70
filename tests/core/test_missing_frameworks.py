"""`import polyamp_torch` without torch, and the others likewise: the error says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = """
import sys
sys.modules[{missing!r}] = None
try:
    import {package}
except ModuleNotFoundError as error:
    print(error.name, error, sep="|")
import polyamp
try:
    polyamp.init(object(), polyamp.Recipe(optimizer=polyamp.sgd(0.1)), backend={backend!r})
except polyamp.BackendNotInstalledError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("package", "missing"),
    [
        ("polyamp_torch", "torch"),
        ("polyamp_tensorflow", "tensorflow"),
        ("polyamp_tensorflow", "keras"),
        ("polyamp_jax", "jax"),
        ("polyamp_jax", "optax"),
    ],
)
def test_the_error_says_what_to_install(package: str, missing: str) -> None:
    backend = package.removeprefix("polyamp_")
    code = BLOCKED.format(package=package, missing=missing, backend=backend)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    command = f'pip install "polyamp[{backend}]"'
    assert done.stdout.splitlines() == [
        f"{missing}|{package} needs {missing}, which is not installed. Run: {command}",
        f"backend {backend!r} needs {missing}, which is not installed. Run: {command}",
    ]
