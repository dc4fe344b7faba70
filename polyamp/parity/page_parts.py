"""What the page shows, made of a report: the lines of its tables, its charts, texts. `page` fills its template with
it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from polyamp.parity import page_charts, words
from polyamp.parity.findings import Comparison, Curve, Divergence, Findings, Row

_PASSES: Final = {"forward": "forward", "backward": "backward", "update": "update"}
_CURVES: Final = {"loss": "loss", "grad_norm": "gradient norm", "scale": "loss scale"}


class Quantity(NamedTuple):
    """A row of a comparison, as words."""

    what: str
    stage: str
    step: int
    distance: str
    allowed: str
    share: str
    dtypes: tuple[str, str]
    counts: bool


class Line(NamedTuple):
    """A module under one phase. Attributes: `worst` is the quantity nearest to what is allowed or farthest beyond;
    `dtypes` those in which the sides differ, if they do anywhere; `first`: it is where the sides part."""

    number: int
    module: str
    phase: str
    worst: Quantity
    dtypes: tuple[str, str]
    counts: bool
    first: bool
    others: Sequence[Quantity]


class Pair(NamedTuple):
    """A comparison: its table, its charts. Attributes: `number` counts those that part before the others, from 0: 0 is
    what the page begins with; `left_out` lines of the table, `brief` if not every quantity of
    every line is listed: the page would be too large."""

    comparison: Comparison
    number: int
    lines: Sequence[Line]
    left_out: int
    brief: bool
    charts: Sequence[tuple[str, Sequence[tuple[str, str]]]]


class Phase(NamedTuple):
    """What the steps reported under one phase. Attributes: `judge`: it only judges another; title and SVG of each
    chart; a heading and a line for each side."""

    name: str
    judge: bool
    sides: Sequence[tuple[int, str]]
    charts: Sequence[tuple[str, str]]
    heading: Sequence[str]
    numbers: Sequence[Sequence[str]]
    marked: bool


def share(row: Row) -> float:
    """How much of what is allowed a row's distance takes; infinite where it is not finite."""
    if row.distance is None:
        return float("inf")
    return row.distance / row.allowed if row.allowed else (float("inf") if row.distance else 0.0)


def program(rows: Iterable[Row]) -> list[str]:
    """The modules in the order of the program; the whole model, which has no path, comes last."""
    found = list(dict.fromkeys(row.module for row in rows))
    return sorted(found, key=lambda path: path == "")


def worst(rows: Iterable[Row]) -> Row | None:
    """The row that counts, or that comes nearest to counting."""
    return max(rows, key=lambda row: (row.counts, share(row)), default=None)


def by_module(rows: Iterable[Row], stage: str = "") -> dict[str, Row]:
    """The worst row of each module, in one pass or in all."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if not stage or row.stage == stage:
            groups.setdefault(row.module, []).append(row)
    return {module: found for module, group in groups.items() if (found := worst(group)) is not None}


def pairs(report: Findings, budget: int) -> list[Pair]:
    """Every comparison; tables of many modules are shortened until all together take no more than about so many
    bytes."""
    tables = [_lines(each) for each in report.comparisons]
    kept = [[line for _, line in sorted(_first_ones(table, _bare, budget // len(tables)))] for table in tables]
    every = [line for table in kept for line in table]
    listed = {id(line) for _, line in _first_ones(every, _details, budget - sum(map(_bare, every)))}
    ranks = sorted(range(len(tables)), key=lambda index: report.comparisons[index].first is None)
    found = []
    for index, (each, table, lines) in enumerate(zip(report.comparisons, tables, kept, strict=True)):
        shown = [line if id(line) in listed else line._replace(others=()) for line in lines]
        charts = list(_error_charts(each, program(each.rows)))
        found.append(Pair(each, ranks.index(index), shown, len(table) - len(lines), len(listed) < len(every), charts))
    return found


def phases(report: Findings) -> list[Phase]:
    """What the steps reported, under each phase; the judges' curves come after the policies'."""
    labels = words.labels(report)
    compared = [row.phase for each in report.comparisons for row in each.rows]
    names = dict.fromkeys([*compared, *report.phases, *(curve.phase for curve in report.curves)])
    found = []
    for name in names:
        curves = [curve for curve in report.curves if curve.phase == name]
        if curves:
            judge = name == "float64" and name not in compared
            found.append(_phase(name, judge, curves, labels))
    return found


def statistics(first: Divergence) -> list[tuple[str, list[str], bool]]:
    """The lines of both sides' values beside each other: name, a text for each side, whether they differ."""
    told = words.statistics(first)
    names = dict.fromkeys(["dtype", "shape", "value", "mean", "rms", "largest", "inf or NaN", "zeros", "fits in"])
    for label, side in first.sides.items():
        told[label]["dtype"] = side.dtype
        told[label]["shape"] = " x ".join(map(str, side.shape))
    found = []
    for name in names:
        texts = [values.get(name, "") for values in told.values()]
        if any(texts):
            found.append((name, [text or "-" for text in texts], len(set(texts)) > 1))
    return found


def recipes(report: Findings) -> list[tuple[str, str]]:
    """Each recipe as TOML, with the sides that have it."""
    texts: dict[str, list[str]] = {}
    for label, recipe in report.recipes.items():
        texts.setdefault(_toml(recipe), []).append(label)
    return [(words.listed(sides), text) for text, sides in texts.items()]


