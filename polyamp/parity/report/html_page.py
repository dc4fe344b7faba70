"""`render_html`, which renders the HTML page of a report: table lines, charts and texts.

The page is `template/report.html`, filled from the sections that are computed here. Its style and script are inline,
and a content security policy forbids everything else, whatever a model's names contain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from polyamp.errors import join_first
from polyamp.parity.report import formatting, html_charts
from polyamp.parity.report_data import Comparison, ComparisonRow, Curve, Divergence, Findings
from polyamp.report_page.html_page import csp_hash, load_template, page_css, safe_markup
from polyamp.report_page.page import CurveChart, CurveLine
from polyamp.report_page.svg_charts import draw_chart

_TEMPLATE_FOLDER: Final = Path(__file__).parent / "template"
MAX_PAGE_BYTES: Final = 490_000
"""Largest size of the page in bytes. Longer module tables are cut to fit, with a note on the page."""
_STAGE_TEXTS: Final = {
    "forward": "the forward pass of step",
    "backward": "the backward pass of step",
    "step": "the numbers of step",
    "update": "the update of step",
}
_STAGE_TITLES: Final = {"forward": "forward", "backward": "backward", "update": "update"}
_CURVE_TITLES: Final = {"loss": "loss", "grad_norm": "gradient norm", "scale": "loss scale"}


class QuantityText(NamedTuple):
    """Row of a comparison, as text."""

    what: str
    stage: str
    step: int
    distance: str
    allowed: str
    share: str
    dtypes: tuple[str, str]
    counts: bool


class ModuleLine(NamedTuple):
    """Table line of a module under one phase.

    Attributes: `worst` is the quantity with the largest share of its allowed distance; `dtypes` those in which the
    sides differ, if they differ anywhere; `first`: the module is the first divergence.
    """

    number: int
    module: str
    phase: str
    worst: QuantityText
    dtypes: tuple[str, str]
    counts: bool
    first: bool
    others: Sequence[QuantityText]


class ComparisonSection(NamedTuple):
    """Table and charts of a comparison.

    Attributes: `number` is its position on the page, from 0, divergent comparisons first; `left_out` the number of
    omitted lines; `brief`: not every quantity of every line is listed, because the page would be too large.
    """

    comparison: Comparison
    number: int
    lines: Sequence[ModuleLine]
    left_out: int
    brief: bool
    charts: Sequence[tuple[str, Sequence[tuple[str, str]]]]


class PhaseSection(NamedTuple):
    """Metrics of the steps under one phase.

    Attributes: `judge`: the phase is only a reference for another; title and SVG of each chart; a heading and a line
    for each side.
    """

    name: str
    judge: bool
    sides: Sequence[tuple[int, str]]
    charts: Sequence[tuple[str, str]]
    heading: Sequence[str]
    numbers: Sequence[Sequence[str]]
    marked: bool


def program_order(rows: Iterable[ComparisonRow]) -> list[str]:
    """Return the modules in the order of the program; the whole model, which has no path, comes last."""
    found = list(dict.fromkeys(row.module for row in rows))
    return sorted(found, key=lambda path: path == "")


def worst_row(rows: Iterable[ComparisonRow]) -> ComparisonRow | None:
    """Return the row that counts as a difference, or that is nearest to it."""
    return max(rows, key=lambda row: (row.counts, row.allowed_share), default=None)


def worst_row_by_module(rows: Iterable[ComparisonRow], stage: str = "") -> dict[str, ComparisonRow]:
    """Return the worst row of each module, in one pass or in all."""
    groups: dict[str, list[ComparisonRow]] = {}
    for row in rows:
        if not stage or row.stage == stage:
            groups.setdefault(row.module, []).append(row)
    return {module: found for module, group in groups.items() if (found := worst_row(group)) is not None}


def comparison_sections(report: Findings, budget: int) -> list[ComparisonSection]:
    """Return a section for every comparison; long tables are shortened to fit into about `budget` bytes together."""
    tables = [_module_lines(each) for each in report.comparisons]
    chosen = [
        [line for _, line in sorted(_select_lines(table, _line_bytes, budget // len(tables)))] for table in tables
    ]
    all_lines = [line for table in chosen for line in table]
    listed = {
        id(line) for _, line in _select_lines(all_lines, _quantity_bytes, budget - sum(map(_line_bytes, all_lines)))
    }
    ranks = sorted(range(len(tables)), key=lambda index: report.comparisons[index].first is None)
    found = []
    for index, (each, table, lines) in enumerate(zip(report.comparisons, tables, chosen, strict=True)):
        shown = [line if id(line) in listed else line._replace(others=()) for line in lines]
        charts = list(_error_charts(each, program_order(each.rows)))
        found.append(
            ComparisonSection(
                each, ranks.index(index), shown, len(table) - len(lines), len(listed) < len(all_lines), charts
            )
        )
    return found


def phase_sections(report: Findings) -> list[PhaseSection]:
    """Return the metrics of the steps under each phase; reference phases come after the policies."""
    labels = formatting.labels(report)
    compared = [row.phase for each in report.comparisons for row in each.rows]
    names = dict.fromkeys([*compared, *report.phases, *(curve.phase for curve in report.curves)])
    found = []
    for name in names:
        curves = [curve for curve in report.curves if curve.phase == name]
        if curves:
            judge = name == "float64" and name not in compared
            found.append(_phase_section(name, judge, curves, labels))
    return found


def statistics_rows(first: Divergence) -> list[tuple[str, list[str], bool]]:
    """Return the statistics of both sides as rows: name, a text for each side, whether they differ."""
    statistics = formatting.statistics(first)
    names = dict.fromkeys(["dtype", "shape", "value", "mean", "rms", "largest", "inf or NaN", "zeros", "fits in"])
    for label, side in first.sides.items():
        statistics[label]["dtype"] = side.dtype
        statistics[label]["shape"] = " x ".join(map(str, side.shape))
    found = []
    for name in names:
        texts = [values.get(name, "") for values in statistics.values()]
        if any(texts):
            found.append((name, [text or "-" for text in texts], len(set(texts)) > 1))
    return found


def recipe_texts(report: Findings) -> list[tuple[str, str]]:
    """Return each recipe as TOML, with the sides that have it."""
    texts: dict[str, list[str]] = {}
    for label, recipe in report.recipes.items():
        texts.setdefault(_toml_text(recipe), []).append(label)
    return [(formatting.join_words(sides), text) for text, sides in texts.items()]


def _module_lines(comparison: Comparison) -> list[ModuleLine]:
    modules = {module: number for number, module in enumerate(program_order(comparison.rows), 1)}
    found = []
    for phase in dict.fromkeys(row.phase for row in comparison.rows):
        groups: dict[str, list[ComparisonRow]] = {module: [] for module in modules}
        for row in comparison.rows:
            if row.phase == phase:
                groups[row.module].append(row)
        found += [_module_line(modules[module], group, comparison.first) for module, group in groups.items() if group]
    return found


def _module_line(number: int, rows: list[ComparisonRow], first: Divergence | None) -> ModuleLine:
    worst = max(rows, key=lambda row: (row.counts, row.allowed_share))
    apart = [row.dtypes for row in rows if row.dtypes[0] != row.dtypes[1]]
    outputs = [row.dtypes for row in rows if row.what == "output"]
    is_here = first is not None and (first.phase, first.module) == (worst.phase, worst.module)
    others = [_quantity_text(row) for row in rows] if len(rows) > 1 else []
    dtypes = [*apart, *outputs, worst.dtypes][0]
    return ModuleLine(
        number,
        formatting.module(worst.module),
        worst.phase,
        _quantity_text(worst),
        dtypes,
        worst.counts,
        is_here,
        others,
    )


def _quantity_text(row: ComparisonRow) -> QuantityText:
    what, part = formatting.quantity(row.what, row.name), formatting.ratio_text(row.allowed_share)
    distance, allowed = formatting.number(row.distance), formatting.number(row.allowed)
    return QuantityText(what, row.stage, row.step, distance, allowed, part, row.dtypes, row.counts)


def _line_share(quantity: QuantityText) -> float:
    return float("inf") if quantity.share == "not finite" else float(quantity.share)


def _select_lines(
    lines: list[ModuleLine], size: Callable[[ModuleLine], int], budget: int
) -> list[tuple[int, ModuleLine]]:
    """Return the lines that fit, with their indices: the first divergence, then those that differ, then the nearest."""
    order = sorted(
        enumerate(lines), key=lambda item: (not item[1].first, not item[1].counts, -_line_share(item[1].worst))
    )
    used = itertools.accumulate(size(line) for _, line in order)
    return [item for item, upto in zip(order, used, strict=True) if upto <= budget]


def _line_bytes(line: ModuleLine) -> int:
    """Estimate the bytes of a line in the page without its quantities."""
    return 150 + len(line.module.encode()) + len(line.worst.what.encode())


def _quantity_bytes(line: ModuleLine) -> int:
    """Estimate the bytes of a line's quantities."""
    return 40 + sum(60 + len(each.what.encode()) for each in line.others) if line.others else 0


