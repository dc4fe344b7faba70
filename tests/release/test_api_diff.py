"""`api_diff` on a change of one tree; `make release` runs this, for griffe is in the extra `release`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.release.api_diff import ROOT, compare_trees, public_names


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A copy of the source tree."""
    for folder in ("polyamp", "backends"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) >= 1
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_what_breaks_is_named_and_what_is_internal_is_not(other: Path) -> None:
    assert public_names(ROOT)["polyamp.save"] == "polyamp.train.checkpoint.save"
    change(other / "polyamp/train/checkpoint.py", "    dry_run: bool = False,\n", "")
    change(other / "polyamp/train/checkpoint.py", "def read(path", "def read_it(path")
    change(other / "polyamp/__init__.py", '    "lint",\n', "")
    assert compare_trees(ROOT, ROOT) == []
    found = compare_trees(ROOT, other)
    assert found == ["polyamp.lint: removed", "polyamp.save: save(dry_run): Parameter was removed"]
