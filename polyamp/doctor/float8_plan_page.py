"""`float8_plan_page`: the page of a float8 plan, drawn by `polyamp.report_page`."""

from __future__ import annotations

from polyamp.doctor.float8_plan_data import LAYER_HEADING, Float8PlanFindings, layer_rows
from polyamp.report_page.page import BarChart, BarPart, PageSection, PageTable, ReportPage


def float8_plan_page(report: Float8PlanFindings) -> ReportPage:
    """Return the page."""
    decides = bool(report.layers) and not report.emulated
    caption = "products of each module with their gradients, casts and quantization"
    names = [f"{row.module or '.'} {row.shape}" for row in report.layers]
    charts = [
        BarChart(f"products in {word} of a forward and backward pass", names, [BarPart(word, times)], "milliseconds")
        for word, times in (
            ("bfloat16", [row.count * row.bfloat16_ms for row in report.layers]),
            ("float8", [row.count * row.float8_ms for row in report.layers]),
        )
    ]
    sections = [PageSection("Overrides", code=f"overrides = {report.overrides!r}")] if report.overrides else []
    table = PageTable(caption, LAYER_HEADING, layer_rows(report))
    sections.append(PageSection("Layers", charts=charts, tables=[table] if report.layers else []))
    return ReportPage(
        "agree" if decides else "unfinished",
        "plan" if decides else "emulated" if report.emulated else "no products",
        report.verdict(),
        f"{report.backend} · {report.policy} · {report.device_label}",
        sections,
    )
