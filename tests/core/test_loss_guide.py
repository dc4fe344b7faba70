"""docs/guides/losses.md: its block prints what stands below it, and its table has every loss with its arguments."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import polyamp

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "losses.md").read_text(encoding="utf-8")


def test_the_block_prints_what_stands_there() -> None:
    ((code, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)
    scope: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as found:
        exec(code, scope)
    assert found.getvalue() == printed


def test_the_table_has_every_loss_and_its_arguments() -> None:
    rows = re.findall(r"^\| (`\w+\(.*?) \| (.*?) \|", GUIDE, re.MULTILINE)
    signatures = {name: given for cell, _ in rows for name, given in re.findall(r"`(\w+)\((.*?)\)`", cell)}
    losses = {name for name in polyamp.losses.__all__ if name[0].islower() and name != "count"}
    assert signatures.keys() == losses
    for name, given in signatures.items():
        parameters = inspect.signature(getattr(polyamp.losses, name)).parameters
        required = [each.name for each in parameters.values() if each.default is each.empty]
        assert given.split(", ") == required, name
    for cell, words in rows:
        for name in re.findall(r"`(\w+)\(", cell):
            parameters = inspect.signature(getattr(polyamp.losses, name)).parameters
            assert set(re.findall(r"`(\w+)`", words)) <= set(parameters), name
