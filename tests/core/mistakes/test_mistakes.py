"""The commonest mistakes that need no framework: policies, optimizers, schedules, scalers, recipes and their files."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mistakes import rows_files
from tests.mistakes.bench import message, names, typed
from tests.mistakes.table import FRAMEWORKS, Row, of, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    rows_files.files(made)
    return made


@pytest.mark.parametrize("row", of(None), ids=lambda row: row.typed)
def test_s20_a_mistake_is_said(row: Row, folder: Path) -> None:
    before = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    error = typed(row, names(folder))
    assert error is not None, "nothing was said"
    assert row.error in {kind.__name__ for kind in type(error).__mro__}
    assert re.search(row.said, message(error), re.DOTALL), message(error)
    assert {path: path.read_bytes() for path in sorted(folder.iterdir())} == before


def test_the_table_is_whole() -> None:
    every = list(rows())
    assert [typed for typed, count in Counter((row.typed, row.where) for row in every).items() if count > 1] == []
    assert len(every) >= 120
    for framework in FRAMEWORKS:
        assert len(of(framework)) >= 100
