"""No page of the site is longer than 1,500 words, so that each can be read at once. Code and tables count."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIMIT = 1500
EXEMPT = ("docs/measurements/data/", "CHANGELOG.md", "docs/README.md")
"""Tables as data, the changelog, and the index for readers of the repository, which is no page of the site. The
reference that is made from docstrings is no file."""


def words(text: str) -> int:
    """Return the number of words: what stands between spaces and has a letter or a digit."""
    return sum(any(character.isalnum() for character in word) for word in text.split())


def test_no_page_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    rule_pages, source_pages = (importlib.import_module(name) for name in ("rule_pages", "source_pages"))
    semantics = ROOT / "docs" / "semantics.md"
    rules = rule_pages.rule_texts(semantics.read_text(encoding="utf-8"))
    pages = {f"{page}.md": text for page, text in rule_pages.rule_markdown(rules).items()}
    pages["semantics.md"] = rule_pages.list_markdown(rules)
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in source_pages.PROJECT_PAGES), ROOT / "README.md"]
    pages |= {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files if file != semantics}
    assert len(pages) > 90
    long = {page: words(text) for page, text in pages.items() if not page.startswith(EXEMPT) and words(text) > LIMIT}
    assert not long, f"cut what is longer than {LIMIT} words"
