"""The conformance suite covers the written semantics: every rule has a test that carries its number."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import polyamp.conformance

SUITE = Path(polyamp.conformance.__file__).parent
SEMANTICS = Path(__file__).parents[3] / "docs" / "semantics.md"
WITHOUT_A_TEST: set[int] = set()
"""New rules; each leaves this set with the commit that brings its test."""
TO_COME: set[int] = set()
"""Numbers given to rules that are being written; they are not used for others."""


def rules_tested() -> set[int]:
    """Rule numbers in the names of the suite's test functions."""
    names = [
        node.name
        for path in SUITE.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    return {int(found[1]) for name in names if (found := re.match(r"test_s(\d\d)_", name))}


def test_every_rule_has_a_test() -> None:
    written = {
        int(number) for number in re.findall(r"^### S(\d+)\b", SEMANTICS.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert written | TO_COME == set(range(1, 37))
    assert rules_tested() == written - WITHOUT_A_TEST
