"""The documents name only what is there: relative links, headings that links lead to, and files named in text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SINGLE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
FOLDERS = ("docs", "examples", "backends", "polyamp")
DOCUMENTS = [*SINGLE, *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md")))]
CODE = [path for folder in (*FOLDERS, "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
NAMED = re.compile(r"`((?:benchmarks|backends|docs|examples|polyamp|tests)/[\w/.]+)`")
"""A path from the repository's root, in backticks."""
PAGE = re.compile(r"(?<![\w/.])docs/[\w/]+\.md")


ABSENT = {"backends/__init__.py"}
"""Named because it must not be there."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(text: str) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """What can stand behind `#` in a link to this document, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def dead_links(path: Path) -> list[str]:
    """Targets of relative links in a document that are not there, or have no such heading."""
    dead = []
    for link in re.findall(r"\]\(<?([^)>\s]+)>?\)", prose(path.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target) if target else path
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    assert dead_links(path) == []


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=name)
def test_every_file_named_in_a_document_exists(path: Path) -> None:
    text = prose(path.read_text(encoding="utf-8"))
    assert [named for named in NAMED.findall(text) if named not in ABSENT and not (ROOT / named).exists()] == []


def test_every_page_named_in_code_exists() -> None:
    named = {(name(path), page) for path in CODE for page in PAGE.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert [(file, page) for file, page in sorted(named) if not (ROOT / page).exists()] == []


def test_every_page_stands_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", index.read_text())}
    assert set((ROOT / "docs").rglob("*.md")) - {index} <= linked


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One page\n\n[a](gone.md) [b](#one-page) [c](#two) [d](page.md#one-page)\n```\n[e](no.md)\n```\n")
    assert dead_links(page) == ["gone.md", "#two"]
