"""The page on public models, as its blocks. Framework-free."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[3] / "docs" / "guides" / "moving_public_models.md"


def blocks(section: str) -> list[tuple[str, str]]:
    """(heading, code) of every Python block of a section, in the page's order."""
    text = PAGE.read_text(encoding="utf-8")
    found = []
    inside = heading = ""
    for match in re.finditer(r"^(##+) ([^\n]+)$|^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        level, title, code = match.groups()
        if level == "##":
            inside = title
        if level:
            heading = title
        elif inside == section:
            found.append((heading, code))
    return found
