"""Run the two sides of a migration page: its Python blocks are shared, its diff blocks have a before and an after."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LANGUAGES = {"sh", "python", "diff", "text", "json"}


def page_blocks(page: str) -> list[tuple[str, str]]:
    """Return (language, text) of every fenced block of `docs/guides/<page>.md`, in order.

    Raises:
        AssertionError: a block has a language that no test runs.
    """
    blocks = _BLOCK.findall((GUIDES / f"{page}.md").read_text(encoding="utf-8"))
    assert {language for language, _ in blocks} <= _LANGUAGES
    return blocks


def one_side(diff: str, sign: str) -> str:
    """Return one side of a diff: "-" is the text before, "+" the text after. Other lines begin with a space.

    >>> one_side("-a = 1\\n+a = 2\\n b = 3\\n", "+")
    'a = 2\\nb = 3\\n'
    """
    lines = diff.splitlines(keepends=True)
    assert all(line[0] in "+- \n" for line in lines)
    return "".join(line[1:] if line[0] != "\n" else line for line in lines if line[0] in (sign, " ", "\n"))


def run_side(
    page: str, sign: str, names: Mapping[str, Any] | None = None, replace: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run the Python blocks of a page and one side of its diffs, in one module's names, which are returned.

    Args:
        page: the page's name, without `.md`.
        sign: "-" for the script before, "+" for the one after.
        names: what the script takes from elsewhere.
        replace: text of a block -> text in its place. The blocks of the page must contain it.
    """
    scope: dict[str, Any] = {"__name__": page, **(names or {})}
    found: set[str] = set()
    for language, text in page_blocks(page):
        if language not in ("python", "diff"):
            continue
        code = one_side(text, sign) if language == "diff" else text
        for old, new in (replace or {}).items():
            found.update({old} if old in code else ())
            code = code.replace(old, new)
        exec(compile(code, f"docs/guides/{page}.md ({sign})", "exec", dont_inherit=True), scope)
    assert found == set(replace or {})
    return scope
