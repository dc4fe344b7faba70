"""`draw`: the first view of a report as a PNG: loss curves and every module's error, with the verdict as title. `page`
writes it."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import Any, Final

from polyamp.parity import page_parts, words
from polyamp.parity.findings import Comparison, Curve, Findings, Row

_SIDES: Final = (("#0b5cad", "-", 4.0), ("#d9730d", "-", 1.8), ("#12806f", (0, (5, 3)), 1.8), ("#7c3aed", ":", 1.8))
"""Colour, pattern and width of each side's line: the first is the widest and the last two have gaps, so that equal
curves all stay visible."""
_PASSES: Final = (("forward", "o", "#0b5cad"), ("backward", "s", "#12806f"), ("update", "^", "#7c3aed"))
_BAD: Final = "#b3261e"
_OUTCOMES: Final = {"agree": "#17663a", "differ": _BAD, "unfinished": "#7a4b00"}
_COLUMNS: Final = 4
"""Phases that are drawn; the page has all."""
_WIDTH: Final = 12.0
_DPI: Final = 100


def draw(report: Findings) -> bytes:
    """A PNG, 1200 pixels wide."""
    import warnings

    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # a user's own style would change the picture
        mpl.rcParams.update({"text.parse_math": False, "font.size": 10.5})  # `$` in a module's name is no formula
        warnings.simplefilter("ignore", UserWarning)  # a letter of a name that the font does not have is drawn as a box
        return _drawn(report)


def _drawn(report: Findings) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pair = words.parted(report) or next(iter(report.comparisons), None)
    rows = pair.rows if pair is not None else []
    compared = dict.fromkeys(row.phase for row in rows)  # not what only judges another phase
    phases = list(compared or dict.fromkeys(report.phases))[:_COLUMNS]
    curves = any(curve.loss for curve in report.curves if curve.phase in phases)
    heights = [2.9] * curves + [3.3] * bool(rows)
    title = textwrap.wrap(words.fit(words.verdict(report), 230), 80)
    below = [line for text in _below(report) for line in textwrap.wrap(words.cut(text, 230), 125)]
    head, foot = 0.31 * len(title) + 0.22 * len(below) + 0.3, 0.55 if rows else 0.0
    full = sum(heights) + head + foot
    figure = Figure(figsize=(_WIDTH, full), dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0.0, foot / full, 1.0, 1 - (head + foot) / full), w_pad=0.08, h_pad=0.08)
    colour = _OUTCOMES[words.outcome(report)]
    figure.text(0.012, 1 - 0.12 / full, "\n".join(title), va="top", fontsize=16, weight="bold", color=colour)
    at = 1 - (0.2 + 0.31 * len(title)) / full
    figure.text(0.012, at, "\n".join(below), va="top", fontsize=11, color="#333333", linespacing=1.3)
    marks: dict[str, Any] = {}
    grid: Any = figure.add_gridspec(max(len(heights), 1), max(len(phases), 1), height_ratios=heights or None)
    for column, phase in enumerate(phases):
        if curves:
            _losses(figure.add_subplot(grid[0, column]), report, phase, column == 0)
        if pair is not None and rows:
            axes = figure.add_subplot(grid[len(heights) - 1, column])
            _errors(axes, pair, phase, column == 0)
            marks.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if marks:
        figure.legend(marks.values(), marks.keys(), loc="lower left", ncols=6, frameon=False, fontsize=9.5)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _below(report: Findings) -> list[str]:
    """What stands below the title: the sentence, the distance, the failures."""
    first = report.first
    told = [] if first is None else [words.plain(first.sentence), f"Apart: {words.distance(first)}."]
    told += [f"{words.endings(each)}: {words.plain(each.message)}" for each in report.failures[:2]]
    return [text for text in told if text]


def _losses(axes: Any, report: Findings, phase: str, leftmost: bool) -> None:
    """The loss of each side under one phase; skipped steps are marked on the axis."""
    labels = words.labels(report)
    curves = [curve for curve in report.curves if curve.phase == phase and curve.loss]
    for curve in curves:
        number = labels.index(curve.side) % len(_SIDES)
        colour, pattern, width = _SIDES[number]
        steps = range(1, len(curve.loss) + 1)
        values = [math.nan if value is None else value for value in curve.loss]
        dot = {"marker": "o", "markersize": 9 - 3 * number} if len(values) == 1 else {}
        name = words.fit(curve.side, 24) + _lost(curve)
        axes.plot(steps, values, label=name, color=colour, linestyle=pattern, linewidth=width, **dot)
        skipped = [step for step in curve.skipped if step <= len(values)]
        if skipped:
            axes.plot(skipped, [0.02] * len(skipped), "^", color=colour, transform=axes.get_xaxis_transform())
    finite = [value for curve in curves for value in curve.loss if value is not None]
    if finite and min(finite) > 0 and max(finite) > 100 * min(finite):
        axes.set_yscale("log")
    axes.set_title(words.fit(phase, 40), loc="left", weight="bold")
    axes.set_xlabel("step (triangle: skipped)" if any(curve.skipped for curve in curves) else "step")
    if leftmost:
        axes.set_ylabel("loss")
    _whole(axes)
    if curves:
        axes.legend(frameon=False, loc="upper right", fontsize=9.5)
    else:
        axes.text(0.5, 0.5, "no steps", transform=axes.transAxes, ha="center", color="#555555")


def _lost(curve: Curve) -> str:
    """How many of a curve's values are not there to be drawn, as part of a legend."""
    lost = sum(value is None for value in curve.loss)
    return f" ({lost} not finite)" if lost else ""


