"""`render_text`: a report as at most ten lines, for terminals and failed assertions."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from polyamp.parity.report import formatting
from polyamp.parity.report_data import Comparison, ComparisonRow, Divergence, Findings

MAX_LINES: Final = 10
MAX_COLUMNS: Final = 120
_LABEL_WIDTH: Final = 14
"""Columns of the label at the start of each line but the first, including two blanks of indent."""


_TRACEBACK_LINES: Final = 2
"""Least number of lines of a failure's traceback that are shown: the last place, and the code there."""


class _TextLine(NamedTuple):
    """A labelled text. Free lines go to long texts in descending order of `rank`; rank 0 gets none.

    `traceback` are further lines, of which the last are shown.
    """

    label: str
    text: str
    rank: int = 0
    traceback: tuple[str, ...] = ()


def render_text(report: Findings) -> str:
    """Return the report as at most ten lines of at most 120 columns: the verdict and its details.

    - Divergence: both names of the module, the distance and what rounding allows, each side's values and operations,
      the likely cause and the evidence.
    - Agreement: what was compared, and the quantity nearest to its allowed distance.
    - Failures are always listed.
    """
    return "\n".join(
        [
            formatting.truncate_middle(formatting.verdict(report), MAX_COLUMNS),
            *_format_lines(_detail_lines(report)),
        ]
    )


def text_rows(report: Findings) -> list[tuple[str, str]]:
    """Return the lines below the verdict as labels and full texts, for notebooks."""
    return [(line.label, line.text) for line in _detail_lines(report)]


def _detail_lines(report: Findings) -> list[_TextLine]:
    comparison = formatting.divergent_comparison(report)
    if comparison is not None and comparison.first is not None:
        return list(_divergence_lines(report, comparison, comparison.first))
    return list(_agreement_lines(report))


def _format_lines(lines: list[_TextLine]) -> list[str]:
    """Return the lines as text; free lines of the ten go to texts that need more than one."""
    width = MAX_COLUMNS - _LABEL_WIDTH
    lines = lines[: MAX_LINES - 1 - max((min(len(line.traceback), _TRACEBACK_LINES) for line in lines), default=0)]
    rows = [[line.text] if len(line.text) <= width else textwrap.wrap(line.text, width) for line in lines]
    line_counts = [1] * len(lines)
    free = MAX_LINES - 1 - len(lines)
    for index in sorted(range(len(lines)), key=lambda index: -lines[index].rank):
        more = min(free, len(rows[index]) - 1 + len(lines[index].traceback)) if lines[index].rank else 0
        line_counts[index] += more
        free -= more
    found = []
    for line, wrapped, count in zip(lines, rows, line_counts, strict=True):
        tail = line.traceback[
            len(line.traceback) - min(len(line.traceback), max(count - len(wrapped), _TRACEBACK_LINES)) :
        ]
        count -= len(tail)
        full_lines = wrapped[: count - 1]
        cut = [formatting.truncate_middle(text, width) for text in tail]
        for number, text in enumerate(
            [*full_lines, formatting.truncate_end(" ".join(wrapped[count - 1 :]), width), *cut]
        ):
            label = formatting.truncate_middle(line.label, _LABEL_WIDTH - 4) if number == 0 else ""
            found.append(f"  {label:<{_LABEL_WIDTH - 3}} {text}".rstrip())
    return found


