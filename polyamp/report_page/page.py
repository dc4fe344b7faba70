"""`ReportPage`: a report's page as data, which `html_page` and `png_page` draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

Outcome = Literal["agree", "differ", "unfinished"]
"""Colour and sign of a page's head: good, bad, or a warning."""
MAX_ROWS: Final = 80
"""Largest number of modules in a chart; a table has all."""


class CurveLine(NamedTuple):
    """A line of a `CurveChart`.

    Attributes:
        label: its name.
        values: one for each of the first steps, None where it is not finite; no line is drawn without any.
        skipped: the steps that are marked as skipped.
    """

    label: str
    values: Sequence[float | None]
    skipped: Sequence[int] = ()


class CurveChart(NamedTuple):
    """Numbers per step.

    Attributes:
        title: what is drawn.
        steps: numbers of the steps.
        lines: at most four.
    """

    title: str
    steps: Sequence[int]
    lines: Sequence[CurveLine]


class ChartLimit(NamedTuple):
    """A vertical line of a `HeatChart`. Attributes: its place, a number of columns from the left; its name."""

    column: float
    label: str


class HeatChart(NamedTuple):
    """A share, from 0 to 1, for each row and column.

    Attributes:
        title: what is drawn.
        rows: names of modules; at most `MAX_ROWS` are drawn.
        columns: names of the columns.
        shares: one for each row and column; None is drawn as missing.
        column_name: what the columns are.
        limits: vertical lines.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    shares: Sequence[Sequence[float | None]]
    column_name: str
    limits: Sequence[ChartLimit] = ()


class BarPart(NamedTuple):
    """One part of every bar. Attributes: its name; its length in each row."""

    label: str
    lengths: Sequence[float]


class BarChart(NamedTuple):
    """A bar of parts for each row.

    Attributes:
        title: what is drawn.
        rows: names of modules; at most `MAX_ROWS` are drawn.
        parts: at most four.
        length_name: what the length of a bar is.
    """

    title: str
    rows: Sequence[str]
    parts: Sequence[BarPart]
    length_name: str


Chart = CurveChart | HeatChart | BarChart


def has_values(chart: Chart) -> bool:
    """Return whether a chart has something to show."""
    if isinstance(chart, CurveChart):
        return any(value is not None and math.isfinite(value) for line in chart.lines for value in line.values)
    if isinstance(chart, HeatChart):
        return bool(chart.rows and chart.columns)
    return any(length for part in chart.parts for length in part.lengths[:MAX_ROWS])


class PageTable(NamedTuple):
    """A table. Attributes: its caption; heading; rows of texts, whose first cell names the row."""

    caption: str
    heading: Sequence[str]
    rows: Sequence[Sequence[str]]


class PageSection(NamedTuple):
    """A part of the page.

    Attributes: its title; sentences below it; charts; tables; a block of code.
    """

    title: str
    sentences: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[PageTable] = ()
    code: str = ""


class ReportPage(NamedTuple):
    """A report's page.

    Attributes:
        outcome: colour and sign of the head.
        word: the verdict in a word or two.
        heading: the verdict as a sentence.
        meta: what the page is of.
        sections: its parts.
    """

    outcome: Outcome
    word: str
    heading: str
    meta: str
    sections: Sequence[PageSection]
