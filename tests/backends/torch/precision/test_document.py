"""docs/guides/torch_autocast.md tells the truth: its Python blocks run, in order, and its table names the op list."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from polyamp.rules.float32_op_families import OP_FAMILIES
from polyamp_torch.precision.op_list import TORCH_ONLY_FAMILIES, TORCH_OP_FAMILIES
from polyamp_torch.precision.torch_only.float32_gathers import GATHER_FUNCTIONS
from polyamp_torch.precision.torch_only.product_classification import PRODUCT_CLASSIFIERS

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
    assert families == {row.family for row in TORCH_OP_FAMILIES} | {"inner products", "gathers"}
    named = set(re.findall(r"\w+", " ".join(rows)))
    listed = ("exponentials", "logarithms", "sums", "cumulative sums", "softmax", *list(TORCH_ONLY_FAMILIES)[:2])
    for row in TORCH_OP_FAMILIES:
        if row.family in listed:
            missing = {name for name in row.names.split() if name not in named and not name.startswith("arc")}
            assert missing == set(), row
    functions = {function.__name__ for function in (*PRODUCT_CLASSIFIERS, *GATHER_FUNCTIONS)}
    sums = {"dot", "vdot", "inner", "linalg_vecdot", "matmul", "bmm", "tensordot", "einsum"}
    assert sums <= functions
    assert {name.removeprefix("linalg_") for name in sums} | {f.__name__ for f in GATHER_FUNCTIONS} - {
        "__getitem__"
    } <= named


def test_s04_the_op_list_has_every_family_and_names_its_own() -> None:
    assert {row.family for row in TORCH_OP_FAMILIES} == OP_FAMILIES.keys() | TORCH_ONLY_FAMILIES.keys()
    assert OP_FAMILIES.keys() & TORCH_ONLY_FAMILIES.keys() == set()
