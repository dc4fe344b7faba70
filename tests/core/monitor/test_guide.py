"""docs/guides/monitor.md: the blocks of the reference print what stands below them, and its table has every option."""

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


@pytest.mark.parametrize("number", [0, 1])
def test_the_blocks_print_what_stands_there(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)[number]
    assert "polyamp.reference" in code
    found = io.StringIO()
    scope: dict[str, Any] = {}
    with contextlib.redirect_stdout(found):
        exec(code, scope)
    assert found.getvalue() == printed
    assert (tmp_path / "run.jsonl").is_file() == (number == 0)


def test_the_table_has_every_option_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", GUIDE, re.MULTILINE))
    parameters = inspect.signature(polyamp.Monitor).parameters
    assert rows == {name: str(each.default).replace("()", "none") for name, each in parameters.items()}


def test_the_writers_are_there() -> None:
    for name in re.findall(r"`(\w+Writer)\(", GUIDE):
        assert hasattr(writers, name) or hasattr(text_table, name)
