"""`polyamp rules`: every rule that a docstring or a message cites can be read."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from polyamp.cli.app import app
from polyamp.cli.rules import rule_texts, semantics_file

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")


def printed(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["rules", *arguments])
    assert done.exit_code == status, done.output
    return done.output


def test_a_rule_is_printed_whole_and_nothing_else() -> None:
    text = printed("S12")
    assert text.startswith("S12 Skipped steps\n")
    body = PAGE.split("### S12 Skipped steps\n")[1].split("\n### S13")[0].strip()
    assert body in text
    assert printed("s12") == printed("12") == text
    assert printed("S12", "S1") == text + "\n" + printed("S1")


def test_the_list_has_every_rule() -> None:
    lines = printed().splitlines()
    assert [line.split(maxsplit=1)[0] for line in lines] == [f"S{number}" for number in range(1, 37)]
    assert lines[11] == "S12 Skipped steps"


def test_an_unknown_rule_is_an_error() -> None:
    assert "there is no rule S99." in printed("S99", status=2)


def test_every_rule_that_is_cited_exists() -> None:
    known = rule_texts(semantics_file().read_text(encoding="utf-8"))
    for folder in ("polyamp", "backends"):
        for file in (ROOT / folder).rglob("*.py"):
            cited = set(re.findall(r"\b(S\d{1,2})\b", file.read_text(encoding="utf-8")))
            assert cited - {*known} - {"S99", "S501"} == set(), file
