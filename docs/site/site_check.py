"""Checks of the built site: its links, pages that nothing leads to, what a page loads, and what the search finds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urljoin, urlsplit

from source_pages import RULE_FOLDER, rule_page, rules

START: Final = "index.html"
API_INDEX: Final = "reference/api/index.html"
RULE_LIST: Final = "semantics.html"
GENERATED: Final = ("genindex.html", "search.html", "py-modindex.html")
"""Pages of Sphinx's own that a reader reaches by the search field, or not at all."""
_LOADED: Final = {"script": "src", "img": "src", "iframe": "src", "source": "src", "audio": "src", "video": "src"}
_LINKS_LOADED: Final = ("stylesheet", "icon", "shortcut", "preload", "prefetch", "modulepreload", "manifest")
_CSS_LOADS: Final = re.compile(r"""url\(\s*["']?\s*((?:https?:)?//[^"')]+)|@import\s+["']((?:https?:)?//[^"']+)""")
_JS_LOADS: Final = re.compile(
    r"""(?:fetch|import|importScripts|Worker|\.src\s*=|\.href\s*=|from)\s*\(?\s*["'`]((?:https?:)?//[^"'`]+)"""
)


class HtmlPage(HTMLParser):
    """What one page holds.

    Attributes:
        anchors: every `id`.
        links: targets of `<a href>`.
        loaded: addresses that a browser asks for when it opens the page.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and set(values.get("rel", "").split()) & set(_LINKS_LOADED):
            self.loaded.append(values["href"])
        elif _LOADED.get(tag) in values:
            self.loaded.append(values[_LOADED[tag]])
        self.loaded += _style_loads(values.get("style", ""))


@dataclass
class BuiltSite:
    """A built site.

    Args:
        folder: of the HTML files.
    """

    folder: Path
    pages: dict[str, HtmlPage] = field(init=False)

    def __post_init__(self) -> None:
        files = sorted(self.folder.rglob("*.html"))
        self.pages = {
            str(file.relative_to(self.folder)): HtmlPage(file.read_text(encoding="utf-8"))
            for file in files
            if "_static" not in file.parts
        }

    def broken_links(self) -> list[str]:
        """Return "page: target" of links to files or anchors that are not there."""
        found = []
        for name, page in self.pages.items():
            for link in page.links:
                target, anchor = _inside(name, link)
                if target is None:
                    continue
                anchors = self.pages[target].anchors if target in self.pages else set()
                if not (self.folder / target).is_file() or (anchor and anchor not in anchors):
                    found.append(f"{name}: {link}")
        return found

    def orphans(self) -> list[str]:
        """Return the pages that no way leads to from the start."""
        left, reached = [START], {START}
        while left:
            name = left.pop()
            for link in self.pages[name].links:
                target, _ = _inside(name, link)
                if target in self.pages and target not in reached:
                    reached.add(target)
                    left.append(target)
        return sorted(set(self.pages) - reached - set(GENERATED))

    def outside_addresses(self) -> list[str]:
        """Return "file: address" of what a page would load from another host."""
        found = [
            f"{name}: {address}"
            for name, page in self.pages.items()
            for address in page.loaded
            if urlsplit(address).netloc
        ]
        for file in sorted(self.folder.rglob("*")):
            loads = {".css": _style_loads, ".js": _script_loads}.get(file.suffix)
            if loads is not None:
                text = file.read_text(encoding="utf-8")
                found += [f"{file.relative_to(self.folder)}: {address}" for address in loads(text)]
        return found

    def missing_from_search(self, names: Iterable[str]) -> list[str]:
        """Return the public names that the search does not find."""
        text = (self.folder / "searchindex.js").read_text(encoding="utf-8")
        index: dict[str, Any] = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
        known = {
            f"{prefix}.{entry[-1]}" if prefix else entry[-1]
            for prefix, entries in index["objects"].items()
            for entry in entries
        }
        return sorted(set(names) - known)

    def missing_for_language_models(self) -> list[str]:
        """Return the targets of links in `llms.txt` that are not there."""
        links = re.findall(r"^- \[.*\]\((.*)\)", (self.folder / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
        return [link for link in links if not (self.folder / link).is_file()]

    def unlinked_names(self, names: Iterable[str]) -> list[str]:
        """Return the public names to which the reference's index has no link."""
        anchors = {urlsplit(link).fragment.removeprefix("module-") for link in self.pages[API_INDEX].links}
        return sorted(set(names) - anchors)

    def unlinked_rules(self, semantics: str) -> list[str]:
        """Return the rules to which no page but the list of rules and the rules' own pages has a link."""
        anchors = {
            urlsplit(link).fragment
            for name, page in self.pages.items()
            if name != RULE_LIST and not name.startswith(f"{RULE_FOLDER}/")
            for link in page.links
        }
        return [f"S{number}" for number, _, anchor in rules(semantics) if anchor not in anchors]

    def missing_rules(self, semantics: str) -> list[str]:
        """Return the rules of `semantics.md` that have no page, or whose page lacks the rule's anchor."""
        found = []
        for number, _, anchor in rules(semantics):
            page = self.pages.get(f"{rule_page(number)}.html")
            if page is None or anchor not in page.anchors:
                found.append(f"S{number}")
        return found


def _inside(page: str, link: str) -> tuple[str | None, str]:
    """Return the file and the anchor that a link leads to; None for another host."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None, ""
    target = unquote(urljoin(page, parts.path)) if parts.path else page
    return (f"{target}{START}" if target.endswith("/") else target), unquote(parts.fragment)


def _style_loads(text: str) -> list[str]:
    return [first or second for first, second in _CSS_LOADS.findall(text)]


def _script_loads(text: str) -> list[str]:
    return _JS_LOADS.findall(text)
