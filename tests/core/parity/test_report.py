"""`Report`: what it says of itself, and its files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from polyamp.errors import ArgumentError
from polyamp.parity.report.report import Report
from tests.core.parity import reports

KINDS = reports.kinds()
SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "parity_report.schema.json"


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


def test_numpys_numbers_and_what_is_not_finite_can_be_written() -> None:
    report = KINDS["parts"]
    curve = msgspec.structs.replace(report.curves[0], loss=[np.float32(0.5), float("nan"), float("inf")])
    again = Report.from_json(msgspec.structs.replace(report, curves=[curve]).to_json())
    assert again.curves[0].loss == [0.5, None, None]
    with pytest.raises(NotImplementedError, match="plain data"):
        msgspec.structs.replace(report, recipes={"torch": {"optimizer": object()}}).to_json()


def test_the_schema_in_the_documents_is_up_to_date() -> None:
    assert json.loads(SCHEMA.read_text()) == json.loads(json.dumps(Report.schema())), (
        "write json.dumps(Report.schema(), indent=1) to the file"
    )


def test_every_class_and_field_of_the_schema_is_described() -> None:
    schema = dict(Report.schema())
    assert (schema["$schema"], schema["title"]) == (
        "https://json-schema.org/draft/2020-12/schema",
        "polyamp parity report",
    )
    for name, component in {"Report": schema, **schema["$defs"]}.items():
        assert component["description"], name
        assert {field for field, each in component["properties"].items() if not each.get("description")} == set(), name
    assert "null where one is not finite" in schema["$defs"]["ComparisonRow"]["properties"]["distance"]["description"]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_fits_the_schema(name: str) -> None:
    schema = Report.schema()
    assert misfits(json.loads(KINDS[name].to_json()), schema, schema) == []


def misfits(value: Any, wanted: Any, schema: Any, at: str = "") -> list[str]:
    """Where a value breaks a schema, of whose words those are known that the report's needs."""
    if "$ref" in wanted:
        return misfits(value, schema["$defs"][wanted["$ref"].rpartition("/")[2]], schema, at)
    if "anyOf" in wanted:
        return [] if any(not misfits(value, each, schema, at) for each in wanted["anyOf"]) else [at]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    if "enum" in wanted:
        return [] if value in wanted["enum"] else [at]
    if wanted["type"] == "null":
        return [] if value is None else [at]
    if not isinstance(value, kinds[wanted["type"]]):  # type: ignore[arg-type]
        return [at]
    if isinstance(value, list):
        parts = wanted.get("prefixItems") or [wanted["items"]] * len(value)
        return [bad for item, part in zip(value, parts, strict=True) for bad in misfits(item, part, schema, f"{at}[]")]
    if isinstance(value, dict):
        known, more = wanted.get("properties", {}), wanted.get("additionalProperties", {})
        found = [f"{at}.{name}" for name in wanted.get("required", []) if name not in value]
        inner = [(f"{at}.{name}", item, known.get(name, more)) for name, item in value.items()]
        return found + [bad for path, item, part in inner if part for bad in misfits(item, part, schema, path)]
    return []


def test_a_misfit_is_seen() -> None:
    schema = Report.schema()
    data = json.loads(KINDS["parts"].to_json())
    data["comparisons"][0]["rows"][0]["allowed"] = None
    del data["steps"]
    assert misfits(data, schema, schema) == [".steps", ".comparisons[].rows[].allowed"]


def test_a_notebook_shows_the_short_report_escaped() -> None:
    shown = KINDS["long names"]._repr_html_()
    assert shown.startswith("<table><caption>torch and j [31max differ: float32, step 1, forward, encoder.layers")
    assert "<script>" not in shown
    assert "<tr><th>because</th><td>Row by row" in shown


def test_save_makes_the_folder_and_names_the_page(tmp_path: Path) -> None:
    page = KINDS["parts"].save(tmp_path / "deep" / "er")
    assert page == tmp_path / "deep" / "er" / "report.html"
    assert Report.from_json(page.with_name("report.json").read_bytes()) == KINDS["parts"]
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "report.json", "report.png"]


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ArgumentError, match="folder must be one that can be written to"):
        KINDS["parts"].save(tmp_path / "taken")


@pytest.mark.parametrize(
    ("absent", "written"),
    [
        (("jinja2", "matplotlib"), {"report.json"}),
        (("jinja2",), {"report.json", "report.png"}),
        (("matplotlib",), {"report.json", "report.html"}),
    ],
)
def test_without_what_draws_the_rest_is_written(
    absent: tuple[str, ...], written: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ArgumentError, match=r'pip install "polyamp\[parity\]"') as caught:
        KINDS["parts"].save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == written
    assert all(name in str(caught.value) for name in absent)
    assert all(name in str(caught.value) for name in written)
