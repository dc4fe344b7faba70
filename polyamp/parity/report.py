"""`Report`: what a comparison of trainings found. `print(report)` gives the ten lines that a person reads; `to_json`
and `from_json` keep it, and `save` writes the page, the picture and the data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from polyamp.parity.findings import (
    Comparison,
    Curve,
    Divergence,
    Environment,
    Failure,
    Findings,
    Kind,
    Row,
    Shown,
    encoded,
)
from polyamp.shown import html_table

__all__ = ["Comparison", "Curve", "Divergence", "Environment", "Failure", "Kind", "Report", "Row", "Shown"]


class Report(Findings, frozen=True, kw_only=True):
    """What a comparison found.

    Attributes:
        polyamp: version of polyamp.
        recipes: label -> the recipe as plain data; empty where nothing was trained.
        phases: the policies that were run, in order.
        steps: training steps under each.
        environments: one per side.
        comparisons: the first side with each other one.
        curves: what the steps reported.
        failures: sides that did not come to their end.
        randomness: "off" or "shared": what dropout did.
        seconds: wall time of everything.
        own_seconds: of that, what the models took for themselves.
    """

    def __bool__(self) -> bool:
        raise TypeError("a report is neither true nor false: ask report.agrees")

    def __str__(self) -> str:
        from polyamp.parity.said import said

        return said(self)

    def to_json(self) -> str:
        """The report as indented JSON; `schema` describes it."""
        return encoded(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Read what `to_json` wrote."""
        return msgspec.json.decode(text, type=cls)

    @staticmethod
    def schema() -> Mapping[str, Any]:
        """The JSON schema (draft 2020-12) of `to_json`.

        Example:
            >>> sorted(Report.schema()["properties"])[:3]
            ['comparisons', 'curves', 'environments']
        """
        from polyamp.parity.schema import schema

        return schema(Report)

    def _repr_html_(self) -> str:
        from polyamp.parity.said import told
        from polyamp.parity.words import verdict

        return html_table(verdict(self), (), told(self))

    def save(self, folder: str | Path) -> Path:
        """Write `report.html`, `report.json` and `report.png` to a folder.

        Returns:
            The page's path.

        Raises:
            ArgumentError: the folder cannot be written to; or what draws is not installed (`polyamp[parity]`), and
                then what needs it is all that is missing: `report.json` is there.
        """
        from polyamp.parity.page import save

        return save(self, Path(folder))
