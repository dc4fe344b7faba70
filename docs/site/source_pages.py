"""The Markdown that Sphinx reads: a copy of `docs/`, and pages for the files outside of it that the pages link to.

The pages of `docs/` are written for a reader of the repository: a link may lead to an example or to the changelog.
On the site such a file is a page below `project/`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
PROJECT_PAGES: Final = ("examples/README.md", "CHANGELOG.md", "CONTRIBUTING.md")
"""Files outside of `docs/` that are always pages, because the table of contents names them."""
RULE_FOLDER: Final = "reference/rules"
"""Folder of the site's pages of rules, one each."""
LANGUAGES: Final = {".py": "python", ".toml": "toml", ".yml": "yaml"}
_FENCE: Final = re.compile(r"^(?P<fence>`{3,}).*?^(?P=fence)`*\s*$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\[\]]+)\]\((?P<target>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Return a Markdown text with its prose changed and its fenced blocks as they are."""
    parts, at = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[at : fence.start()]), fence.group()]
        at = fence.end()
    return "".join([*parts, change(text[at:])])


def rules(semantics: str) -> list[tuple[int, str, str]]:
    """Return number, title and anchor of each rule in the text of `semantics.md`, by number."""
    found = []
    for number, title in re.findall(r"^### S(\d+) (.*)$", semantics, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", f"S{number} {title}".lower())
        found.append((int(number), title, words.strip().replace(" ", "-")))
    return sorted(found)


def rule_page(number: int) -> str:
    """Return the site's page of a rule, without its ending."""
    return f"{RULE_FOLDER}/s{number}"


class SourceTree:
    """The folder of pages for Sphinx.

    Args:
        folder: where it is written; what stands there is removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        self._left = [ROOT / name for name in PROJECT_PAGES]

    def write(self) -> None:
        """Write every page of `docs/`, and then the files outside of it that pages lead to."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(
            DOCS, self.folder, ignore=shutil.ignore_patterns("README.md", "*.py", "*.pyc", "__pycache__", "site")
        )
        for page in sorted(DOCS.rglob("*.md")):
            self._write_page(page)
        written: set[Path] = set()
        while self._left:
            file = self._left.pop()
            if file not in written:
                written.add(file)
                self._write_page(file)

    def place(self, file: Path) -> Path:
        """Return the page of a file of the repository."""
        if file.is_relative_to(DOCS):
            return self.folder / ("index.md" if file == DOCS / "README.md" else file.relative_to(DOCS))
        name = str(file.relative_to(ROOT))
        return self.folder / "project" / (name if file.suffix == ".md" else f"{name}.md")

    def _write_page(self, file: Path) -> None:
        if file == DOCS / "README.md":
            return  # the index for readers of the repository; the site has `index.md`
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".md":
            text = outside_fences(text, lambda prose: LINK.sub(lambda link: self._link(file, link), prose))
        else:
            text = f"# `{file.relative_to(ROOT)}`\n\n``````{LANGUAGES[file.suffix]}\n{text}``````\n"
        page = self.place(file)
        if page.is_relative_to(self.folder / "project") and str(file.relative_to(ROOT)) not in PROJECT_PAGES:
            text = f"---\norphan: true\n---\n\n{text}"  # of no table of contents: a page leads to it
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")

    def _link(self, file: Path, link: re.Match[str]) -> str:
        target = (file.parent / link["target"]).resolve()
        if target.is_dir():
            if not (target / "README.md").exists():
                return link["text"]
            target /= "README.md"
        is_page = target.is_relative_to(DOCS) and target not in (DOCS / "README.md", DOCS / "semantics.md")
        if is_page and file.is_relative_to(DOCS):
            return link.group()
        if target.suffix != ".md" and target.suffix not in LANGUAGES:
            return link["text"]
        if not target.is_relative_to(DOCS):
            self._left.append(target)
        place = self.place(target)
        rule = re.match(r"#s(\d+)-", link["anchor"] or "") if target == DOCS / "semantics.md" else None
        if rule is not None:
            place = self.folder / f"{rule_page(int(rule[1]))}.md"
        path = os.path.relpath(place, self.place(file).parent)
        return f"[{link['text']}]({path}{link['anchor'] or ''})"
