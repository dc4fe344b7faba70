"""`Report`: results of a parity run, with text, JSON, HTML and PNG output."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from polyamp.display import first_lines, html_table
from polyamp.errors import ArgumentError
from polyamp.files import write_atomically
from polyamp.parity.report_data import Findings, encode_report

_DRAWING_PACKAGES: Final = {"jinja2": "report.html", "matplotlib": "report.png"}
"""Package of the extra `parity` -> the file that needs it."""
_FIELD: Final = re.compile(r"^    (?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n        .*)*)", re.MULTILINE)
"""An entry of a docstring's `Attributes:`, with its continuation lines: the field's description in the schema."""


class Report(Findings, frozen=True, kw_only=True):
    """Results of a parity run.

    Attributes:
        polyamp: version of polyamp.
        recipes: label -> the recipe as plain data; empty if nothing was trained.
        phases: the policies that were run, in order.
        steps: training steps under each.
        environments: one per side.
        comparisons: the first side with each other one.
        curves: metrics of the steps.
        failures: sides that did not finish.
        randomness: "off" or "shared": the mode of dropout.
        seconds: wall time of everything.
        own_seconds: wall time of the models alone, part of `seconds`.
    """

    def __bool__(self) -> bool:
        raise TypeError("a report is neither true nor false: ask report.agrees")

    def __str__(self) -> str:
        from polyamp.parity.report.text_report import render_text

        return render_text(self)

    def __repr__(self) -> str:
        return first_lines(str(self))

    def to_json(self) -> str:
        """Return the report as indented JSON; `schema` describes it."""
        return encode_report(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Read a report from the JSON of `to_json`."""
        return msgspec.json.decode(text, type=cls)

    @staticmethod
    def schema() -> Mapping[str, Any]:
        """Return the JSON schema (draft 2020-12) of `to_json`.

        Example:
            >>> sorted(Report.schema()["properties"])[:3]
            ['comparisons', 'curves', 'environments']
        """
        return _json_schema(Report)

    def _repr_html_(self) -> str:
        from polyamp.parity.report.formatting import verdict
        from polyamp.parity.report.text_report import text_rows

        return html_table(verdict(self), (), text_rows(self))

    def save(self, folder: str | Path) -> Path:
        """Write `report.html`, `report.json` and `report.png` to a folder.

        Returns:
            The page's path.

        Raises:
            ArgumentError: the folder cannot be written to; or a drawing package is not installed (`polyamp[parity]`).
                In the latter case only the files that need it are missing; `report.json` is written.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "report.json", encode_report(self))
            absent = [name for name in _DRAWING_PACKAGES if not _is_importable(name)]
            if "jinja2" not in absent:
                from polyamp.parity.report.html_page import render_html

                write_atomically(folder / "report.html", render_html(self).encode())
            if "matplotlib" not in absent:
                from polyamp.parity.report.png_charts import draw

                write_atomically(folder / "report.png", draw(self))
        except OSError as error:
            raise ArgumentError(
                f"folder must be one that can be written to. Received: {str(folder)!r}, {error}."
            ) from error
        if absent:
            missing_files = " and ".join(f"{_DRAWING_PACKAGES[name]} needs {name}" for name in absent)
            written = ", ".join(
                ["report.json", *(file for name, file in _DRAWING_PACKAGES.items() if name not in absent)]
            )
            raise ArgumentError(
                f'{missing_files}, which cannot be imported. Run: pip install "polyamp[parity]". Written to {folder}: '
                f"{written}."
            )
        return folder / "report.html"


def _json_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a struct class, with a description of every class and field."""
    (inner,), found = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    top = found.pop(inner["$ref"].rpartition("/")[2])
    for each in [top, *found.values()]:
        _move_docstring(each)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "polyamp parity report"}
    return {**head, **{name: value for name, value in top.items() if name != "title"}, "$defs": found}


def _move_docstring(component: dict[str, Any]) -> None:
    """Split a class's docstring into the description of the class and those of its fields (`Attributes:`)."""
    text = inspect.cleandoc(component.pop("description", ""))
    begin, _, fields = text.partition("\n\nAttributes:\n")
    if begin:
        component["description"] = _join_lines(begin)
    for entry in _FIELD.finditer(fields):
        for name in entry["names"].split(", "):
            component["properties"][name]["description"] = _join_lines(entry["text"])


def _join_lines(text: str) -> str:
    """Return a text as one line, with `null` for `None`."""
    return re.sub(r"\bNone\b", "null", " ".join(text.replace("`", "").split()))


def _is_importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