def _error_charts(comparison: Comparison, modules: list[str]) -> Iterable[tuple[str, list[tuple[str, str]]]]:
    """Yield each phase with the charts of its passes."""
    numbers = {module: number for number, module in enumerate(modules, 1) if module}
    first = comparison.first
    for phase in dict.fromkeys(row.phase for row in comparison.rows):
        charts = []
        for stage, title in _STAGE_TITLES.items():
            rows = worst_row_by_module([row for row in comparison.rows if row.phase == phase and row.module], stage)
            points = sorted(((numbers[module], row) for module, row in rows.items()), key=lambda point: point[0])
            is_here = first is not None and (first.phase, first.stage) == (phase, stage)
            mark = numbers.get(first.module) if is_here and first is not None else None
            chart = html_charts.error_chart(f"{title}, {phase}", points, len(numbers), mark)
            if chart:
                charts.append((title, chart))
        yield phase, charts


def _phase_section(name: str, judge: bool, curves: list[Curve], labels: list[str]) -> PhaseSection:
    """Return the charts and the numbers of one phase."""
    numbers = [labels.index(curve.side) if curve.side in labels else 0 for curve in curves]
    charts, columns = [], []
    for field, title in _CURVE_TITLES.items():
        values: list[list[float | None]] = [getattr(curve, field) for curve in curves]
        if not any(values):
            continue
        steps = max(map(len, values))
        changes = len({value for line in values for value in line}) > 1
        if steps > 1 and changes:
            own = {number: (line, curve.skipped) for number, line, curve in zip(numbers, values, curves, strict=True)}
            lines = [CurveLine(f"side {number + 1}", *own.get(number, ((),))) for number in range(max(numbers) + 1)]
            charts.append((title, draw_chart(CurveChart(f"{title}, {name}", range(1, steps + 1), lines))))
        columns.append((title, _end_values(values)))
    heading = ["side", *(title for title, _ in columns), "skipped steps"]
    cells = zip(*(texts for _, texts in columns), strict=True) if columns else [()] * len(curves)
    table = [[curve.side, *texts, _skip_text(curve.skipped)] for curve, texts in zip(curves, cells, strict=True)]
    sides = [(number, curve.side) for number, curve in zip(numbers, curves, strict=True)]
    marked = any(curve.skipped or None in curve.loss or None in curve.grad_norm for curve in curves)
    return PhaseSection(name, judge, sides, charts, heading, table, marked)


