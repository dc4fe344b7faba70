"""Guides tell the truth: the blocks of tensorflow_fit.md and tensorflow_step.md run in order, that of monitor.md prints
what stands below it.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")  # Keras's files
@pytest.mark.parametrize(("name", "count"), [("tensorflow_fit", 5), ("tensorflow_step", 1)])
def test_the_blocks_run(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (GUIDES / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == count
    module = ModuleType(f"{name}_document")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks:
        exec(compile(block, f"docs/guides/{name}.md", "exec"), module.__dict__)


def test_the_block_of_the_monitor_prints_what_stands_there() -> None:
    text = (GUIDES / "monitor.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n((?:(?!```).)*?polyamp_keras.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    found = io.StringIO()
    with contextlib.redirect_stdout(found):
        exec(compile(blocks[0][0], "docs/guides/monitor.md", "exec"), {})
    assert found.getvalue() == blocks[0][1]
