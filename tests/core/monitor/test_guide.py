"""docs/guides/monitor.md: its block prints what stands below it, and its table has every option."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest

import polyamp
from polyamp.monitor import text_table, writers

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "monitor.md").read_text(encoding="utf-8")


def test_the_block_prints_what_stands_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)[0]
    found = io.StringIO()
    scope: dict[str, Any] = {}
    with contextlib.redirect_stdout(found):
        exec(code, scope)
    assert found.getvalue() == printed
    assert (tmp_path / "run.jsonl").is_file()


def test_the_table_has_every_option_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", GUIDE, re.MULTILINE))
    parameters = inspect.signature(polyamp.Monitor).parameters
    assert rows == {name: str(each.default).replace("()", "none") for name, each in parameters.items()}


def test_the_writers_are_there() -> None:
    for name in re.findall(r"`(\w+Writer)\(", GUIDE):
        assert hasattr(writers, name) or hasattr(text_table, name)
