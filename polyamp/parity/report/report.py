"""`Report`: results of a parity run, with text, JSON and HTML output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from polyamp.display import html_table
from polyamp.parity.report_data import (
    Comparison,
    ComparisonRow,
    Curve,
    Divergence,
    DivergenceKind,
    Environment,
    Failure,
    Findings,
    SideValues,
    encode_report,
)

__all__ = [
    "Comparison",
    "ComparisonRow",
    "Curve",
    "Divergence",
    "DivergenceKind",
    "Environment",
    "Failure",
    "Report",
    "SideValues",
]


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
        from polyamp.parity.report.json_schema import schema

        return schema(Report)

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
        from polyamp.parity.report.html_page import save_report

        return save_report(self, Path(folder))
