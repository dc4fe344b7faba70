"""Charts of the HTML page as SVG text: metrics per step, and the error of every module.

The page's style sheet sets colours, line patterns and fonts: classes `s0`, `s1`, ... are sides, `bad` differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

from polyamp.parity.report import formatting

_CHART_WIDTH: Final = 400
_CHART_HEIGHT: Final = 210
_LEFT_MARGIN: Final = 58
_RIGHT_MARGIN: Final = 12
_TOP_MARGIN: Final = 14
_BOTTOM_MARGIN: Final = 34
MAX_POINTS: Final = 400
"""Number of points above which a line keeps only the least and the greatest of each interval."""
_LOG_AXIS_DECADES: Final = 2.0
"""Positive values over more powers of ten than this are drawn on a logarithmic axis."""


class ChartSeries(NamedTuple):
    """A side's line. Attributes: the number of its colour; a value per step from 1; skipped steps."""

    number: int
    values: Sequence[float | None]
    skipped: Sequence[int] = ()


class ErrorPoint(NamedTuple):
    """A module's error in one pass. Attributes: the module's number from 1; relative distances; whether it differs."""

    number: int
    distance: float | None
    allowed: float
    counts: bool


class _Axis(NamedTuple):
    """Vertical axis: from `low` (drawn at the bottom) to `high`, both as `position` returns them."""

    low: float
    high: float
    logarithmic: bool

    def position(self, value: float) -> float:
        """Return the position of a value on the axis."""
        return math.log10(value) if self.logarithmic else value

    def y(self, value: float, high: int = _CHART_HEIGHT) -> float:
        """Return the y coordinate of a value, clipped to the chart."""
        share = (self.position(value) - self.low) / (self.high - self.low)
        return _TOP_MARGIN + (high - _TOP_MARGIN - _BOTTOM_MARGIN) * (1 - min(max(share, 0.0), 1.0))

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


def curve_chart(title: str, series: Sequence[ChartSeries]) -> str:
    """Return a chart of a number per step, with a line for each side."""
    values = [value for line in series for value in line.values if value is not None and math.isfinite(value)]
    steps = max((len(line.values) for line in series), default=0)
    if not values or not steps:
        return ""
    axis = _axis(values)
    body = [_frame(axis, steps, _CHART_WIDTH, _CHART_HEIGHT, "step")]
    for line in series:
        body.extend(_line(line, axis, steps))
    texts = [
        f"side {line.number + 1} from {_end_text(line.values, 0)} to {_end_text(line.values, -1)}" for line in series
    ]
    return _svg(f"{title} per step: {', '.join(texts)}", _CHART_WIDTH, _CHART_HEIGHT, "".join(body))


def error_chart(title: str, points: Sequence[ErrorPoint], count: int, mark: int | None = None) -> str:
    """Return a chart of each module's relative error in program order, with the line of what rounding allows.

    Args:
        title: of the chart, for screen readers.
        points: in the order of the program.
        count: number of modules.
        mark: the module at which a line says "first divergence".
    """
    wide, high = 560, 220
    values = [value for point in points for value in (point.distance, point.allowed) if value]
    if not points or not values:
        return ""
    low, top = math.log10(min(values)), math.log10(max(values))
    axis = _Axis(math.floor(low - 0.05), math.ceil(top + 0.05), True)
    body = [_frame(axis, count, wide, high, "module, in the order of the program")]
    if mark is not None:
        x = _x(mark, count, wide)
        side = "end" if x > wide / 2 else "start"
        shift = -5 if side == "end" else 5
        body.append(f'<path class="mark" d="M{x:.1f} {_TOP_MARGIN}V{high - _BOTTOM_MARGIN}"/>')
        body.append(
            f'<text class="mark" x="{x + shift:.1f}" y="{_TOP_MARGIN + 10}" text-anchor="{side}">'
            "first divergence</text>"
        )
    limits = [point for point in _thin_points(points) if point.allowed]
    allowed = [f"{_x(point.number, count, wide):.1f} {axis.y(point.allowed, high):.1f}" for point in limits]
    if len(allowed) == 1:
        place = axis.y(limits[0].allowed, high)
        allowed = [f"{_LEFT_MARGIN} {place:.1f}", f"{wide - _RIGHT_MARGIN} {place:.1f}"]
    body.append(f'<path class="allowed" d="M{"L".join(allowed)}"/>')
    beyond = f"{sum(point.counts for point in points)} of {formatting.count_text(len(points), 'module')}"
    points = _thin_points(points)
    within = [_point_position(point, axis, count, wide, high) for point in points if not point.counts]
    body.append(f'<path class="fine" d="{"".join(f"M{x:.1f} {y:.1f}h0" for x, y in within)}"/>')
    outside = [_point_position(point, axis, count, wide, high) for point in points if point.counts]
    body.append(f'<path class="bad" d="{"".join(f"M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6" for x, y in outside)}"/>')
    return _svg(f"{title}: {beyond} beyond what rounding allows", wide, high, "".join(body))


