"""docs/guides/diagnose.md: its block prints what stands below it, and its table has every outcome."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, get_args

from polyamp.diagnosis.report_data import Outcome

GUIDE = (Path(__file__).parents[4] / "docs" / "guides" / "diagnose.md").read_text(encoding="utf-8")


def test_the_block_prints_what_stands_there() -> None:
    ((code, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)
    found = io.StringIO()
    scope: dict[str, Any] = {}
    with contextlib.redirect_stdout(found):
        exec(code, scope)
    assert found.getvalue() == printed


def test_the_table_has_every_outcome() -> None:
    assert re.findall(r"^\| (\w+) \| [^|]+ \| [^|]+ \|$", GUIDE, re.MULTILINE)[1:] == list(get_args(Outcome))
