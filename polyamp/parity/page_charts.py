"""The page's pictures as SVG text: what the steps reported, and the error of every module. `page_parts` calls it.

Colours, line patterns and letters are the page's style sheet's: `s0`, `s1`, ... are sides, `bad` is what differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

from polyamp.parity import words

_WIDE: Final = 400
_HIGH: Final = 210
_LEFT: Final = 58
_RIGHT: Final = 12
_TOP: Final = 14
_BOTTOM: Final = 34
POINTS: Final = 400
"""A line of more points than this keeps the least and the greatest of each stretch."""
_DECADES: Final = 2.0
"""Positive values over more powers of ten than this are drawn on a logarithmic axis."""


class Series(NamedTuple):
    """A side's line. Attributes: the number of its colour; a value per step from 1; steps that applied nothing."""

    number: int
    values: Sequence[float | None]
    skipped: Sequence[int] = ()


class Point(NamedTuple):
    """A module's error in one pass. Attributes: the module's number from 1; both relative; whether it differs."""

    number: int
    distance: float | None
    allowed: float
    counts: bool


class _Axis(NamedTuple):
    """The vertical axis: values from `low` (drawn at the bottom) to `high`, both as `of` gives them."""

    low: float
    high: float
    logarithmic: bool

    def of(self, value: float) -> float:
        """Where a value is on the axis."""
        return math.log10(value) if self.logarithmic else value

    def y(self, value: float, high: int = _HIGH) -> float:
        """The vertical place of a value; what lies outside is drawn at the edge."""
        share = (self.of(value) - self.low) / (self.high - self.low)
        return _TOP + (high - _TOP - _BOTTOM) * (1 - min(max(share, 0.0), 1.0))

    def ticks(self) -> list[float]:
        """Values at which there is a line, seldom more than five."""
        if self.logarithmic:
            first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
            every = max(1, math.ceil((last - first) / 5))
            return [10.0**power for power in range(first, last + 1, every)]
        rough = (self.high - self.low) / 4
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
        return [number * step for number in range(math.ceil(self.low / step - 1e-9), int(self.high / step + 1e-9) + 1)]


def curve(title: str, series: Sequence[Series]) -> str:
    """A chart of a number per step, a line for each side."""
    values = [value for line in series for value in line.values if value is not None and math.isfinite(value)]
    steps = max((len(line.values) for line in series), default=0)
    if not values or not steps:
        return ""
    axis = _axis(values)
    body = [_frame(axis, steps, _WIDE, _HIGH, "step")]
    for line in series:
        body.extend(_line(line, axis, steps))
    told = [f"side {line.number + 1} from {_end(line.values, 0)} to {_end(line.values, -1)}" for line in series]
    return _svg(f"{title} per step: {', '.join(told)}", _WIDE, _HIGH, "".join(body))


