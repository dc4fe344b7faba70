"""The page of the rules' tests: `reference/rules.md`, which lists the tests of the conformance suite by rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from source_pages import DOCS, ROOT, rules

SUITE: Final = ROOT / "polyamp" / "conformance"
OTHER_TESTS: Final = ROOT / "tests"
_TEST: Final = re.compile(r"^ *def test_s(\d\d)_(\w+)\(", re.MULTILINE)


def write_rules(page: Path) -> None:
    """Write the page."""
    page.write_text(rules_markdown(), encoding="utf-8")


def rules_markdown() -> str:
    """Return the page: for each rule the tests that every backend passes."""
    semantics = (DOCS / "semantics.md").read_text(encoding="utf-8")
    suite, others = tests_by_rule(SUITE), tests_by_rule(OTHER_TESTS)
    parts = [
        "# Rules and their tests\n\n"
        "[Semantics](../semantics.md) has the rules themselves. Each has tests in `polyamp/conformance`, which every "
        "backend passes, and further ones in `tests`, which begin with the rule's number too. [What differs]"
        "(../deviations.md) names what a backend does not do yet.\n"
    ]
    for number, title, anchor in rules(semantics):
        own, more = suite.get(number, []), len(others.get(number, []))
        parts.append(f"## S{number} {title}\n\n[The rule](../semantics.md#{anchor}). ")
        parts[-1] += f"Tests in the suite: {len(own)}; elsewhere: {more}.\n"
        parts += [f"- {words.replace('_', ' ')} (`{file}`)" for file, words in own]
        parts.append("")
    return "\n".join(parts)


def tests_by_rule(folder: Path) -> dict[int, list[tuple[str, str]]]:
    """Return rule number -> (file, the test's name without its number) of the test functions in a folder."""
    found: dict[int, list[tuple[str, str]]] = {}
    for file in sorted(folder.rglob("test_*.py")):
        for number, words in _TEST.findall(file.read_text(encoding="utf-8")):
            found.setdefault(int(number), []).append((str(file.relative_to(folder)), words))
    return found
