"""Charts of a `ReportPage` as SVG text. The page's style sheet sets colours, line patterns and fonts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from polyamp.report_page import svg_axes, text_format
from polyamp.report_page.page import MAX_ROWS, BarChart, Chart, CurveChart, HeatChart, has_values

MAX_POINTS: Final = 400
"""Number of points above which a line keeps only the least and the greatest of each interval."""
_WIDE: Final = 1040
_ROW: Final = 16
_NAME_WIDTH: Final = 200
_NAME_LETTERS: Final = 30
_HEAD: Final = 24
_FOOT: Final = 36


def draw_chart(chart: Chart) -> str:
    """Return the chart; "" if it has nothing to show."""
    if not has_values(chart):
        return ""
    if isinstance(chart, CurveChart):
        return _curves(chart)
    if isinstance(chart, HeatChart):
        return _heat(chart)
    return _bars(chart)


def _curves(chart: CurveChart) -> str:
    values = [value for line in chart.lines for value in line.values if value is not None and math.isfinite(value)]
    axis = svg_axes.value_axis(values)
    wide, high, count = svg_axes.CHART_WIDTH, svg_axes.CHART_HEIGHT, len(chart.steps)
    body = [svg_axes.frame(axis, count, wide, high, "step", chart.steps)]
    places = {step: place for place, step in enumerate(chart.steps, 1)}
    bottom = high - svg_axes.BOTTOM_MARGIN - 1
    drawn = [(number, line) for number, line in enumerate(chart.lines) if line.values]
    for number, line in drawn:
        body.extend(svg_axes.curve_paths(_thin_values(line.values), axis, count, number))
        marks = [svg_axes.place(places[step], count, wide) for step in line.skipped if step in places]
        if marks:
            path = "".join(f"M{mark - 4:.1f} {bottom}h8l-4-8z" for mark in marks)
            body.append(f'<path class="skipped s{number % 4}" d="{path}"/>')
    ends = [
        f"{line.label} from {text_format.number(line.values[0])} to {text_format.number(line.values[-1])}"
        for _, line in drawn
    ]
    return svg_axes.svg(f"{chart.title} per step: {', '.join(ends)}", wide, high, "".join(body))


def _thin_values(values: Sequence[float | None]) -> Iterable[tuple[int, float | None]]:
    """Return places with their values; of too many, the least, greatest and first non-finite of each interval."""
    numbered = list(enumerate(values, 1))
    if len(numbered) <= MAX_POINTS:
        return numbered
    size = math.ceil(2 * len(numbered) / MAX_POINTS)
    chosen: set[tuple[int, float | None]] = set()
    for start in range(0, len(numbered), size):
        part = numbered[start : start + size]
        known = [pair for pair in part if pair[1] is not None]
        chosen.update({min(known, key=_pair_value), max(known, key=_pair_value)} if known else ())
        chosen.update([pair for pair in part if pair[1] is None][:1])
    return sorted(chosen, key=lambda pair: pair[0])


def _pair_value(pair: tuple[int, float | None]) -> float:
    return pair[1] or 0.0


def _heat(chart: HeatChart) -> str:
    rows = chart.rows[:MAX_ROWS]
    step = (_WIDE - _NAME_WIDTH - 8) / len(chart.columns)
    high = _HEAD + _ROW * len(rows) + _FOOT
    bottom = high - _FOOT
    body = [_row_names(rows)]
    for number, shares in enumerate(chart.shares[:MAX_ROWS]):
        y = _HEAD + _ROW * number
        for column, share in enumerate(shares):
            x = _NAME_WIDTH + step * column
            if share is None:
                body.append(f'<rect class="missing" x="{x:.1f}" y="{y}" width="{step:.2f}" height="{_ROW - 2}"/>')
            elif share > 0:
                opacity = 0.12 + 0.88 * math.sqrt(min(share, 1.0))
                body.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{step:.2f}" height="{_ROW - 2}" fill-opacity="{opacity:.2f}"/>'
                )
    every = max(1, math.ceil(len(chart.columns) / 14))
    for column in range(0, len(chart.columns), every):
        x = _NAME_WIDTH + step * (column + 0.5)
        label = escape(chart.columns[column])
        body.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{label}</text>')
    for number, limit in enumerate(chart.limits):
        x = _NAME_WIDTH + step * limit.column
        body.append(f'<path class="mark" d="M{x:.1f} {_HEAD - 4}V{bottom}"/>')
        side = "end" if number % 2 == 0 else "start"
        shift = -4 if side == "end" else 4
        body.append(
            f'<text class="mark" x="{x + shift:.1f}" y="{_HEAD - 8}" text-anchor="{side}">{escape(limit.label)}</text>'
        )
    body.append(_axis_name(chart.column_name, high))
    label = f"{chart.title}: {len(rows)} modules by {chart.column_name}"
    return svg_axes.svg(label, _WIDE, high, f'<g class="heat">{"".join(body)}</g>')


def _bars(chart: BarChart) -> str:
    rows = chart.rows[:MAX_ROWS]
    longest = max(sum(part.lengths[row] for part in chart.parts) for row in range(len(rows)))
    high = _HEAD + _ROW * len(rows) + _FOOT
    body = [_row_names(rows)]
    for row in range(len(rows)):
        x = float(_NAME_WIDTH)
        for number, part in enumerate(chart.parts):
            length = (_WIDE - _NAME_WIDTH - 8) * part.lengths[row] / longest
            if length:
                y = _HEAD + _ROW * row
                body.append(
                    f'<rect class="bar s{number % 4}" x="{x:.1f}" y="{y}" width="{length:.1f}" height="{_ROW - 2}"/>'
                )
            x += length
    body.append(f'<text x="{_WIDE - 8}" y="{high - _FOOT + 14}" text-anchor="end">{text_format.number(longest)}</text>')
    body.append(_axis_name(chart.length_name, high))
    return svg_axes.svg(f"{chart.title}: {len(rows)} modules", _WIDE, high, "".join(body))


def _row_names(rows: Sequence[str]) -> str:
    return "".join(
        f'<text x="{_NAME_WIDTH - 8}" y="{_HEAD + _ROW * number + 11}" text-anchor="end">'
        f"{escape(text_format.truncate_middle(name or '(the model)', _NAME_LETTERS))}</text>"
        for number, name in enumerate(rows)
    )


def _axis_name(name: str, high: int) -> str:
    middle = (_NAME_WIDTH + _WIDE - 8) / 2
    return f'<text class="name" x="{middle:.0f}" y="{high - 6}" text-anchor="middle">{escape(name)}</text>'
