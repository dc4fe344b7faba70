"""docs/guides/torch_autocast.md tells the truth: its Python blocks run, in order, and its table names the op list."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from polyamp.rules.sensitive import FAMILIES
from polyamp_torch.precision.gathers import GATHERS
from polyamp_torch.precision.op_list import OWN_FAMILIES, ROWS
from polyamp_torch.precision.products import PRODUCTS

DOCUMENT = (Path(__file__).parents[4] / "docs" / "guides" / "torch_autocast.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)


def test_the_blocks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(BLOCKS) == 9
    module = ModuleType("torch_autocast_document")  # torch.compile looks a function's globals up in its module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in BLOCKS:
        exec(compile(block, "docs/guides/torch_autocast.md", "exec"), module.__dict__)


def test_the_table_names_every_function() -> None:
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("|")]
    families = {line.split("|")[1].strip() for line in rows[2:]} - {""}
    assert families == {row.family for row in ROWS} | {"inner products", "gathers"}
    named = set(re.findall(r"\w+", " ".join(rows)))
    listed = ("exponentials", "logarithms", "sums", "cumulative sums", "softmax", *list(OWN_FAMILIES)[:2])
    for row in ROWS:
        if row.family in listed:
            missing = {name for name in row.names.split() if name not in named and not name.startswith("arc")}
            assert missing == set(), row
    functions = {function.__name__ for function in (*PRODUCTS, *GATHERS)}
    sums = {"dot", "vdot", "inner", "linalg_vecdot", "matmul", "bmm", "tensordot", "einsum"}
    assert sums <= functions
    assert {name.removeprefix("linalg_") for name in sums} | {f.__name__ for f in GATHERS} - {"__getitem__"} <= named


def test_s04_the_op_list_has_every_family_and_names_its_own() -> None:
    assert {row.family for row in ROWS} == FAMILIES.keys() | OWN_FAMILIES.keys()
    assert FAMILIES.keys() & OWN_FAMILIES.keys() == set()
