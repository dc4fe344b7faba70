"""Run the two sides of a migration page: its Python blocks are shared, its diff blocks have a before and an after."""

from __future__ import annotations

import re
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


def run_side(page: str, sign: str, names: dict[str, Any] | None = None, **changes: str) -> dict[str, Any]:
    """Run the Python blocks of a page and one side of its diffs, in one module's names, which are returned.

    Args:
        page: the page's name, without `.md`.
        sign: "-" for the script before, "+" for the one after.
        names: what the script takes from elsewhere.
        **changes: name -> value of an assignment at the beginning of a line, to be put in place of the page's value.
    """
    scope: dict[str, Any] = {"__name__": page, **(names or {})}
    for language, text in page_blocks(page):
        if language not in ("python", "diff"):
            continue
        code = one_side(text, sign) if language == "diff" else text
        for name, value in changes.items():
            code = re.sub(rf"^{name} = .*$", f"{name} = {value}", code, flags=re.MULTILINE)
        exec(compile(code, f"docs/guides/{page}.md ({sign})", "exec"), scope)
    return scope