def _axis(values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    if low > 0 and math.log10(high / low) > _LOG_AXIS_DECADES:
        return _Axis(math.log10(low) - 0.05, math.log10(high) + 0.05, True)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return _Axis(low - room if low < 0 or low - room > 0 else 0.0, high + room, False)


def _x(number: float, count: int, wide: int) -> float:
    """Return the x coordinate of step or module `number` of `count`."""
    inside = wide - _LEFT_MARGIN - _RIGHT_MARGIN - 12
    return _LEFT_MARGIN + 6 + inside * ((number - 1) / (count - 1) if count > 1 else 0.5)


def _frame(axis: _Axis, count: int, wide: int, high: int, name: str) -> str:
    """Return the axes with their numbers."""
    found = []
    for value in axis.ticks():
        y = axis.y(value, high)
        found.append(f'<path class="grid" d="M{_LEFT_MARGIN} {y:.1f}H{wide - _RIGHT_MARGIN}"/>')
        found.append(
            f'<text x="{_LEFT_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{formatting.number(value)}</text>'
        )
    found.append(f'<path class="axis" d="M{_LEFT_MARGIN} {high - _BOTTOM_MARGIN}H{wide - _RIGHT_MARGIN}"/>')
    marks = (
        sorted({1, count})
        if count < 8
        else sorted({1, *range(_round_interval(count), count, _round_interval(count)), count})
    )
    if len(marks) > 2 and marks[-1] - marks[-2] < _round_interval(count) / 2:
        del marks[-2]  # it would touch the last
    for number in marks:
        x = _x(number, count, wide)
        found.append(f'<text x="{x:.1f}" y="{high - _BOTTOM_MARGIN + 14}" text-anchor="middle">{number:,}</text>')
    middle = (_LEFT_MARGIN + wide - _RIGHT_MARGIN) / 2
    found.append(f'<text class="name" x="{middle:.0f}" y="{high - 5}" text-anchor="middle">{escape(name)}</text>')
    return "".join(found)


def _round_interval(count: int) -> int:
    """Return a round interval that divides `count` into about four."""
    size: int = 10 ** int(math.log10(max(count / 4, 1)))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor * 4.5 >= count)


def _line(line: ChartSeries, axis: _Axis, steps: int) -> Iterator[str]:
    """Yield a side's line, broken at non-finite values, with crosses there and triangles at skipped steps."""
    runs: list[list[str]] = [[]]
    nonfinite = []
    for step, value in _thin_values(line.values):
        x = _x(step, steps, _CHART_WIDTH)
        if value is None or not math.isfinite(value):
            nonfinite.append(x)
            runs.append([])
        elif axis.logarithmic and value <= 0:
            runs.append([])
        else:
            runs[-1].append(f"{x:.1f} {axis.y(value):.1f}")
    path = "".join(f"M{'L'.join(run)}" + ("h0" if len(run) == 1 else "") for run in runs if run)
    yield f'<path class="line s{line.number % 4}{" dots" if steps == 1 else ""}" d="{path}"/>'
    if nonfinite:
        crosses = "".join(f"M{x - 3:.1f} {_TOP_MARGIN - 3}l6 6m0-6l-6 6" for x in nonfinite)
        yield f'<path class="lost s{line.number % 4}" d="{crosses}"/>'
    bottom = _CHART_HEIGHT - _BOTTOM_MARGIN - 1
    marks = "".join(
        f"M{_x(step, steps, _CHART_WIDTH) - 4:.1f} {bottom}h8l-4-8z" for step in line.skipped if step <= steps
    )
    if marks:
        yield f'<path class="skipped s{line.number % 4}" d="{marks}"/>'


def _thin_values(values: Sequence[float | None]) -> Iterable[tuple[int, float | None]]:
    """Return steps with their values; of too many, the least, greatest and first non-finite of each interval."""
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


def _thin_points(points: Sequence[ErrorPoint]) -> Sequence[ErrorPoint]:
    """Return the points; of too many, the one of each interval with the largest share of its allowed distance."""
    size = math.ceil(len(points) / MAX_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [max(part, key=lambda point: (point.counts, _allowed_share(point))) for part in parts]


def _allowed_share(point: ErrorPoint) -> float:
    return math.inf if point.distance is None else point.distance / (point.allowed or 1.0)


def _pair_value(pair: tuple[int, float | None]) -> float:
    return pair[1] or 0.0


def _point_position(point: ErrorPoint, axis: _Axis, count: int, wide: int, high: int) -> tuple[float, float]:
    """Return the position of a module's mark: non-finite at the top, 0 at the bottom."""
    x = _x(point.number, count, wide)
    if point.distance is None or not math.isfinite(point.distance):
        return x, float(_TOP_MARGIN)
    return x, axis.y(point.distance, high) if point.distance else float(high - _BOTTOM_MARGIN)


def _end_text(values: Sequence[float | None], index: int) -> str:
    return formatting.number(values[index]) if values else "nothing"


def _svg(label: str, wide: int, high: int, body: str) -> str:
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {wide} {high}">{body}</svg>'
