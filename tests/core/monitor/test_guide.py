"""The guides of the monitor: the blocks of the reference print what stands below them; the table has every option."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import polyamp
from polyamp.cli import app as cli
from polyamp.monitor import text_table, writers

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
GUIDE = (GUIDES / "monitor.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["monitor", "monitor_outputs", "monitor_float8"])
def test_the_blocks_print_what_stands_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (GUIDES / f"{name}.md").read_text(encoding="utf-8")
    code, printed = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)[0]
    assert "polyamp.reference" in code
    found = io.StringIO()
    scope: dict[str, Any] = {}
    with contextlib.redirect_stdout(found):
        exec(code, scope)
    assert found.getvalue() == printed
    assert (tmp_path / "run.jsonl").is_file() == (name == "monitor")
    for command, shown in re.findall(r"^\$ polyamp (.+)\n((?:.*\n)*?)```", text, re.MULTILINE):
        output = CliRunner(env={"COLUMNS": "118"}).invoke(cli.app, command.split()).output
        assert [line.rstrip() for line in output.strip().splitlines()] == shown.splitlines()


def test_the_table_has_every_option_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", GUIDE, re.MULTILINE))
    parameters = inspect.signature(polyamp.Monitor).parameters
    assert rows == {name: str(each.default).replace("()", "none") for name, each in parameters.items()}


def test_the_writers_are_there() -> None:
    for name in re.findall(r"`(\w+Writer)\(", GUIDE):
        assert hasattr(writers, name) or hasattr(text_table, name)
