"""Whether the frameworks that are installed are new enough for a backend, by what its distribution asks for.

Its metadata say it: `torch>=2.7; extra == "torch"`. So the oldest version stands in one place, `pyproject.toml`, and an
old framework is named before an import of something that it does not have yet. Called by `registry`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_OLDEST: Final = re.compile(r"([A-Za-z0-9._-]+)[^;]*?>=\s*([\d.]+)[^;]*(?:;.*extra\s*==\s*['\"]([^'\"]+)['\"])?")


def installed(distribution: str) -> str | None:
    """The version of a distribution, None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def too_old(entry: EntryPoint) -> str | None:
    """What a backend needs and what is there instead, without a subject; None if all is new enough.

    Looked at are the extra of the backend's own name or, of a distribution that is nothing but a backend, all that it
    asks for. What is not installed is not old.
    """
    dist = entry.dist
    extra = entry.module.partition(".")[0].removeprefix("polyamp_")
    for requirement in (dist.requires if dist is not None else None) or ():
        asked = _OLDEST.match(requirement)
        if asked is None or asked[3] != (extra if dist is not None and dist.name == "polyamp" else None):
            continue
        found = installed(asked[1])
        if found is not None and () < _numbers(found) < _numbers(asked[2]):  # () is of a build without a version
            return (
                f"needs {asked[1]} {asked[2]} or newer. Received: {asked[1]} {found}, and "
                f"{'.'.join(map(str, _numbers(found)[:2]))} is below {asked[2]}."
            )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 7, 1) of "2.7.1+cpu", (2, 8, 0) of "2.8.0a0"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
