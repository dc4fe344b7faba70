"""`Package`: a public package whose tests or programs run with polyamp in it, as data; and the list of them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOM: Final = Path(__file__).resolve().parent
ROOT: Final = ROOM.parents[1]
GROUPS: Final = ("torch", "tensorflow", "jax")
"""The environments, one per framework."""


@dataclass(frozen=True)
class Package:
    """A public package, what of it runs, and what polyamp replaces in it.

    Args:
        name: the distribution on PyPI; `version`: the release.
        group: the environment that it runs in.
        replaced: names of `downstream_replacements.REPLACEMENTS`, put in before anything of the package is imported.
        tests: the package's own test files or folders, from its source distribution, with pytest's `::` if need be.
        program: in place of `tests`, a file in `programs/` that runs the package's loop, demos or examples as tests.
        what: what runs, in the words of the page.
        needs_source: whether the program reads files of the source distribution.
        installed: False for a package that the environment has already, or that runs from its source.
        requires: further distributions that the tests import.
        environment: environment variables of both runs.
        differences: test -> reason, for tests that pass without polyamp and fail with it, on purpose. The name of a
            test is what stands after the file, such as `TestScaler::test_state`.
    """

    name: str
    version: str
    group: str
    what: str
    replaced: tuple[str, ...]
    tests: tuple[str, ...] = ()
    program: str = ""
    needs_source: bool = False
    installed: bool = True
    requires: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    differences: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_source(self) -> bool:
        """Whether the source distribution is downloaded."""
        return bool(self.tests) or self.needs_source

    @property
    def requirements(self) -> tuple[str, ...]:
        """What the group's environment installs for this package."""
        own = (f"{self.name}=={self.version}",) if self.installed else ()
        return own + self.requires


def packages(group: str = "") -> tuple[Package, ...]:
    """Return the packages of all groups or of one, in the order of the groups and of their files' names."""
    found = [
        importlib.import_module(f"tests.downstream.packages.{module.name}").PACKAGE
        for module in sorted(pkgutil.iter_modules([str(ROOM / "packages")]), key=lambda module: module.name)
    ]
    chosen = [each for each in found if group in ("", each.group)]
    return tuple(sorted(chosen, key=lambda each: GROUPS.index(each.group)))
