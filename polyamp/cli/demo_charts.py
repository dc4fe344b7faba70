"""Picture of a demo report: loss curves, distances between the frameworks, loss scale and skipped steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from polyamp.demo.comparison_report import COMPARED_STEPS, LOSS_FLOOR, DemoReport, FrameworkRun, PolicyComparison

_STYLES: Final = (("#0072B2", "-", 4.0), ("#E69F00", "-", 2.2), ("#222222", (0, (4, 3)), 1.2), ("#CC79A7", ":", 1.2))
"""Colour, dashes and width of each framework's line. Later ones are thinner, so that coinciding curves stay visible."""
_PAIR_STYLES: Final = (("#009E73", "-"), ("#D55E00", "--"), ("#56B4E9", ":"), ("#666666", "-."))
_LEGEND_ANCHOR: Final = (1.02, 1.0)
"""Position of a legend: right of the last panel of its row, in axes fractions."""
_MIN_DISTANCE: Final = 1e-8
"""Least distance that is drawn; smaller ones are drawn here, because a logarithmic axis has no 0."""


def draw(report: DemoReport, path: Path) -> None:
    """Write the picture of a report with at least one run as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    policies = list(dict.fromkeys(run.policy for run in report.runs))
    scaled = [policy for policy in policies if any(max(run.scales) != 1.0 for run in _policy_runs(report, policy))]
    heights = [3.0] + [2.2] * bool(report.comparisons) + [2.2] * len(scaled)
    figure = Figure(figsize=(max(8.0, 4.2 * len(policies)), sum(heights) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), len(policies), height_ratios=heights)
    _draw_losses(figure, grid, report, policies)
    if report.comparisons:
        _draw_distances(figure, grid, report, policies)
    for number, policy in enumerate(scaled):
        axes = figure.add_subplot(grid[len(heights) - len(scaled) + number, :])
        _draw_scale(axes, _policy_runs(report, policy), policy, report)
    names = ", ".join(dict.fromkeys(f"{run.backend} {run.version.partition('+')[0]}" for run in report.runs))
    figure.suptitle(f"One recipe, the same weights and batches of handwritten digits: {names}", fontsize=13)
    figure.savefig(path, dpi=110)


def _draw_losses(figure: Any, grid: Any, report: DemoReport, policies: Sequence[str]) -> None:
    for policy, axes in _row_axes(figure, grid, 0, policies, "training loss (nats)", "framework"):
        axes.set(title=policy)
        for run in _policy_runs(report, policy):
            axes.plot(_steps(run), _plot_values(run.losses), label=run.backend, **_style(report, run.backend))


def _draw_distances(figure: Any, grid: Any, report: DemoReport, policies: Sequence[str]) -> None:
    label = "relative difference of\nthe loss between frameworks"
    for policy, axes in _row_axes(figure, grid, 1, policies, label, "pair"):
        axes.set(ylim=(_MIN_DISTANCE / 2, 1.0))
        comparison = next((item for item in report.comparisons if item.policy == policy), None)
        if comparison is not None:
            _draw_pairs(axes, _policy_runs(report, policy), comparison)


def _row_axes(
    figure: Any, grid: Any, row: int, policies: Sequence[str], label: str, legend: str
) -> Iterator[tuple[str, Any]]:
    """Yield each policy with its axes in a row of the grid. The first axes have the label, the last the legend."""
    first = None
    for column, policy in enumerate(policies):
        axes = figure.add_subplot(grid[row, column], sharey=first)
        first = first or axes
        axes.set(yscale="log", xlabel="step")
        if column == 0:
            axes.set_ylabel(label)
        else:
            axes.tick_params(labelleft=False)
        yield policy, axes
        _tidy(axes)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=_LEGEND_ANCHOR, title=legend, alignment="left")


def _draw_pairs(axes: Any, runs: Sequence[FrameworkRun], comparison: PolicyComparison) -> None:
    for number, (a, b) in enumerate(itertools.combinations(runs, 2)):
        colour, dashes = _PAIR_STYLES[number % len(_PAIR_STYLES)]
        gaps = [
            float("nan") if x is None or y is None else max(_MIN_DISTANCE, abs(x - y) / max(abs(x), abs(y), LOSS_FLOOR))
            for x, y in zip(a.losses, b.losses, strict=True)
        ]
        axes.plot(_steps(a), gaps, color=colour, linestyle=dashes, linewidth=1.1, label=f"{a.backend} - {b.backend}")
    limit = comparison.pairs[0].limit
    until = min(COMPARED_STEPS, len(runs[0].losses))
    axes.plot((0, until), (limit, limit), color="black", linewidth=1.5)
    axes.annotate(f"allowed: {limit:.1e}", (0, limit), xytext=(0, 4), textcoords="offset points", fontsize=9)


def _draw_scale(axes: Any, runs: Sequence[FrameworkRun], policy: str, report: DemoReport) -> None:
    """Draw the loss scale over the steps, and below it a row per framework with a mark per skipped step."""
    for run in runs:
        axes.step(_steps(run), run.scales, where="post", label=run.backend, **_style(report, run.backend))
    lowest, highest = min(min(run.scales) for run in runs), max(max(run.scales) for run in runs)
    for row, run in enumerate(runs, start=1):
        skipped = [step for step, skip in zip(_steps(run), run.skips, strict=True) if skip]
        height = lowest / 2.0 ** (1.4 * row)
        colour = _style(report, run.backend)["color"]
        axes.plot(skipped, [height] * len(skipped), linestyle="", marker="x", markersize=6, color=colour)
        label = f"skipped by {run.backend}: {run.skipped}"
        axes.annotate(label, (1.0, height), xycoords=("axes fraction", "data"), xytext=(6, 0), color=colour,
                      textcoords="offset points", va="center", fontsize=9, annotation_clip=False)  # fmt: skip
    axes.set_yscale("log", base=2)
    axes.set(title=f"{policy}: loss scale, and skipped steps (x)", xlabel="step", ylabel="loss scale")
    exponents = range(round(math.log2(lowest)), round(math.log2(highest)) + 1, 2)
    axes.set_yticks([2.0**exponent for exponent in exponents])
    axes.minorticks_off()
    axes.set_ylim(lowest / 2.0 ** (1.4 * len(runs) + 1.2), highest * 2.0)
    _tidy(axes)


def _policy_runs(report: DemoReport, policy: str) -> list[FrameworkRun]:
    return [run for run in report.runs if run.policy == policy]


def _steps(run: FrameworkRun) -> range:
    return range(len(run.losses))


def _plot_values(curve: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in curve]


def _style(report: DemoReport, backend: str) -> dict[str, Any]:
    backends = list(dict.fromkeys(run.backend for run in report.runs))
    colour, dashes, width = _STYLES[backends.index(backend) % len(_STYLES)]
    return {"color": colour, "linestyle": dashes, "linewidth": width}


def _tidy(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
