"""S22: a user's own values in a checkpoint; what comes back, what is refused, and the guide."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_state import example
from divided_state import example as part
from divided_state import ranks

import polyamp
from polyamp import ArgumentError, CheckpointError

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "checkpoints.md").read_text(encoding="utf-8")
VALUES: dict[str, Any] = {
    "best_val_loss": 0.1,
    "bound": math.inf,
    "epoch": 2**70,
    "done": False,
    "note": 'größer "x"\n',
    "nothing": None,
    "model": {"widths": [4, [8]], "": {}},
}


@pytest.mark.parametrize("sharded", [False, True])
def test_s22_values_come_back_equal_and_the_arrays_too(tmp_path: Path, sharded: bool) -> None:
    path = tmp_path / "state"
    polyamp.save(example(1), path, sharded=sharded, extra=VALUES)
    found = polyamp.load_extra(str(path))
    assert found == VALUES
    assert type(found["done"]) is bool
    assert example(1).same_as(polyamp.restore(example(2), path).arrays)
    polyamp.save(example(1), path, sharded=sharded)
    assert polyamp.load_extra(path) == {}


def test_s22_scalars_become_numbers_of_python(tmp_path: Path) -> None:
    given = {"a": np.float32(0.1), "b": np.array(3), "c": np.float64(0.5), "d": np.bool_(True), "e": float("nan")}
    polyamp.save(example(1), tmp_path / "state", extra=given)
    found = polyamp.load_extra(tmp_path / "state")
    assert math.isnan(found.pop("e"))
    assert found == {"a": float(np.float32(0.1)), "b": 3, "c": 0.5, "d": True}
    assert [type(value) for value in found.values()] == [float, int, float, bool]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ([1.0], "extra must be a dict .* Received: extra=a list of 1"),
        ({"a": [1, {"b": (1, 2)}]}, r"extra\['a'\]\[1\]\['b'\] must be .*a tuple of 2.*Write list"),
        ({"a": np.ones(2)}, r"extra\['a'\] must be .*a ndarray \(numpy\).*tolist"),
        ({"a": {1: 2}}, r"keys of extra\['a'\] must be strings. Received: 1. Write str\(key\)"),
        ({"a": 1j}, r"extra\['a'\] must be .* Received: 1j"),
        ({"a": np.complex64(1j)}, r"extra\['a'\] must be .* Received: 1j"),
        ({"a": Path("x")}, r"extra\['a'\] must be .*Path.*what it is made from"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_s22_other_values_are_refused_by_name_and_nothing_is_written(
    tmp_path: Path, extra: Any, words: str, dry_run: bool
) -> None:
    with pytest.raises(ArgumentError, match=words):
        polyamp.save(example(1), tmp_path / "state", extra=extra, dry_run=dry_run)
    assert list(tmp_path.iterdir()) == []


def test_s22_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    polyamp.save(example(1), tmp_path / "file", extra={"note": "first"})
    polyamp.save(example(1), tmp_path / "folder", sharded=True, extra={"note": "first"})
    for file in (tmp_path / "file", tmp_path / "folder" / "polyamp.json"):
        content = file.read_bytes()
        assert b"first" in content
        file.write_bytes(content.replace(b"first", b"fifth"))
    for name in ("file", "folder"):
        with pytest.raises(CheckpointError, match="damaged"):
            polyamp.load_extra(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        polyamp.load_extra(tmp_path / "none")


def test_s33_a_folder_has_the_values_of_rank_0(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    assert ranks(2, lambda each: polyamp.save(part(each, 1), path, extra={"rank": each.rank})) == [None] * 2
    assert polyamp.load_extra(path) == {"rank": 0}
    assert json.loads((path / "polyamp.json").read_text())["extra"] == '{"rank": 0}'


def test_the_guides_blocks_print_what_stands_there() -> None:
    scope: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", GUIDE, re.DOTALL)
    assert len(blocks) == 4
    for code, printed in blocks:
        found = io.StringIO()
        with contextlib.redirect_stdout(found):
            exec(code, scope)
        assert found.getvalue() == printed
