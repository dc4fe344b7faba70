"""`draw_png`: the charts of a `ReportPage` as one picture, with its heading as title; `draw_figure`: its frame."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Final

from polyamp.report_page.page import (
    MAX_ROWS,
    BarChart,
    Chart,
    CurveChart,
    HeatChart,
    Outcome,
    ReportPage,
    has_values,
)
from polyamp.report_page.text_format import number as number_text
from polyamp.report_page.text_format import plain, truncate_end, truncate_middle

COLOURS: Final = ("#0b5cad", "#d9730d", "#12806f", "#7c3aed")
"""Colours of lines. The first line is the widest and the last two have gaps, so that coinciding ones stay visible."""
_PATTERNS: Final[tuple[Any, ...]] = ("-", "-", (0, (5, 3)), ":")
OUTCOME_COLOURS: Final[dict[Outcome, str]] = {"agree": "#17663a", "differ": "#b3261e", "unfinished": "#7a4b00"}
_WIDTH: Final = 12.0
_DPI: Final = 100
_NAME_LETTERS: Final = 34


def draw_png(page: ReportPage) -> bytes:
    """Return a PNG, 1200 pixels wide."""
    lines = _chart_rows([chart for section in page.sections for chart in section.charts if has_values(chart)])
    heights = [max(_height(chart) for chart in line) for line in lines]

    def fill(figure: Any) -> None:
        grid: Any = figure.add_gridspec(len(lines), 1, height_ratios=heights) if lines else None
        for number, line in enumerate(lines):
            inner = grid[number].subgridspec(1, len(line))
            for column, chart in enumerate(line):
                axes = figure.add_subplot(inner[column])
                pad = 18 if _has_limits(chart) else 6
                axes.set_title(plain(chart.title), loc="left", weight="bold", fontsize=11, pad=pad)
                _DRAWERS[type(chart)](axes, chart)

    return draw_figure(
        page.outcome, truncate_end(page.heading, 230), [truncate_end(page.meta, 150)], sum(heights), fill
    )


def draw_figure(
    outcome: Outcome,
    title: str,
    below: Sequence[str],
    height: float,
    fill: Callable[[Any], None],
    *,
    foot: float = 0.0,
) -> bytes:
    """Return a PNG, 1200 pixels wide, of a matplotlib figure.

    Args:
        outcome: decides the colour of the title.
        title: a sentence.
        below: lines below the title.
        height: inches of what `fill` draws.
        fill: draws the axes into the figure.
        foot: inches that are left free below them.
    """
    import warnings

    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = textwrap.wrap(title, 80)
    head = 0.31 * len(lines) + 0.22 * len(below) + 0.3
    full = max(height + head + foot, 1.0)
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # a user's own style would change the picture
        mpl.rcParams.update({"text.parse_math": False, "font.size": 10.5})  # `$` in a module's name is no formula
        warnings.simplefilter("ignore", UserWarning)  # a letter that the font lacks is drawn as a box
        figure = Figure(figsize=(_WIDTH, full), dpi=_DPI, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        layout: Any = figure.get_layout_engine()
        layout.set(rect=(0.0, foot / full, 1.0, 1 - (head + foot) / full), w_pad=0.08, h_pad=0.08)
        colour = OUTCOME_COLOURS[outcome]
        figure.text(0.012, 1 - 0.12 / full, "\n".join(lines), va="top", fontsize=16, weight="bold", color=colour)
        at = 1 - (0.2 + 0.31 * len(lines)) / full
        figure.text(0.012, at, "\n".join(below), va="top", fontsize=11, color="#333333", linespacing=1.3)
        fill(figure)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()


def _chart_rows(charts: Sequence[Chart]) -> list[list[Chart]]:
    """Return the charts by lines of the picture: up to three curves beside each other, anything else alone."""
    found: list[list[Chart]] = []
    for chart in charts:
        before = found[-1] if found else []
        if isinstance(chart, CurveChart) and 0 < len(before) < 3 and isinstance(before[-1], CurveChart):
            before.append(chart)
        else:
            found.append([chart])
    return found


def _height(chart: Chart) -> float:
    return 2.7 if isinstance(chart, CurveChart) else 1.0 + 0.2 * min(len(chart.rows), MAX_ROWS)


def _has_limits(chart: Chart) -> bool:
    return isinstance(chart, HeatChart) and bool(chart.limits)


def draw_curves(axes: Any, chart: CurveChart) -> None:
    """Draw the lines; skipped steps are marked on the axis."""
    for number, line in enumerate(chart.lines):
        if not line.values:
            continue
        values = [math.nan if value is None else value for value in line.values]
        nonfinite = sum(value is None for value in line.values)
        colour = COLOURS[number % 4]
        axes.plot(
            chart.steps[: len(values)],
            values,
            color=colour,
            linestyle=_PATTERNS[number % 4],
            linewidth=4.0 if number == 0 and len(chart.lines) > 1 else 1.8,
            label=truncate_middle(line.label, 24) + (f" ({nonfinite} not finite)" if nonfinite else ""),
            marker="o" if len(values) == 1 else None,
            markersize=9 - 2 * (number % 4),
        )
        skipped = sorted(set(line.skipped).intersection(chart.steps))
        axes.plot(skipped, [0.02] * len(skipped), "^", color=colour, transform=axes.get_xaxis_transform())
    known = [value for line in chart.lines for value in line.values if value is not None and math.isfinite(value)]
    if known and min(known) > 0 and max(known) > 100 * min(known):
        axes.set_yscale("log")
    axes.set_xlabel("step (triangle: skipped)" if any(line.skipped for line in chart.lines) else "step")
    format_axes(axes)
    if len(chart.lines) > 1:
        axes.legend(frameon=False, loc="upper right", fontsize=9)


def format_axes(axes: Any) -> None:
    """Format the axes: integers on x, plain numbers on y, a light grid, no box."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
        axes.tick_params(axis="y", which="minor", left=False, labelleft=False)
    axes.grid(axis="y", color="#d5dae1", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_heat(axes: Any, chart: HeatChart) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shares = [
        [math.nan if share is None else math.sqrt(min(share, 1.0)) for share in row] for row in chart.shares[:MAX_ROWS]
    ]
    colours = LinearSegmentedColormap.from_list("share", ["#ffffff", COLOURS[0]]).with_extremes(bad="#d5dae1")
    extent = (0.0, float(len(chart.columns)), float(len(shares)), 0.0)
    axes.imshow(shares, aspect="auto", cmap=colours, vmin=0.0, vmax=1.0, interpolation="nearest", extent=extent)
    every = max(1, math.ceil(len(chart.columns) / 12))
    shown = range(0, len(chart.columns), every)
    axes.set_xticks([column + 0.5 for column in shown], [chart.columns[column] for column in shown], fontsize=9)
    axes.set_xlabel(chart.column_name)
    _name_rows(axes, chart.rows, 0.5)
    for number, limit in enumerate(chart.limits):
        axes.axvline(limit.column, color="#b3261e", linewidth=1)
        side, shift = ("right", -3) if number % 2 == 0 else ("left", 3)
        axes.annotate(
            limit.label,
            (limit.column, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(shift, 3),
            textcoords="offset points",
            ha=side,
            fontsize=9,
            color="#b3261e",
        )


def _draw_bars(axes: Any, chart: BarChart) -> None:
    rows = range(min(len(chart.rows), MAX_ROWS))
    left = [0.0 for _ in rows]
    for number, part in enumerate(chart.parts):
        lengths = [part.lengths[row] for row in rows]
        axes.barh(list(rows), lengths, left=left, color=COLOURS[number % 4], label=part.label, height=0.8)
        left = [begin + length for begin, length in zip(left, lengths, strict=True)]
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(chart.length_name)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, ncols=4)
    _name_rows(axes, chart.rows, 0.0)


def _name_rows(axes: Any, rows: Sequence[str], shift: float) -> None:
    names = [truncate_middle(name or "(the model)", _NAME_LETTERS) for name in rows[:MAX_ROWS]]
    axes.set_yticks([number + shift for number in range(len(names))], names, fontsize=8.5)


_DRAWERS: Final[dict[type[Chart], Any]] = {CurveChart: draw_curves, HeatChart: _draw_heat, BarChart: _draw_bars}
