"""`casting_page`: the page of a casting report, drawn by `polyamp.report_page`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyamp.float_formats import HALF_DTYPES
from polyamp.report_page.page import BarChart, BarPart, PageSection, PageTable, ReportPage
from polyamp.report_page.text_format import count_text


def casting_page(policy: str, operations: Sequence[Any], casts: Sequence[Sequence[Any]]) -> ReportPage:
    """Return the page: how many operations of each module ran in 16 bits, in float32 and in others, and all rows.

    Args:
        policy: as text.
        operations: `OperationCount`s.
        casts: `CastCount`s.
    """
    modules = list(dict.fromkeys(row.module for row in operations))
    lengths = {name: [0.0] * len(modules) for name in ("16 bits", "float32", "other")}
    rows = []
    for module, name, dtype, rule, count, direction in operations:
        lengths[_kind(dtype)][modules.index(module)] += count
        rows.append([module or "(the program)", name, dtype, rule, direction, str(count)])
    parts = [BarPart(name, values) for name, values in lengths.items() if any(values)]
    unknown = sorted({row.name for row in operations if row.rule == "unknown"})
    half, every = int(sum(lengths["16 bits"])), int(sum(map(sum, lengths.values())))
    heading = ["module", "operation", "dtype", "rule", "pass", "count"]
    cast_rows = [[str(cell) for cell in cast] for cast in casts]
    return ReportPage(
        "unfinished" if unknown else "agree",
        f"{count_text(len(unknown), 'operation')} in no op list" if unknown else "all operations have a rule",
        f"{half:,} of {count_text(every, 'operation')} ran in 16 bits",
        policy,
        [
            PageSection("Modules", [], [BarChart("operations of each module by dtype", modules, parts, "operations")]),
            PageSection(
                "Operations",
                ["The rule is the reason of the dtype: an op list, an override, or what the program declares."],
                [],
                [PageTable("In order of first appearance", heading, rows)],
            ),
            PageSection("Casts", [], [], [PageTable("Casts that ran", ["from", "to", "count"], cast_rows)]),
        ],
    )


def _kind(dtype: str) -> str:
    if all(each in HALF_DTYPES for each in dtype.split(", ")):
        return "16 bits"
    return "float32" if dtype == "float32" else "other"
