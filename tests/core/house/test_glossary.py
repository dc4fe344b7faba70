"""The glossary names classes and modules that exist; no two classes of the library share a name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ") for line in TEXT.splitlines() if line.startswith("| ") and "---" not in line][1:]


def test_the_glossary_has_at_most_fifty_words() -> None:
    words = [row[0].removeprefix("| ") for row in ROWS]
    assert 20 < len(words) <= 50
    assert words == sorted(words)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].removeprefix("| "))
def test_what_a_row_of_the_glossary_names_exists(row: list[str]) -> None:
    names = re.findall(r"`([\w.]+)`", row[2])
    assert names
    for name in names:
        base = ROOT / "backends" if name.startswith("polyamp_") else ROOT
        path = base.joinpath(*name.split(".")).with_suffix(".py")
        if path.is_file():
            continue
        module, _, attribute = name.rpartition(".")
        tree = ast.parse(base.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        aliases = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        assert attribute in classes | aliases, name


def test_a_class_name_stands_for_one_thing() -> None:
    """The same name once in each backend is one concept in three frameworks."""
    homes = defaultdict(set)
    for folder in ("polyamp", "backends"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    homes[node.name.lstrip("_")].add(path.relative_to(ROOT))
    several = {
        name: sorted(map(str, paths))
        for name, paths in homes.items()
        if len(paths) > 1 and len({path.parts[1] for path in paths if path.parts[0] == "backends"}) != len(paths)
    }
    assert several == {}
