"""docs/explanation: the blocks run, and the numbers beside the pictures are what the pictures were drawn from."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "explanation" / "mixed_precision.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_formats", DOCS / "images" / "draw_formats.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_blocks_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_the_shares_of_gradients_are_those_of_the_page(script: ModuleType) -> None:
    plain, scaled = (script.shares(values) for values in script.gradients())
    assert [round(share) for share in (*plain, scaled[0])] == [67, 33, 2]
    (written,) = re.findall(r"Without a loss scale (\d+) % become 0 in float16 and (\d+) % .* 2\^15, (\d+) %", PAGE)
    assert [int(number) for number in written] == [67, 33, 2]


def test_the_run_is_that_of_the_page(script: ModuleType) -> None:
    scales, losses, skips = script.train_from_a_high_scale()
    assert (scales[0], min(scales), max(scales[5:]), len(losses), len(skips)) == (24.0, 18.0, 20.0, 300, 10)
    assert skips[:5] == [0, 1, 2, 3, 4]
    assert "then it moves between 2^18 and 2^20; ten of 300 steps are skipped" in PAGE
