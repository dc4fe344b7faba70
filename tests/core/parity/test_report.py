"""`Report`: what it says of itself, and its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyamp.errors import ArgumentError
from polyamp.parity.report import Report
from tests.core.parity import reports

KINDS = reports.kinds()


@pytest.mark.parametrize("name", KINDS)
def test_json_keeps_everything(name: str) -> None:
    report = KINDS[name]
    again = Report.from_json(report.to_json())
    assert again == report
    assert type(again) is Report
    assert (again.agrees, again.first) == (report.agrees, report.first)


def test_agreement_needs_every_side_and_a_comparison() -> None:
    assert {name for name, report in KINDS.items() if report.agrees} == {"agrees"}
    with pytest.raises(TypeError, match=r"ask report\.agrees"):
        bool(KINDS["agrees"])


def test_save_makes_the_folder_and_names_the_page(tmp_path: Path) -> None:
    page = KINDS["parts"].save(tmp_path / "deep" / "er")
    assert page == tmp_path / "deep" / "er" / "report.html"
    assert Report.from_json(page.with_name("report.json").read_bytes()) == KINDS["parts"]


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ArgumentError, match="folder must be one that can be written to"):
        KINDS["parts"].save(tmp_path / "taken")
