"""`diagnose_page`: the page of a diagnosis, drawn by `polyamp.report_page`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polyamp.diagnosis.report_data import DiagnoseFindings, DiagnosisTrial
from polyamp.monitor.exponent_chart import exponent_chart
from polyamp.monitor.monitor_page import percent
from polyamp.report_page.page import CurveChart, CurveLine, PageSection, PageTable, ReportPage

_OUTCOMES = {"fits": "agree", "overrides": "unfinished", "outside": "differ", "float32": "differ"}
_WORDS = {"fits": "fits", "overrides": "with overrides", "outside": "outside of modules", "float32": "float32 fails"}


def diagnose_page(report: DiagnoseFindings) -> ReportPage:
    """Return the page."""
    sections = [PageSection("Overrides", [], [], [], f"overrides = {report.overrides!r}")] if report.sensitive else []
    sections += [_magnitudes(report, kind) for kind in ("activations", "cotangents", "gradients", "weights")]
    sections.append(_trials(report))
    return ReportPage(
        _OUTCOMES[report.outcome],  # type: ignore[arg-type]  # one of the three
        _WORDS[report.outcome],
        report.verdict(),
        f"{report.backend} · {report.policy} · {report.updates} updates",
        sections,
    )


def _magnitudes(report: DiagnoseFindings, kind: str) -> PageSection:
    named = [(each.module, stats) for each in report.modules if (stats := getattr(each, kind)) is not None]
    scaled = kind in ("cotangents", "gradients") and report.loss_scale != 1.0
    said = f"Times the recommended loss scale, {report.loss_scale:g}. " if scaled else ""
    chart = exponent_chart(f"{kind} of each module by binary exponent, in float32", named, report.compute)
    rows = [
        [name, percent(stats.underflow), percent(stats.subnormal), percent(stats.overflow)]
        for name, stats in named
        if stats.underflow or stats.subnormal or stats.overflow
    ]
    tables = [
        PageTable(f"{kind} that do not fit {report.compute}", ["module", "underflow", "subnormal", "overflow"], rows)
    ]
    title = {"cotangents": "Gradients of activations", "gradients": "Gradients of parameters"}.get(
        kind, kind.capitalize()
    )
    return PageSection(title, [f"{said}Darker: more elements."], [chart], tables if rows else [])


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
