"""`monitor_page`: the page of a monitor's records, drawn by `polyamp.report_page`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from polyamp.monitor.exponent_chart import exponent_chart
from polyamp.monitor.records import (
    PRODUCT_OPERANDS,
    ModuleRecord,
    MonitorHeader,
    MonitorRecord,
    OutputStats,
    ProductStats,
    RoundingStats,
    TensorStats,
)
from polyamp.report_page.page import (
    CurveChart,
    CurveLine,
    HeatChart,
    Outcome,
    PageSection,
    PageTable,
    ReportPage,
)
from polyamp.report_page.text_format import count_text

_OUTCOMES: Final[dict[str, Outcome]] = {"settled": "agree", "searching": "unfinished", "sinking": "differ"}


def monitor_page(header: MonitorHeader, records: Sequence[MonitorRecord]) -> ReportPage:
    """Return the page; records are in order."""
    if not records:
        return ReportPage("unfinished", "no records", "Nothing was recorded", _meta(header, records), [])
    last = records[-1]
    sections = [_curves(records)]
    if any(record.modules for record in records):
        sections += _modules(header, records)
    return ReportPage(
        _OUTCOMES[last.word],
        last.word,
        f"After {count_text(last.call, 'step')}: {last.reason}",
        _meta(header, records),
        sections,
    )


def percent(share: float) -> str:
    """Return a share as a percentage of three digits.

    >>> percent(0.0), percent(0.12345), percent(1e-6), percent(1.0)
    ('0', '12.3 %', '0.0001 %', '100 %')
    """
    return f"{100 * share:.3g} %" if share >= 1e-6 else ("0" if share == 0.0 else "< 0.0001 %")


def _meta(header: MonitorHeader, records: Sequence[MonitorRecord]) -> str:
    return f"{header.backend} · {header.policy} · {count_text(len(records), 'record')}, one every {header.every} steps"


def _curves(records: Sequence[MonitorRecord]) -> PageSection:
    steps = [record.call for record in records]
    skipped = [record.call for record in records if record.skipped]

    def chart(title: str, values: Sequence[float]) -> CurveChart:
        finite = [value if math.isfinite(value) else None for value in values]
        return CurveChart(title, steps, [CurveLine(title, finite, skipped)])

    known = [record.skips for record in records if record.skips is not None]
    return PageSection(
        "Curves",
        [
            f"{sum(known):,} of {records[-1].call:,} steps were skipped. A triangle on the axis marks a record of a "
            "skipped step; a cross at the top a value that is not finite."
        ],
        [
            chart("loss", [record.loss for record in records]),
            chart("gradient norm", [record.grad_norm for record in records]),
            chart("loss scale", [record.scale for record in records]),
        ],
    )


def _modules(header: MonitorHeader, records: Sequence[MonitorRecord]) -> list[PageSection]:
    last = next(record for record in reversed(records) if record.modules)
    sections = [_exponents(header, last, kind) for kind in ("gradients", "weights")]
    found = [section for section in sections if section is not None]
    lost = _lost_shares(records)
    if lost is not None:
        found.append(lost)
    rows = [
        [
            each.module or "(the model)",
            *([percent(getattr(each.gradients, name)) for name in _SHARES] if each.gradients else ["-"] * len(_SHARES)),
            f"{each.gradients.norm:.3g}" if each.gradients else "-",
            "-" if each.update_ratio is None else f"{each.update_ratio:.2g}",
        ]
        for each in last.modules
        if has_parameter_figures(each)
    ]
    heading = ["module", *_SHARES, "gradient norm", "update / weight"]
    caption = f"Gradients in call {last.call:,}, judged times the loss scale in {header.compute}"
    tables = [PageTable(caption, heading, rows)]
    outputs = [(each.module or "(the model)", each.activations) for each in last.modules if each.activations]
    if outputs:
        caption = f"Outputs of modules in call {last.call:,}, judged in {header.compute}"
        shown = [[path, *output_cells(stats)] for path, stats in outputs]
        tables.append(PageTable(caption, ["module", *OUTPUT_COLUMNS], shown))
    products = [(each.module or "(the model)", each.products) for each in last.modules if each.products]
    if products:
        caption = f"Operands of products in 8 bits in call {last.call:,}: what their rounding lost"
        shown = [[path, *product_cells(stats)] for path, stats in products]
        tables.append(PageTable(caption, ["module", *PRODUCT_COLUMNS], shown))
    return [*found, PageSection("Modules", [], [], tables)]


OUTPUT_COLUMNS: Final = ("zero", "underflow", "subnormal", "overflow", "RMS", "largest")


def output_cells(stats: OutputStats) -> list[str]:
    """Return the cells of `OUTPUT_COLUMNS` for a module's outputs."""
    return [*(percent(getattr(stats, name)) for name in _SHARES), f"{stats.rms:.3g}", f"{stats.largest:.3g}"]


PRODUCT_COLUMNS: Final = ("x zeroed", "w zeroed", "g zeroed", "x dB", "w dB", "g dB")


def product_cells(stats: ProductStats) -> list[str]:
    """Return the cells of `PRODUCT_COLUMNS` for a module's products in 8 bits."""
    rounding: list[RoundingStats] = [getattr(stats, operand) for operand in PRODUCT_OPERANDS]
    ratios = ["-" if each.sqnr is None else f"{each.sqnr:.1f}" for each in rounding]
    return [*(percent(each.underflow) for each in rounding), *ratios]


def has_parameter_figures(record: ModuleRecord) -> bool:
    """Return whether a module's record has figures of its parameters."""
    return record != ModuleRecord(module=record.module, activations=record.activations, products=record.products)


_SHARES: Final = ("zero", "underflow", "subnormal", "overflow")


def _exponents(header: MonitorHeader, record: MonitorRecord, kind: str) -> PageSection | None:
    """Return the histogram of exponents of every module in one record."""
    named: list[tuple[str, TensorStats]] = [
        (each.module, stats)
        for each in record.modules
        if (stats := getattr(each, kind)) is not None and stats.exponents
    ]
    if not named:
        return None
    factor = f"times the loss scale, {record.scale:g}" if kind == "gradients" else "as they are stored"
    chart = exponent_chart(f"{kind} of each module by binary exponent", named, header.compute)
    return PageSection(f"Exponents of {kind}", [f"Call {record.call:,}, {factor}. Darker: more elements."], [chart])


def _lost_shares(records: Sequence[MonitorRecord]) -> PageSection | None:
    """Return the share of zeros and underflow of every module over time."""
    timed = [record for record in records if any(each.gradients for each in record.modules)]
    if len(timed) < 2:
        return None
    timed = timed[:: math.ceil(len(timed) / 60)]
    modules = list(dict.fromkeys(each.module for record in timed for each in record.modules if each.gradients))
    table = [{each.module: each.gradients for each in record.modules} for record in timed]
    shares = [
        [None if (stats := row.get(module)) is None else stats.zero + stats.underflow for row in table]
        for module in modules
    ]
    title = "gradients that are zero in 16 bits, by module and call"
    chart = HeatChart(title, modules, [f"{record.call:,}" for record in timed], shares, "call of the step")
    return PageSection("Zeros over time", ["Darker: more of the module's gradients are zero or underflow."], [chart])