def _errors(axes: Any, pair: Comparison, phase: str, leftmost: bool) -> None:
    """The error of each module along the program in each pass, and what rounding allows."""
    modules = {module: number for number, module in enumerate(page_parts.program(pair.rows), 1) if module}
    rows = [row for row in pair.rows if row.phase == phase and row.module]
    told = [value for row in rows for value in (row.distance, row.allowed) if value]
    axes.set_yscale("log")
    if told:
        axes.set_ylim(min(told) / 3, max(told) * 3)
    for stage, marker, colour in _PASSES:
        found = page_parts.by_module(rows, stage)
        for counts in (False, True):
            own = [(modules[module], row) for module, row in found.items() if row.counts == counts]
            if own:
                label = f"{stage}, {'beyond' if counts else 'within'}"
                _marks(axes, own, marker, _BAD if counts else colour, counts, label)
        line = sorted((modules[module], row.allowed) for module, row in found.items() if row.allowed)
        if line:
            name = f"{stage}, allowed"
            axes.plot(*zip(*line, strict=True), color=colour, linestyle="--", linewidth=1, label=name)
    first = pair.first
    if first is not None and first.phase == phase and first.module in modules:
        axes.axvline(modules[first.module], color=_BAD, linewidth=0.8)
    axes.set_title(f"error per module, {words.fit(phase, 32)}", loc="left", fontsize=10.5)
    axes.set_xlabel("module, in the order of the program")
    axes.set_xlim(0.5, max(len(modules), 1) + 0.5)
    if leftmost:
        axes.set_ylabel("relative error")
    _whole(axes)


def _marks(axes: Any, rows: Sequence[tuple[int, Row]], marker: str, colour: str, counts: bool, label: str) -> None:
    """One pass' marks: hollow where they are within, filled where they are beyond; what is not finite is at the top."""
    low, high = axes.get_ylim()
    values = [high / 1.2 if row.distance is None else max(row.distance, low * 1.2) for _, row in rows]
    face = colour if counts else "none"
    places = [number for number, _ in rows]
    axes.plot(places, values, marker, markersize=5, color=colour, markerfacecolor=face, linestyle="none", label=label)


def _whole(axes: Any) -> None:
    """Whole numbers below, plain ones beside, a light grid, no box."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words.number(value)))
        axes.tick_params(axis="y", which="minor", left=False, labelleft=False)
    axes.grid(axis="y", color="#d5dae1", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
