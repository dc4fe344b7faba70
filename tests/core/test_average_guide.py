"""docs/guides/averages.md: its block prints what stands below it, and its table has every option."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import polyamp

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "averages.md").read_text(encoding="utf-8")


def test_the_block_prints_what_stands_there() -> None:
    ((code, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)
    found, scope = io.StringIO(), {}  # type: tuple[io.StringIO, dict[str, Any]]
    with contextlib.redirect_stdout(found):
        exec(code, scope)
    assert found.getvalue() == printed


def test_the_table_has_every_option_with_its_default() -> None:
    rows = {name: default.strip('"') for name, default in re.findall(r"^\| `(\w+)` \| (\S+) \|", GUIDE, re.MULTILINE)}
    fields = {name: str(polyamp.Ema.defaults[name]) for name in polyamp.Ema.field_names}
    assert rows == {**fields, "exclude": "none"}
