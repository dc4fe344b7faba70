"""Axes of an SVG chart: positions, grid lines and numbers.

The page's style sheet sets colours, line patterns and fonts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

from polyamp.report_page import text_format

CHART_WIDTH: Final = 400
CHART_HEIGHT: Final = 210
LEFT_MARGIN: Final = 58
RIGHT_MARGIN: Final = 12
TOP_MARGIN: Final = 14
BOTTOM_MARGIN: Final = 34
_LOG_AXIS_DECADES: Final = 2.0
"""Positive values over more powers of ten than this are drawn on a logarithmic axis."""


class ChartAxis(NamedTuple):
    """Vertical axis: from `low` (drawn at the bottom) to `high`, both as `position` returns them."""

    low: float
    high: float
    logarithmic: bool

    def position(self, value: float) -> float:
        """Return the position of a value on the axis."""
        return math.log10(value) if self.logarithmic else value

    def y(self, value: float, high: int = CHART_HEIGHT) -> float:
        """Return the y coordinate of a value, clipped to the chart."""
        share = (self.position(value) - self.low) / (self.high - self.low)
        return TOP_MARGIN + (high - TOP_MARGIN - BOTTOM_MARGIN) * (1 - min(max(share, 0.0), 1.0))

    def ticks(self) -> list[float]:
        """Return the values of the grid lines, rarely more than five."""
        if self.logarithmic:
            first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
            every = max(1, math.ceil((last - first) / 5))
            return [10.0**power for power in range(first, last + 1, every)]
        rough = (self.high - self.low) / 4
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
        return [number * step for number in range(math.ceil(self.low / step - 1e-9), int(self.high / step + 1e-9) + 1)]


def value_axis(values: Sequence[float]) -> ChartAxis:
    """Return the vertical axis on which finite values are drawn."""
    low, high = min(values), max(values)
    if low > 0 and math.log10(high / low) > _LOG_AXIS_DECADES:
        return ChartAxis(math.log10(low) - 0.05, math.log10(high) + 0.05, True)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return ChartAxis(low - room if low < 0 or low - room > 0 else 0.0, high + room, False)


def place(number: float, count: int, wide: int) -> float:
    """Return the x coordinate of step or module `number` of `count`."""
    inside = wide - LEFT_MARGIN - RIGHT_MARGIN - 12
    return LEFT_MARGIN + 6 + inside * ((number - 1) / (count - 1) if count > 1 else 0.5)


def frame(axis: ChartAxis, count: int, wide: int, high: int, name: str, numbers: Sequence[int] | None = None) -> str:
    """Return the axes with their numbers.

    Args:
        axis: the vertical one.
        count: number of points along the horizontal one.
        wide, high: of the chart.
        name: of the horizontal axis.
        numbers: of its points; 1, 2, ... by default.
    """
    found = []
    for value in axis.ticks():
        y = axis.y(value, high)
        found.append(f'<path class="grid" d="M{LEFT_MARGIN} {y:.1f}H{wide - RIGHT_MARGIN}"/>')
        found.append(
            f'<text x="{LEFT_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{text_format.number(value)}</text>'
        )
    found.append(f'<path class="axis" d="M{LEFT_MARGIN} {high - BOTTOM_MARGIN}H{wide - RIGHT_MARGIN}"/>')
    marks = (
        sorted({1, count})
        if count < 8
        else sorted({1, *range(_round_interval(count), count, _round_interval(count)), count})
    )
    if len(marks) > 2 and marks[-1] - marks[-2] < _round_interval(count) / 2:
        del marks[-2]  # it would touch the last
    for number in marks:
        x = place(number, count, wide)
        shown = number if numbers is None else numbers[number - 1]
        found.append(f'<text x="{x:.1f}" y="{high - BOTTOM_MARGIN + 14}" text-anchor="middle">{shown:,}</text>')
    middle = (LEFT_MARGIN + wide - RIGHT_MARGIN) / 2
    found.append(f'<text class="name" x="{middle:.0f}" y="{high - 5}" text-anchor="middle">{escape(name)}</text>')
    return "".join(found)


def _round_interval(count: int) -> int:
    """Return a round interval that divides `count` into about four."""
    size: int = 10 ** int(math.log10(max(count / 4, 1)))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor * 4.5 >= count)


def svg(label: str, wide: int, high: int, body: str) -> str:
    """Return a picture with its description for screen readers."""
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {wide} {high}">{body}</svg>'


def curve_paths(points: Iterable[tuple[int, float | None]], axis: ChartAxis, count: int, number: int) -> Iterator[str]:
    """Yield a line through numbered points, broken at values that are not finite, which have crosses at the top.

    Args:
        points: place from 1, and value.
        axis: the vertical one.
        count: number of places.
        number: of the line's colour.
    """
    runs: list[list[str]] = [[]]
    nonfinite = []
    for point, value in points:
        x = place(point, count, CHART_WIDTH)
        if value is None or not math.isfinite(value):
            nonfinite.append(x)
            runs.append([])
        elif axis.logarithmic and value <= 0:
            runs.append([])
        else:
            runs[-1].append(f"{x:.1f} {axis.y(value):.1f}")
    path = "".join(f"M{'L'.join(run)}" + ("h0" if len(run) == 1 else "") for run in runs if run)
    yield f'<path class="line s{number % 4}{" dots" if count == 1 else ""}" d="{path}"/>'
    if nonfinite:
        crosses = "".join(f"M{x - 3:.1f} {TOP_MARGIN - 3}l6 6m0-6l-6 6" for x in nonfinite)
        yield f'<path class="lost s{number % 4}" d="{crosses}"/>'
