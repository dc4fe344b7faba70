"""Chart of the HTML page as SVG text: the error of every module.

The page's style sheet sets colours, line patterns and fonts: `bad` differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from polyamp.parity.report import formatting
from polyamp.parity.report_data import ComparisonRow
from polyamp.report_page import svg_axes
from polyamp.report_page.svg_charts import MAX_POINTS

ErrorPoint = tuple[int, ComparisonRow]
"""A module's error in one pass: the module's number, from 1, and its row."""


def error_chart(title: str, points: Sequence[ErrorPoint], count: int, mark: int | None = None) -> str:
    """Return a chart of each module's relative error in program order, with the line of what rounding allows.

    Args:
        title: of the chart, for screen readers.
        points: in the order of the program.
        count: number of modules.
        mark: the module at which a line says "first divergence".
    """
    wide, high = 560, 220
    values = [value for _, row in points for value in (row.distance, row.allowed) if value]
    if not points or not values:
        return ""
    low, top = math.log10(min(values)), math.log10(max(values))
    axis = svg_axes.ChartAxis(math.floor(low - 0.05), math.ceil(top + 0.05), True)
    body = [svg_axes.frame(axis, count, wide, high, "module, in the order of the program")]
    if mark is not None:
        x = svg_axes.place(mark, count, wide)
        side = "end" if x > wide / 2 else "start"
        shift = -5 if side == "end" else 5
        body.append(f'<path class="mark" d="M{x:.1f} {svg_axes.TOP_MARGIN}V{high - svg_axes.BOTTOM_MARGIN}"/>')
        body.append(
            f'<text class="mark" x="{x + shift:.1f}" y="{svg_axes.TOP_MARGIN + 10}" text-anchor="{side}">'
            "first divergence</text>"
        )
    limits = [(number, row.allowed) for number, row in _thin_points(points) if row.allowed]
    allowed = [f"{svg_axes.place(number, count, wide):.1f} {axis.y(limit, high):.1f}" for number, limit in limits]
    if len(allowed) == 1:
        place = axis.y(limits[0][1], high)
        allowed = [f"{svg_axes.LEFT_MARGIN} {place:.1f}", f"{wide - svg_axes.RIGHT_MARGIN} {place:.1f}"]
    body.append(f'<path class="allowed" d="M{"L".join(allowed)}"/>')
    beyond = f"{sum(row.counts for _, row in points)} of {formatting.count_text(len(points), 'module')}"
    points = _thin_points(points)
    within = [_point_position(point, axis, count, wide, high) for point in points if not point[1].counts]
    body.append(f'<path class="fine" d="{"".join(f"M{x:.1f} {y:.1f}h0" for x, y in within)}"/>')
    outside = [_point_position(point, axis, count, wide, high) for point in points if point[1].counts]
    body.append(f'<path class="bad" d="{"".join(f"M{x - 3:.1f} {y - 3:.1f}l6 6m0-6l-6 6" for x, y in outside)}"/>')
    return svg_axes.svg(f"{title}: {beyond} beyond what rounding allows", wide, high, "".join(body))


def _thin_points(points: Sequence[ErrorPoint]) -> Sequence[ErrorPoint]:
    """Return the points; of too many, the one of each interval with the largest share of its allowed distance."""
    size = math.ceil(len(points) / MAX_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [max(part, key=lambda point: (point[1].counts, point[1].allowed_share)) for part in parts]


def _point_position(
    point: ErrorPoint, axis: svg_axes.ChartAxis, count: int, wide: int, high: int
) -> tuple[float, float]:
    """Return the position of a module's mark: non-finite at the top, 0 at the bottom."""
    number, row = point
    x = svg_axes.place(number, count, wide)
    if row.distance is None or not math.isfinite(row.distance):
        return x, float(svg_axes.TOP_MARGIN)
    return x, axis.y(row.distance, high) if row.distance else float(high - svg_axes.BOTTOM_MARGIN)
