"""docs/guides/torch_autocast.md and docs/reference/torch_op_list.md tell the truth: their Python blocks run, in order,
and the table of the latter names the op list.
"""

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

DOCS = Path(__file__).parents[4] / "docs"
OP_LIST = (DOCS / "reference" / "torch_op_list.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "count"), [("guides/torch_autocast", 8), ("reference/torch_op_list", 1)])
def test_the_blocks_run(page: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == count
    module = ModuleType("torch_autocast_document")  # torch.compile looks a function's globals up in its module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks:
        exec(compile(block, f"docs/{page}.md", "exec"), module.__dict__)


def test_the_table_names_every_function() -> None:
    table = OP_LIST.partition("| family | functions |")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    families = {line.split("|")[1].strip() for line in rows} - {""}
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
