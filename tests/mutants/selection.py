"""Which files are mutated, and which tests ought to notice a mutant, the nearest and cheapest first."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
OUTSIDE: Final = ("polyamp/conformance/", "polyamp/_version.py")
"""Tests that are shipped, and a number."""
FRAMEWORKS: Final = ("torch", "tensorflow", "jax")
ELSEWHERE: Final[Mapping[str, tuple[str, ...]]] = {
    "porting": ("tests/porting",),
    "parity": ("tests/parity",),
    "observe": ("tests/parity",),
}
"""Rooms whose behaviour the tests of several frameworks show -> their tests."""
_UNSUITED: Final = ("tests/core/house", "tests/core/benchmarks")
"""Tests of the source's form would notice a mutant for the wrong reason."""


class Stage(NamedTuple):
    """One run of pytest.

    Attributes:
        name: what it is called in the report.
        arguments: pytest's own.
        variables: environment variables of its own.
    """

    name: str
    arguments: tuple[str, ...]
    variables: Mapping[str, str] = {}


def library(root: Path = ROOT) -> list[str]:
    """The files that may be mutated, as paths from the root, in order."""
    found = [
        path.relative_to(root).as_posix() for top in ("polyamp", "backends") for path in (root / top).rglob("*.py")
    ]
    return sorted(path for path in found if not path.startswith(OUTSIDE))


def pytest_command(*arguments: str) -> list[str]:
    """A run that ends with the first failure; XLA compiles its cheapest code."""
    return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.xla", *arguments]


def conformance(backend: str, *arguments: str) -> tuple[str, ...]:
    """pytest's arguments for the conformance suite on a backend."""
    deviations = "--polyamp-deviations=tests/conformance/deviations.py"
    return "--pyargs", "polyamp.conformance", f"--polyamp-backend={backend}", deviations, *arguments


def stages(path: str, *, whole: bool = False, root: Path = ROOT) -> list[Stage]:
    """What is run for a mutant of a file until something fails.

    Args:
        path: the file, from the root.
        whole: at the end all tests of its backend, or those of the core and the conformance suite on every backend.
        root: the repository.
    """
    parts = Path(path).parts
    framework = parts[1].removeprefix("polyamp_") if parts[0] == "backends" else ""
    room = parts[2 if framework else 1] if len(parts) > (3 if framework else 2) else ""
    backend = framework or "reference"
    tests = f"tests/backends/{framework}" if framework else "tests/core"
    folder = f"{tests}/{room}" if room and (root / tests / room).exists() else tests
    run = [Stage("doctest", ("--doctest-modules", path))]
    near = tuple(name.relative_to(root).as_posix() for name in _near(path, root / folder))
    if near:
        run.append(Stage("near", near))
    if folder != tests:
        run.append(Stage("room", (folder, *(f"--ignore={name}" for name in near))))
    run.append(Stage(f"conformance-{backend}", conformance(backend)))
    run += [Stage(name, (name,)) for name in ELSEWHERE.get(room, ())]
    if whole and not framework:
        run.append(Stage("core", (tests, *(f"--ignore={name}" for name in _UNSUITED))))
        run += [Stage(f"conformance-{name}", conformance(name)) for name in FRAMEWORKS]
    elif framework and (whole or not room):  # a file in no room is everybody's
        apart = f"{tests}/distributed"
        run.append(Stage(f"backend-{framework}", (tests, *([f"--ignore={apart}"] if framework == "jax" else []))))
        if framework == "jax":
            from tests import xla

            devices = f"{xla.FLAGS if xla.known() else ''} --xla_force_host_platform_device_count=4"
            run.append(Stage("distributed-jax", (apart,), {"XLA_FLAGS": devices}))
    return run


def _near(path: str, folder: Path) -> Iterator[Path]:
    """The test files of a room that bear the file's name or import it."""
    module = path.removeprefix("backends/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    pattern = re.compile(
        rf"^\s*(?:import|from) {re.escape(module)}\b|^from {re.escape(package)} import .*\b{re.escape(name)}\b",
        re.MULTILINE,
    )
    for file in sorted(folder.rglob("test_*.py")):
        if "house" in file.parts:
            continue
        if file.stem.startswith(f"test_{name}") or pattern.search(file.read_text(encoding="utf-8")):
            yield file
