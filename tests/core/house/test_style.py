"""Rules of style that no linter checks: docstrings and file lengths."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LONGEST = 450
SHIPPED = [path for folder in ("polyamp", "backends") for path in sorted((ROOT / folder).rglob("*.py"))]
OTHER = [path for folder in ("tests", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def undocumented(source: str) -> list[str]:
    """Public top-level functions and classes of a module that have no docstring; pytest's hooks and signatures of an
    overloaded function need none."""
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, Definition)
        and not node.name.startswith(("_", "pytest_"))
        and ast.get_docstring(node) is None
        and "overload" not in {getattr(decorator, "id", "") for decorator in node.decorator_list}
    ]


@pytest.mark.parametrize("path", [*SHIPPED, *OTHER], ids=name)
def test_every_module_begins_with_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "say what the file holds and who calls it"


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_shipped_files_are_short_and_documented(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= LONGEST
    assert path.name.startswith("test_") or undocumented(source) == []


def test_an_undocumented_name_is_seen() -> None:
    assert undocumented(
        "def f(): ...\nclass A: ...\ndef _g(): ...\ndef h():\n    'Says.'\n@overload\ndef i(): ..."
    ) == ["f", "A"]