def _lines(comparison: Comparison) -> list[Line]:
    modules = {module: number for number, module in enumerate(program(comparison.rows), 1)}
    found = []
    for phase in dict.fromkeys(row.phase for row in comparison.rows):
        groups: dict[str, list[Row]] = {module: [] for module in modules}
        for row in comparison.rows:
            if row.phase == phase:
                groups[row.module].append(row)
        found += [_line(modules[module], group, comparison.first) for module, group in groups.items() if group]
    return found


def _line(number: int, rows: list[Row], first: Divergence | None) -> Line:
    most = max(rows, key=lambda row: (row.counts, share(row)))
    apart = [row.dtypes for row in rows if row.dtypes[0] != row.dtypes[1]]
    outputs = [row.dtypes for row in rows if row.what == "output"]
    here = first is not None and (first.phase, first.module) == (most.phase, most.module)
    others = [_quantity(row) for row in rows] if len(rows) > 1 else []
    dtypes = [*apart, *outputs, most.dtypes][0]
    return Line(number, words.module(most.module), most.phase, _quantity(most), dtypes, most.counts, here, others)


def _quantity(row: Row) -> Quantity:
    what, part = words.quantity(row.what, row.name), words.times(share(row))
    distance, allowed = words.number(row.distance), words.number(row.allowed)
    return Quantity(what, row.stage, row.step, distance, allowed, part, row.dtypes, row.counts)


def _share(quantity: Quantity) -> float:
    return float("inf") if quantity.share == "not finite" else float(quantity.share)


def _first_ones(lines: list[Line], size: Callable[[Line], int], budget: int) -> list[tuple[int, Line]]:
    """The lines, by their places, that fit: the first divergence, then those that differ, then those nearest to it."""
    order = sorted(enumerate(lines), key=lambda item: (not item[1].first, not item[1].counts, -_share(item[1].worst)))
    used = itertools.accumulate(size(line) for _, line in order)
    return [item for item, upto in zip(order, used, strict=True) if upto <= budget]


def _bare(line: Line) -> int:
    """About how many bytes a line takes in the page without its quantities."""
    return 150 + len(line.module.encode()) + len(line.worst.what.encode())


def _details(line: Line) -> int:
    """About how many bytes its quantities take."""
    return 40 + sum(60 + len(each.what.encode()) for each in line.others) if line.others else 0


def _error_charts(comparison: Comparison, modules: list[str]) -> Iterable[tuple[str, list[tuple[str, str]]]]:
    """Of each phase the charts of its passes."""
    numbers = {module: number for number, module in enumerate(modules, 1) if module}
    first = comparison.first
    for phase in dict.fromkeys(row.phase for row in comparison.rows):
        charts = []
        for stage, title in _PASSES.items():
            rows = by_module([row for row in comparison.rows if row.phase == phase and row.module], stage)
            points = [
                page_charts.Point(numbers[module], row.distance, row.allowed, row.counts)
                for module, row in sorted(rows.items(), key=lambda item: numbers[item[0]])
            ]
            here = first is not None and (first.phase, first.stage) == (phase, stage)
            mark = numbers.get(first.module) if here and first is not None else None
            chart = page_charts.errors(f"{title}, {phase}", points, len(numbers), mark)
            if chart:
                charts.append((title, chart))
        yield phase, charts


def _phase(name: str, judge: bool, curves: list[Curve], labels: list[str]) -> Phase:
    """The charts of one phase, and its numbers."""
    numbers = [labels.index(curve.side) if curve.side in labels else 0 for curve in curves]
    charts, columns = [], []
    for field, title in _CURVES.items():
        values: list[list[float | None]] = [getattr(curve, field) for curve in curves]
        if not any(values):
            continue
        steps = max(map(len, values))
        changes = len({value for line in values for value in line}) > 1
        if steps > 1 and changes:
            lines = zip(numbers, values, curves, strict=True)
            series = [page_charts.Series(number, line, curve.skipped) for number, line, curve in lines]
            charts.append((title, page_charts.curve(f"{title}, {name}", series)))
        columns.append((title, _ends(values)))
    heading = ["side", *(title for title, _ in columns), "skipped steps"]
    cells = zip(*(texts for _, texts in columns), strict=True) if columns else [()] * len(curves)
    table = [[curve.side, *texts, _skipped(curve.skipped)] for curve, texts in zip(curves, cells, strict=True)]
    sides = [(number, curve.side) for number, curve in zip(numbers, curves, strict=True)]
    marked = any(curve.skipped or None in curve.loss or None in curve.grad_norm for curve in curves)
    return Phase(name, judge, sides, charts, heading, table, marked)


def _ends(values: list[list[float | None]]) -> list[str]:
    """Each side's number at its first and its last step; one where both are the same."""
    firsts, lasts = (iter(words.numbers([line[index] for line in values if line])) for index in (0, -1))
    pairs = [(next(firsts), next(lasts)) if line else ("-", "-") for line in values]
    return [first if first == last else f"{first} \u2192 {last}" for first, last in pairs]


def _skipped(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:8]))
    return f"{shown} and {len(steps) - 8} more" if len(steps) > 8 else shown or "none"


def _toml(recipe: dict[str, Any]) -> str:
    return msgspec.toml.encode(_without_none(recipe)).decode().strip()


def _without_none(value: Any) -> Any:
    """TOML has no word for None: what is absent is None."""
    if isinstance(value, dict):
        return {str(key): _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value if each is not None] if isinstance(value, list | tuple) else value
