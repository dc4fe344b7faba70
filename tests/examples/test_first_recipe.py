"""docs/tutorials/first_recipe.md: its blocks run in every framework, and the loss falls as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "first_recipe.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python ?(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
"""(framework or "", text) of each block."""


def test_the_blocks_run_in_order(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "first_recipe"}
    for only, block in BLOCKS:
        if only in ("", framework):
            exec(compile(block, "docs/tutorials/first_recipe.md", "exec"), scope)
    first, last = re.findall(r"loss ([\d.]+), scale 32768, updates (?:8|160)\n", capsys.readouterr().out)
    assert 2.0 < float(first) < 3.0
    assert float(last) < 0.1
    assert tuple(scope["logits"].shape) == (256, 10)
    assert int(scope["state"].step) == 160
