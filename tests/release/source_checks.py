"""What a release needs of the source tree: its version, in the changelog too, and addresses that are filled in."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

from tests.release.api_diff import ROOT

PLACEHOLDER: Final = "example.invalid"
"""Part of every address in `[project.urls]` that a release has to replace."""
_HEADING: Final = re.compile(r"^## (.+)$", re.MULTILINE)


def read_version(root: Path = ROOT) -> str:
    """Return the version of the source tree."""
    scope: dict[str, str] = {}
    exec((root / "polyamp" / "_version.py").read_text(encoding="utf-8"), scope)
    return scope["__version__"]


def changelog_problems(text: str, version: str) -> list[str]:
    """Return what keeps the changelog from being that of a version.

    >>> changelog_problems("# Changelog\\n\\n## 0.2.0 - 2026-11-27\\n", "0.2.0")
    []
    >>> changelog_problems("# Changelog\\n\\n## Unreleased\\n", "0.2.0")
    ["CHANGELOG.md begins with 'Unreleased'. Name that section '0.2.0 - YYYY-MM-DD'."]
    """
    first = _HEADING.search(text)
    title = first[1] if first else "nothing"
    if re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", title):
        return []
    return [f"CHANGELOG.md begins with {title!r}. Name that section '{version} - YYYY-MM-DD'."]


def url_problems(text: str) -> list[str]:
    """Return the addresses of pyproject.toml that are placeholders."""
    urls: dict[str, str] = tomllib.loads(text)["project"]["urls"]
    names = [name for name, url in urls.items() if PLACEHOLDER in url]
    return [f"[project.urls] of pyproject.toml has placeholders: {', '.join(names)}."] if names else []