def errors(title: str, points: Sequence[Point], count: int, mark: int | None = None) -> str:
    """A chart of each module's error along the program, and the line of what rounding allows, both relative.

    Args:
        title: of the chart, for who does not see it.
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
        body.append(f'<path class="mark" d="M{x:.1f} {_TOP}V{high - _BOTTOM}"/>')
        body.append(
            f'<text class="mark" x="{x + shift:.1f}" y="{_TOP + 10}" text-anchor="{side}">first divergence</text>'
        )
    limits = [point for point in _sparse(points) if point.allowed]
    allowed = [f"{_x(point.number, count, wide):.1f} {axis.y(point.allowed, high):.1f}" for point in limits]
    if len(allowed) == 1:
        place = axis.y(limits[0].allowed, high)
        allowed = [f"{_LEFT} {place:.1f}", f"{wide - _RIGHT} {place:.1f}"]
    body.append(f'<path class="allowed" d="M{"L".join(allowed)}"/>')
    beyond = f"{sum(point.counts for point in points)} of {words.counted(len(points), 'module')}"
    points = _sparse(points)
    fine = [_at(point, axis, count, wide, high) for point in points if not point.counts]
    body.append(f'<path class="fine" d="{"".join(f"M{x:.1f} {y:.1f}h0" for x, y in fine)}"/>')
    bad = [_at(point, axis, count, wide, high) for point in points if point.counts]
    body.append(f'<path class="bad" d="{"".join(f"M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6" for x, y in bad)}"/>')
    return _svg(f"{title}: {beyond} beyond what rounding allows", wide, high, "".join(body))


def _axis(values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    if low > 0 and math.log10(high / low) > _DECADES:
        return _Axis(math.log10(low) - 0.05, math.log10(high) + 0.05, True)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return _Axis(low - room if low < 0 or low - room > 0 else 0.0, high + room, False)


def _x(number: float, count: int, wide: int) -> float:
    """The horizontal place of step or module `number` of `count`."""
    inside = wide - _LEFT - _RIGHT - 12
    return _LEFT + 6 + inside * ((number - 1) / (count - 1) if count > 1 else 0.5)


def _frame(axis: _Axis, count: int, wide: int, high: int, name: str) -> str:
    """The axes with their numbers."""
    found = []
    for value in axis.ticks():
        y = axis.y(value, high)
        found.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{wide - _RIGHT}"/>')
        found.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{words.number(value)}</text>')
    found.append(f'<path class="axis" d="M{_LEFT} {high - _BOTTOM}H{wide - _RIGHT}"/>')
    marks = sorted({1, count}) if count < 8 else sorted({1, *range(_round(count), count, _round(count)), count})
    if len(marks) > 2 and marks[-1] - marks[-2] < _round(count) / 2:
        del marks[-2]  # else it would touch the last
    for number in marks:
        x = _x(number, count, wide)
        found.append(f'<text x="{x:.1f}" y="{high - _BOTTOM + 14}" text-anchor="middle">{number:,}</text>')
    middle = (_LEFT + wide - _RIGHT) / 2
    found.append(f'<text class="name" x="{middle:.0f}" y="{high - 5}" text-anchor="middle">{escape(name)}</text>')
    return "".join(found)


def _round(count: int) -> int:
    """A round number of which there are about four in `count`."""
    size: int = 10 ** int(math.log10(max(count / 4, 1)))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor * 4.5 >= count)


def _line(line: Series, axis: _Axis, steps: int) -> Iterator[str]:
    """A side's line, broken where a value is not finite; a cross there at the top, a triangle at skipped steps."""
    runs: list[list[str]] = [[]]
    lost = []
    for step, value in _thinned(line.values):
        x = _x(step, steps, _WIDE)
        if value is None or not math.isfinite(value):
            lost.append(x)
            runs.append([])
        elif axis.logarithmic and value <= 0:
            runs.append([])
        else:
            runs[-1].append(f"{x:.1f} {axis.y(value):.1f}")
    path = "".join(f"M{'L'.join(run)}" + ("h0" if len(run) == 1 else "") for run in runs if run)
    yield f'<path class="line s{line.number % 4}{" dots" if steps == 1 else ""}" d="{path}"/>'
    if lost:
        crosses = "".join(f"M{x - 3:.1f} {_TOP - 3}l6 6m0-6l-6 6" for x in lost)
        yield f'<path class="lost s{line.number % 4}" d="{crosses}"/>'
    bottom = _HIGH - _BOTTOM - 1
    marks = "".join(f"M{_x(step, steps, _WIDE) - 4:.1f} {bottom}h8l-4-8z" for step in line.skipped if step <= steps)
    if marks:
        yield f'<path class="skipped s{line.number % 4}" d="{marks}"/>'


def _thinned(values: Sequence[float | None]) -> Iterable[tuple[int, float | None]]:
    """Steps with their values; of very many those of each stretch that are least and greatest or not finite."""
    numbered = list(enumerate(values, 1))
    if len(numbered) <= POINTS:
        return numbered
    size = math.ceil(2 * len(numbered) / POINTS)
    kept: set[tuple[int, float | None]] = set()
    for start in range(0, len(numbered), size):
        part = numbered[start : start + size]
        known = [pair for pair in part if pair[1] is not None]
        kept.update({min(known, key=_value), max(known, key=_value)} if known else ())
        kept.update([pair for pair in part if pair[1] is None][:1])
    return sorted(kept, key=lambda pair: pair[0])


def _sparse(points: Sequence[Point]) -> Sequence[Point]:
    """The points; of very many the one of each stretch that is nearest to what is allowed or farthest beyond."""
    size = math.ceil(len(points) / POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [max(part, key=lambda point: (point.counts, _part(point))) for part in parts]


def _part(point: Point) -> float:
    return math.inf if point.distance is None else point.distance / (point.allowed or 1.0)


def _value(pair: tuple[int, float | None]) -> float:
    return pair[1] or 0.0


def _at(point: Point, axis: _Axis, count: int, wide: int, high: int) -> tuple[float, float]:
    """Where a module's mark is: what is not finite at the top, 0 at the bottom."""
    x = _x(point.number, count, wide)
    if point.distance is None or not math.isfinite(point.distance):
        return x, float(_TOP)
    return x, axis.y(point.distance, high) if point.distance else float(high - _BOTTOM)


def _end(values: Sequence[float | None], index: int) -> str:
    return words.number(values[index]) if values else "nothing"


def _svg(label: str, wide: int, high: int, body: str) -> str:
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {wide} {high}">{body}</svg>'
