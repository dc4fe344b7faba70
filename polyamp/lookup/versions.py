"""Check that installed frameworks meet the minimum versions of a backend's distribution.

The versions are in its metadata: `torch>=2.7; extra == "torch"`. So `pyproject.toml` is the only place that states
them, and an outdated framework is reported before an import of a feature that it lacks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)[^;]*?>=\s*([\d.]+)[^;]*(?:;.*extra\s*==\s*['\"]([^'\"]+)['\"])?")


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def outdated_requirement(entry: EntryPoint) -> str | None:
    """Return the requirement and the installed version as a phrase without a subject; None if nothing is outdated.

    It checks the extra with the backend's name or, for a distribution that is only a backend, all requirements. Missing
    distributions are not outdated.
    """
    dist = entry.dist
    extra = entry.module.partition(".")[0].removeprefix("polyamp_")
    for requirement in (dist.requires if dist is not None else None) or ():
        asked = _REQUIREMENT.match(requirement)
        if asked is None or asked[3] != (extra if dist is not None and dist.name == "polyamp" else None):
            continue
        found = installed_version(asked[1])
        if found is not None and () < _version_numbers(found) < _version_numbers(
            asked[2]
        ):  # () stands for a build without a version
            return (
                f"needs {asked[1]} {asked[2]} or newer. Received: {asked[1]} {found}, and "
                f"{'.'.join(map(str, _version_numbers(found)[:2]))} is below {asked[2]}."
            )
    return None


def _version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 7, 1) of "2.7.1+cpu", (2, 8, 0) of "2.8.0a0"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
