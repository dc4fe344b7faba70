"""`draw`: a report as a PNG, with loss curves, the error of every module, and the verdict as title."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any, Final

from polyamp.parity.report import formatting, html_page
from polyamp.parity.report_data import Comparison, ComparisonRow, Curve, Findings
from polyamp.report_page import png_page
from polyamp.report_page.page import CurveChart, CurveLine

_STAGE_STYLES: Final = (("forward", "o", "#0b5cad"), ("backward", "s", "#12806f"), ("update", "^", "#7c3aed"))
_DIFFERENCE_COLOUR: Final = png_page.OUTCOME_COLOURS["differ"]
_MAX_NAMED: Final = 20
"""Largest number of modules that are named below the charts of all phases together."""
_MAX_NAME: Final = 22
"""Columns of a module's name."""
_MAX_PHASES: Final = 4
"""Largest number of phases that are drawn; the page has all."""


def draw(report: Findings) -> bytes:
    """Return a PNG, 1200 pixels wide."""
    pair = formatting.divergent_comparison(report) or next(iter(report.comparisons), None)
    rows = pair.rows if pair is not None else []
    compared = dict.fromkeys(row.phase for row in rows)  # without reference phases
    phases = list(compared or dict.fromkeys(report.phases))[:_MAX_PHASES]
    curves = any(curve.loss for curve in report.curves if curve.phase in phases)
    heights = [2.9] * curves + [4.0] * bool(rows)

    def fill(figure: Any) -> None:
        marks: dict[str, Any] = {}
        grid: Any = figure.add_gridspec(max(len(heights), 1), max(len(phases), 1), height_ratios=heights or None)
        for column, phase in enumerate(phases):
            if curves:
                _draw_losses(figure.add_subplot(grid[0, column]), report, phase, column == 0)
            if pair is not None and rows:
                axes = figure.add_subplot(grid[len(heights) - 1, column])
                _draw_errors(axes, pair, phase, column == 0, _MAX_NAMED // len(phases))
                marks.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if marks:
            figure.legend(marks.values(), marks.keys(), loc="lower left", ncols=6, frameon=False, fontsize=9.5)

    title = formatting.truncate_middle(formatting.verdict(report), 230)
    below = [
        line for text in _subtitle_texts(report) for line in textwrap.wrap(formatting.truncate_end(text, 230), 125)
    ]
    outcome = formatting.outcome(report)
    return png_page.draw_figure(outcome, title, below, sum(heights), fill, foot=0.55 if rows else 0.0)


def _subtitle_texts(report: Findings) -> list[str]:
    """Return the texts below the title: the diagnosis, the distance, the failures."""
    first = report.first
    texts = [] if first is None else [formatting.plain(first.sentence), f"Apart: {formatting.distance(first)}."]
    texts += [f"{formatting.failure_text(each)}: {formatting.plain(each.message)}" for each in report.failures[:2]]
    return [text for text in texts if text]


def _draw_losses(axes: Any, report: Findings, phase: str, leftmost: bool) -> None:
    """Draw the loss of each side under one phase."""
    curves = {curve.side: curve for curve in report.curves if curve.phase == phase and curve.loss}
    sides = [curves.get(label, Curve(side=label, phase=phase)) for label in formatting.labels(report)]
    lines = [CurveLine(curve.side, curve.loss, curve.skipped) for curve in sides]
    steps = range(1, max((len(line.values) for line in lines), default=0) + 1)
    png_page.draw_curves(axes, CurveChart("loss", steps, lines))
    axes.set_title(formatting.truncate_middle(phase, 40), loc="left", weight="bold")
    if leftmost:
        axes.set_ylabel("loss")
    if not curves:
        axes.text(0.5, 0.5, "no steps", transform=axes.transAxes, ha="center", color="#555555")


def _draw_errors(axes: Any, pair: Comparison, phase: str, leftmost: bool, named: int) -> None:
    """Draw the error of each module in program order for each pass, and what rounding allows; some are named."""
    modules = {module: number for number, module in enumerate(html_page.program_order(pair.rows), 1) if module}
    rows = [row for row in pair.rows if row.phase == phase and row.module]
    values = [value for row in rows for value in (row.distance, row.allowed) if value]
    axes.set_yscale("log")
    if values:
        axes.set_ylim(min(values) / 3, max(values) * 3)
    for stage, marker, colour in _STAGE_STYLES:
        found = html_page.worst_row_by_module(rows, stage)
        for counts in (False, True):
            own = [(modules[module], row) for module, row in found.items() if row.counts == counts]
            if own:
                label = f"{stage}, {'beyond' if counts else 'within'}"
                _draw_marks(axes, own, marker, _DIFFERENCE_COLOUR if counts else colour, counts, label)
        line = sorted((modules[module], row.allowed) for module, row in found.items() if row.allowed)
        if line:
            name = f"{stage}, allowed"
            axes.plot(*zip(*line, strict=True), color=colour, linestyle="--", linewidth=1, label=name)
    first = pair.first
    if first is not None and first.phase == phase and first.module in modules:
        axes.axvline(modules[first.module], color=_DIFFERENCE_COLOUR, linewidth=0.8)
    axes.set_title(f"error per module, {formatting.truncate_middle(phase, 32)}", loc="left", fontsize=10.5)
    axes.set_xlabel("module, in the order of the program")
    axes.set_xlim(0.5, max(len(modules), 1) + 0.5)
    if leftmost:
        axes.set_ylabel("relative error")
    png_page.format_axes(axes)
    names = named_modules(list(modules), named, None if first is None or first.phase != phase else first.module)
    plain = map(formatting.plain, names)
    labels = [name if len(name) <= _MAX_NAME else f"...{name[3 - _MAX_NAME :]}" for name in plain]
    axes.set_xticks([modules[name] for name in names], labels, rotation=35, ha="right", fontsize=8.5)


def named_modules(modules: Sequence[str], count: int, divergent: str | None) -> list[str]:
    """Return the modules that are named: all, or every second, third, ..., and the one of the divergence.

    >>> named_modules(["a", "b", "c", "d", "e"], 2, "d")
    ['a', 'd']
    """
    stride = max(math.ceil(len(modules) / max(count, 1)), 1)
    chosen = set(range(0, len(modules), stride))
    if divergent in modules:
        place = modules.index(divergent)
        chosen = {each for each in chosen if abs(each - place) >= (stride + 1) // 2} | {place}
    return [modules[each] for each in sorted(chosen)]


def _draw_marks(
    axes: Any, rows: Sequence[tuple[int, ComparisonRow]], marker: str, colour: str, counts: bool, label: str
) -> None:
    """Draw the marks of one pass: hollow within the tolerance, filled beyond it; non-finite ones at the top."""
    low, high = axes.get_ylim()
    values = [high / 1.2 if row.distance is None else max(row.distance, low * 1.2) for _, row in rows]
    face = colour if counts else "none"
    places = [number for number, _ in rows]
    axes.plot(places, values, marker, markersize=5, color=colour, markerfacecolor=face, linestyle="none", label=label)