def _divergence_lines(report: Findings, pair: Comparison, first: Divergence) -> Iterator[_TextLine]:
    """Yield the lines below the verdict of a divergence."""
    sides = list(first.sides.items())
    half = (MAX_COLUMNS - _LABEL_WIDTH) // max(len(sides), 1) - 16
    names = [(formatting.module(side.path), label) for label, side in sides]
    for width in (MAX_COLUMNS, half):
        named = ", ".join(
            f"{formatting.truncate_middle(path, width)} in {formatting.truncate_middle(label, 10)}"
            for path, label in names
        )
        if len(named) <= MAX_COLUMNS - _LABEL_WIDTH:
            break
    yield _TextLine("module", named or formatting.module(first.module))
    own = [
        f"{formatting.truncate_middle(label, 10)} {formatting.number(value, 2)}"
        for label, value in first.own.items()
        if value is not None
    ]
    apart = f"; own errors: {', '.join(own)}" if own else ""
    yield _TextLine("apart", formatting.distance(first) + apart)
    for (label, side), values in zip(sides, formatting.statistics(first).values(), strict=True):
        shape = f"[{', '.join(map(str, side.shape))}]" if side.shape else ""
        texts = [" ".join(filter(None, [side.dtype, shape])), *(f"{name} {text}" for name, text in values.items())]
        operations = f"; {'; '.join(formatting.operations(side))}" if side.operations else ""
        yield _TextLine(label, formatting.plain(", ".join(filter(None, texts)) + operations))
    yield _TextLine("looks like", f"{formatting.kind(first)}: {formatting.plain(first.sentence)}", 3)
    if first.sites:
        lines = [f"{formatting.plain(label)} {formatting.site_text(site)}" for label, site in first.sites.items()]
        yield _TextLine("lines", "; ".join(lines), 4)
    if first.evidence:
        yield _TextLine("because", formatting.plain(" ".join(first.evidence)), 2)
    yield from _failure_lines(report)
    counting = sum(row.counts for row in pair.rows)
    before = (
        f"{formatting.truncate_middle(formatting.module(first.after), 50)} is the last that agrees; "
        if first.after
        else ""
    )
    if before or pair.rows:
        compared = formatting.count_text(len(pair.rows), "quantity", "quantities")
        yield _TextLine("before" if before else "compared", f"{before}{counting:,} of {compared} differ")
    yield from _other_pair_lines(report, pair)


def _agreement_lines(report: Findings) -> Iterator[_TextLine]:
    """Yield the lines below the verdict where no divergence is known."""
    yield from _failure_lines(report)
    rows = [row for each in report.comparisons for row in each.rows]
    if rows:
        kinds = Counter(row.what.partition(",")[0] for row in rows)
        modules = formatting.count_text(len({row.module for row in rows}), "module")
        until = "until then" if report.failures else "compared"
        most = ", ".join(f"{count:,} {formatting.plain(what)}" for what, count in kinds.most_common())
        yield _TextLine(until, f"{most}; of {modules}")
    for phase in report.phases[:3]:
        nearest = max((row for row in rows if row.phase == phase), key=_allowed_share, default=None)
        if nearest is not None:
            yield _TextLine("nearest", _nearest_row_text(nearest))
    counts = [count for each in report.comparisons for count in each.updates]
    if counts:
        yield _TextLine("updates", formatting.update_counts(counts))
    for environment in report.environments[:3]:
        model = f"{environment.model}, {formatting.count_text(environment.parameters, 'parameter')}, "
        yield _TextLine(environment.side, formatting.plain(model + formatting.software(environment)))
    notes = [note for each in report.comparisons for note in each.notes]
    if notes:
        more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
        yield _TextLine("note", formatting.plain(notes[0]) + more, 1)


def _failure_lines(report: Findings) -> Iterator[_TextLine]:
    """Yield the failures: their texts, and the lines of the first one's traceback."""
    if report.failures:
        first, *others = report.failures
        named = f"{formatting.failure_text(first)}: " if report.first is not None else ""  # else the verdict says it
        text, traceback = formatting.split_traceback(first.message)
        message = formatting.plain(text).rstrip(".;")
        yield _TextLine("failed", "; ".join([named + message, *map(formatting.failure_text, others)]), 4, traceback)


def _other_pair_lines(report: Findings, pair: Comparison) -> Iterator[_TextLine]:
    """Yield the other pairs of sides, in one line."""
    texts = [
        f"{formatting.join_words(list(each.sides))} "
        f"{'agree' if each.first is None else 'differ: ' + formatting.location_text(each.first)}"
        for each in report.comparisons
        if each is not pair and not (each.first is None and report.failures)
    ]
    if texts:
        yield _TextLine("others", formatting.plain("; ".join(texts)))


def _allowed_share(row: ComparisonRow) -> float:
    return 0.0 if row.distance is None or not row.allowed else row.distance / row.allowed


def _nearest_row_text(row: ComparisonRow) -> str:
    share = f"{100 * _allowed_share(row):.0f} % of what rounding allows"
    at = f"{formatting.quantity(row.what, row.name)} of {formatting.module(row.module)}"
    return f"{share} under {row.phase}: {formatting.truncate_middle(at, 60)}, step {row.step}"
