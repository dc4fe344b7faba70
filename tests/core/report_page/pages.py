"""Pages that tests draw and `page_in_browser` looks at."""

from __future__ import annotations

from polyamp.report_page.page import (
    BarChart,
    BarPart,
    ChartLimit,
    CurveChart,
    CurveLine,
    HeatChart,
    PageSection,
    PageTable,
    ReportPage,
)

MODULES = [f"model/layers/{number}/{name}" for number in range(4) for name in ("attention/query", "mlp/up", "norm")]
STEPS = list(range(100, 1300, 100))
COLUMNS = [str(exponent) for exponent in range(-40, 42, 2)]


def full_page(name: str = "model") -> ReportPage:
    """Return a page that has everything."""
    rows = [*MODULES, f"{name}/<script>alert(1)</script>"]
    scales = [2.0 ** (16 - n // 2) for n in range(12)]
    scale = CurveChart("loss scale", STEPS, [CurveLine("scale", scales, [300, 700])])
    losses = [2.0 / (n + 1) if n != 5 else None for n in range(12)]
    two = CurveChart(
        "loss", STEPS, [CurveLine("first", losses), CurveLine("second", [3.0 / (n + 1) for n in range(12)])]
    )
    shares = [[max(0.0, 1 - abs(c - 20 - r % 3) / 6) for c in range(len(COLUMNS))] for r in range(len(rows))]
    limits = [ChartLimit(8.0, "smallest"), ChartLimit(28.0, "largest")]
    heat = HeatChart("gradients", rows, COLUMNS, [*shares[:-1], [None] * len(COLUMNS)], "binary exponent", limits)
    parts = [BarPart("float16", [1.0 + r % 5 for r in range(len(rows))]), BarPart("float32", [2.0] * len(rows))]
    bars = BarChart("operations", rows, parts, "operations")
    table = PageTable("Modules", ["module", "underflow"], [[row, "3.1 %"] for row in rows])
    return ReportPage(
        "unfinished",
        "sinking",
        "The loss scale fell 6 times in 1,200 steps",
        f"{name}.jsonl, 12 records",
        [
            PageSection("Curves", ["A triangle marks a skipped step."], [scale, two]),
            PageSection("Gradients", [], [heat, bars], [table], 'overrides = {"norm": "float32"}'),
        ],
    )


def empty_page() -> ReportPage:
    """Return a page without a chart that has something to show."""
    nothing = CurveChart("loss", [1, 2], [CurveLine("loss", [None, None])])
    charts = [nothing, HeatChart("h", [], [], [], ""), BarChart("b", [], [], "")]
    return ReportPage("agree", "settled", "Nothing was recorded", "", [PageSection("Curves", [], charts)])