def _end_values(values: list[list[float | None]]) -> list[str]:
    """Return each side's first and last number; one number if both are the same."""
    firsts, lasts = (iter(formatting.numbers([line[index] for line in values if line])) for index in (0, -1))
    pairs = [(next(firsts), next(lasts)) if line else ("-", "-") for line in values]
    return [first if first == last else f"{first} \u2192 {last}" for first, last in pairs]


def _skip_text(steps: Sequence[int]) -> str:
    return join_first(list(map(str, steps)), 8) or "none"


def _toml_text(recipe: dict[str, Any]) -> str:
    return msgspec.toml.encode(_remove_none(recipe)).decode().strip()


def _remove_none(value: Any) -> Any:
    """Drop None values: TOML has no null, and an absent key means None."""
    if isinstance(value, dict):
        return {str(key): _remove_none(each) for key, each in value.items() if each is not None}
    return [_remove_none(each) for each in value if each is not None] if isinstance(value, list | tuple) else value


def render_html(report: Findings) -> str:
    """Return the page as one self-contained HTML text of less than 500 kB."""
    template = load_template(_TEMPLATE_FOLDER / "report.html")
    css, js = page_css() + _read_template("report.css"), _read_template("report.js")
    common = {
        "report": report,
        "words": formatting,
        "plain": formatting.plain,
        "stats": statistics_rows,
        "nearest": _nearest_rows,
        "outcome": formatting.outcome(report),
        "heading": _heading_text(report),
        "phases": phase_sections(report),
        "recipes": recipe_texts(report),
        "css": safe_markup(css),
        "js": safe_markup(js),
        "css_hash": csp_hash(css),
        "js_hash": csp_hash(js),
    }
    budget = MAX_PAGE_BYTES
    while True:
        pairs = comparison_sections(report, budget)
        divergent = sorted((pair for pair in pairs if pair.comparison.first), key=lambda pair: pair.number)
        text: str = template.render(pairs=pairs, divergent=divergent, **common)
        above = len(text.encode()) - MAX_PAGE_BYTES
        if above <= 0 or budget <= 0:
            return text
        budget -= above + MAX_PAGE_BYTES // 50


def _heading_text(report: Findings) -> str:
    """Return the verdict without the details that the page shows below it."""
    comparison = formatting.divergent_comparison(report)
    if comparison is not None and comparison.first is not None:
        first = comparison.first
        where = f"in {_STAGE_TEXTS[first.stage]} {first.step}" if first.step else "before the first step"
        return formatting.plain(f"{formatting.join_words(list(comparison.sides))} part {where}")
    verdict = formatting.verdict(report)
    return verdict.partition(": ")[0] if report.agrees else verdict.removeprefix("no verdict: ")


def _nearest_rows(comparison: Comparison) -> Sequence[tuple[str, ComparisonRow]]:
    """Return for each phase the row nearest to its allowed distance."""
    names = dict.fromkeys(row.phase for row in comparison.rows)
    found = [(name, worst_row(row for row in comparison.rows if row.phase == name)) for name in names]
    return [(name, row) for name, row in found if row is not None]


def _read_template(name: str) -> str:
    return (_TEMPLATE_FOLDER / name).read_text(encoding="utf-8")
