"""docs/guides/policies.md tells the truth: its blocks run and print what it says, its tables are the dialects'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyamp import Policy
from polyamp.recipe.policy_names import DIALECTS

DOCUMENT = (Path(__file__).parents[3] / "docs" / "guides" / "policies.md").read_text(encoding="utf-8")


def rows(columns: int) -> list[list[str]]:
    """The cells of the rows of the tables with so many columns, without the heads."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in DOCUMENT.splitlines() if line[:1] == "|"]
    return [cells for cells in found if len(cells) == columns and "`" in cells[0]]


def test_the_block_prints_what_stands_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", DOCUMENT, re.DOTALL)[:2]
    exec(code, {})
    assert capsys.readouterr().out == printed


def test_the_table_has_every_word_with_its_meaning() -> None:
    seen: dict[str, set[str]] = {}
    for words, library, param, compute, output, kind in rows(6):
        for word in re.findall(r"`([^`]+)`", words):
            policy = Policy(word)
            assert (policy.param, policy.compute, policy.output) == (param, compute, output), word
            assert kind.startswith("mixed") == ("[mixed" in str(policy)), word
            assert (kind == "pure") == ("[pure" in str(policy)), word
            assert (policy.mode or "") == "".join(re.findall(r'mode="(\w+)"', kind)), word
            seen.setdefault(library.lower(), set()).add(word)
    assert seen == {dialect: set(words) for dialect, words in DIALECTS.items()}


def test_the_table_of_jmps_strings() -> None:
    table = rows(4)
    assert len(table) == 4
    for word, *dtypes in table:
        policy = Policy(word.strip("`"))
        assert [policy.param, policy.compute, policy.output] == dtypes
        assert policy.mode == "cast"
