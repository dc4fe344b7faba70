"""docs/guides/tensorflow_policy.md tells the truth: its Python blocks run. The lists of
docs/reference/keras_layer_dtypes.md are those of the code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from polyamp_keras.precision import layer_dtypes, op_list

DOCS = Path(__file__).parents[4] / "docs"
GUIDE = (DOCS / "guides" / "tensorflow_policy.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
DTYPES = (DOCS / "reference" / "keras_layer_dtypes.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")  # Keras's files
def test_the_blocks_run() -> None:
    assert len(BLOCKS) == 8
    names: dict[str, Any] = {"__name__": "document"}
    for block in BLOCKS:
        exec(compile(block, "docs/guides/tensorflow_policy.md", "exec"), names)


def test_every_sensitive_layer_and_head_name_is_listed() -> None:
    listed = set(re.findall(r"`(\w+)`", DTYPES))
    layers = {layer.__name__ for layer in op_list.SENSITIVE_LAYERS if "Average" not in layer.__name__}
    assert layers - listed == set()
    assert layer_dtypes._HEAD_NAMES - listed == set()


def test_every_reason_is_in_the_table() -> None:
    table = DTYPES.partition("| a layer that |")[2].partition("\n\n")[0]
    rows = [line.split("|")[3] for line in table.splitlines()[2:]]
    shown = {word.strip() for row in rows for word in row.split(",")}
    reasons = re.search(r"why: (.*?)\n        parent:", layer_dtypes.LayerDtype.__doc__ or "", re.DOTALL)
    assert reasons is not None
    assert shown == set(re.findall(r'"(.*?)"', reasons[1])) - {"product", "gather"}
