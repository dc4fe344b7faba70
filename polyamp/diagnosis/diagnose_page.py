"""`diagnose_page`: the page of a diagnosis, drawn by `polyamp.report_page`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from polyamp.diagnosis.report_data import DiagnoseFindings, DiagnosisTrial
from polyamp.monitor.exponent_chart import exponent_chart
from polyamp.monitor.monitor_page import percent
from polyamp.monitor.records import TensorStats
from polyamp.report_page.page import CurveChart, CurveLine, Outcome, PageSection, PageTable, ReportPage

MAX_DRAWN: Final = 40
"""Largest number of modules in a chart."""
_LEAST_LISTED: Final = 0.001
"""Share of a module's numbers that do not fit from which on it stands in the table."""
_OUTCOMES: Final[dict[str, Outcome]] = {
    "fits": "agree",
    "overrides": "unfinished",
    "outside": "differ",
    "float32": "differ",
}
_WORDS: Final = {
    "fits": "fits",
    "overrides": "with overrides",
    "outside": "outside of modules",
    "float32": "float32 fails",
}


def diagnose_page(report: DiagnoseFindings) -> ReportPage:
    """Return the page."""
    sections = [PageSection("Overrides", [], [], [], f"overrides = {report.overrides!r}")] if report.sensitive else []
    sections += [_magnitudes(report, kind) for kind in ("activations", "cotangents", "gradients", "weights")]
    sections.append(_trials(report))
    return ReportPage(
        _OUTCOMES[report.outcome],
        _WORDS[report.outcome],
        report.verdict(),
        f"{report.backend} · {report.policy} · {report.updates} updates",
        sections,
    )


def _magnitudes(report: DiagnoseFindings, kind: str) -> PageSection:
    every = [(each.module, stats) for each in report.modules if (stats := getattr(each, kind)) is not None]
    named = _chosen(every, set(report.sensitive))
    scaled = kind in ("cotangents", "gradients") and report.loss_scale != 1.0
    said = f"Times the recommended loss scale, {report.loss_scale:g}. " if scaled else ""
    left_out = f" {len(named)} of {len(every)} modules: those that fit least." if len(named) < len(every) else ""
    chart = exponent_chart(f"{kind} of each module by binary exponent, in float32", named, report.compute)
    rows = [
        [name, percent(stats.underflow), percent(stats.subnormal), percent(stats.overflow)]
        for name, stats in every
        if _misfit(stats) >= _LEAST_LISTED
    ]
    caption = f"{kind} of which at least {percent(_LEAST_LISTED)} do not fit {report.compute}"
    tables = [PageTable(caption, ["module", "underflow", "subnormal", "overflow"], rows)]
    titles = {"cotangents": "Gradients of activations", "gradients": "Gradients of parameters"}
    title = titles.get(kind, kind.capitalize())
    return PageSection(title, [f"{said}Darker: more elements.{left_out}"], [chart], tables if rows else [])


def _chosen(every: Sequence[tuple[str, TensorStats]], sensitive: set[str]) -> list[tuple[str, TensorStats]]:
    """Return the modules that are drawn: the sensitive ones, then those that fit least, in the order of the program."""
    ranked = sorted(range(len(every)), key=lambda n: (every[n][0] in sensitive, _misfit(every[n][1])), reverse=True)
    return [every[number] for number in sorted(ranked[:MAX_DRAWN])]


def _misfit(stats: TensorStats) -> float:
    return stats.underflow + stats.subnormal + stats.overflow


def _trials(report: DiagnoseFindings) -> PageSection:
    steps = list(range(1, len(report.losses) + 1))
    losses = [loss if math.isfinite(loss) else None for loss in report.losses]
    rows = [_trial_row(number, trial, report.trials) for number, trial in enumerate(report.trials, 1)]
    table = PageTable(
        f"Trainings under the policy; up to {report.tolerance:.2g} apart from float32 they agree",
        ["trial", "modules in float32", "distance", "verdict"],
        rows,
    )
    return PageSection("Trials", [], [CurveChart("loss in float32", steps, [CurveLine("float32", losses)])], [table])


def _trial_row(number: int, trial: DiagnosisTrial, trials: Sequence[DiagnosisTrial]) -> list[str]:
    listed = ", ".join(trial.float32) if len(trial.float32) <= 4 else f"{len(trial.float32)} modules"
    distance = "not finite, or skipped for good" if trial.distance is None else f"{trial.distance:.2g}"
    return [str(number), listed or "none", distance, "agrees" if trial.agrees else "differs"]
