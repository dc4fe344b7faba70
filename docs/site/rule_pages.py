"""Pages of the rules: `semantics.md` of the site is their list, and each rule has a page with its tests and code.

`docs/semantics.md` stays the one binding file. Here it is cut at its headings.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from source_pages import DOCS, LINK, ROOT, RULE_FOLDER, outside_fences, rule_page

SUITE: Final = ROOT / "polyamp" / "conformance"
OTHER_TESTS: Final = ROOT / "tests"
CODE: Final = ("polyamp/recipe", "polyamp/rules", "polyamp/train")
"""Folders of the core whose files name the rules that they hold in their first docstring."""
_TEST: Final = re.compile(r"^ *def test_s(\d\d)_(\w+)\(", re.MULTILINE)
_RANGE: Final = re.compile(r"S(\d+)(?: to S(\d+))?")


class RuleText(NamedTuple):
    """One rule as `semantics.md` has it: number, title, group (the heading above it), and what stands below."""

    number: int
    title: str
    group: str
    body: str


def write_rules(source: Path) -> None:
    """Write the list of rules and a page for each into the folder of the site's pages."""
    found = rule_texts((DOCS / "semantics.md").read_text(encoding="utf-8"))
    (source / RULE_FOLDER).mkdir(parents=True, exist_ok=True)
    for page, text in rule_markdown(found).items():
        (source / f"{page}.md").write_text(text, encoding="utf-8")
    (source / "semantics.md").write_text(list_markdown(found), encoding="utf-8")


def rule_texts(semantics: str) -> list[RuleText]:
    """Return the rules in the order of the text."""
    found, group = [], ""
    for part in re.split(r"^(?=##+ )", semantics, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        match = re.fullmatch(r"### S(\d+) (.*)", heading)
        if match is None:
            group = heading.removeprefix("## ")
        else:
            found.append(RuleText(int(match[1]), match[2], group, body.strip()))
    return found


def list_markdown(found: list[RuleText]) -> str:
    """Return the page that replaces `semantics.md` on the site: its first paragraph, and a line for each rule."""
    semantics = (DOCS / "semantics.md").read_text(encoding="utf-8")
    parts = [semantics.partition("\n## ")[0].strip(), ""]
    for group in dict.fromkeys(rule.group for rule in found):
        parts += [f"## {group}", ""]
        for rule in found:
            if rule.group == group:
                sentence = re.split(r"(?<=\.)\s", rule.body, maxsplit=1)[0]
                parts.append(f"- [S{rule.number} {rule.title}]({rule_page(rule.number)}.md): {sentence}")
        parts.append("")
    tree = "\n".join(f"S{number} {title} <{rule_page(number)}>" for number, title, *_ in sorted(found))
    return "\n".join([*parts, f"```{{toctree}}\n:hidden:\n\n{tree}\n```\n"])


def rule_markdown(found: list[RuleText]) -> dict[str, str]:
    """Return page -> text for each rule: the rule, the tests that every backend passes, and where the core has it."""
    suite, others, code = tests_by_rule(SUITE), tests_by_rule(OTHER_TESTS), code_by_rule()
    pages = {}
    for rule in found:
        own, more = suite.get(rule.number, []), len(others.get(rule.number, []))
        parts = [f"# S{rule.number} {rule.title}", "", outside_fences(rule.body, _moved), "", "## Tests", ""]
        parts += [f"Tests in the suite that every backend passes: {len(own)}; in `tests`: {more}.", ""]
        parts += [f"- {words.replace('_', ' ')} (`{file}`)" for file, words in own]
        if rule.number in code:
            parts += ["", "## Code", "", ", ".join(f"`{file}`" for file in code[rule.number]) + "."]
        pages[rule_page(rule.number)] = "\n".join([*parts, ""])
    return pages


def tests_by_rule(folder: Path) -> dict[int, list[tuple[str, str]]]:
    """Return rule number -> (file, the test's name without its number) of the test functions in a folder."""
    found: dict[int, list[tuple[str, str]]] = {}
    for file in sorted(folder.rglob("test_*.py")):
        for number, words in _TEST.findall(file.read_text(encoding="utf-8")):
            found.setdefault(int(number), []).append((str(file.relative_to(folder)), words))
    return found


def code_by_rule() -> dict[int, list[str]]:
    """Return rule number -> the files of the core whose first docstring names the rule."""
    found: dict[int, list[str]] = {}
    for file in sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        docstring = file.read_text(encoding="utf-8").partition('"""')[2].partition('"""')[0]
        numbers = set()
        for first, last in _RANGE.findall(docstring):
            numbers |= set(range(int(first), int(last or first) + 1))
        for number in sorted(numbers):
            found.setdefault(number, []).append(str(file.relative_to(ROOT)))
    return found


def _moved(prose: str) -> str:
    """Return a text of `semantics.md` with its relative links as a page of a rule has to write them."""
    up = os.path.relpath(".", RULE_FOLDER)
    return LINK.sub(lambda link: f"[{link['text']}]({PurePosixPath(up, link['target'])}{link['anchor'] or ''})", prose)
