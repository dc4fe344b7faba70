"""docs/guides/tensorflow_fit.md and tensorflow_step.md tell the truth: their Python blocks run, in order."""

from __future__ import annotations

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
