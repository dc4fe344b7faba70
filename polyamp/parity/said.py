"""`said`: a report as the ten lines that a person reads in a terminal or below a failed assertion."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from polyamp.parity import words
from polyamp.parity.findings import Comparison, Divergence, Findings, Row

LINES: Final = 10
COLUMNS: Final = 120
_LABEL: Final = 14
"""Columns of the label that each line but the first begins with, its two blanks of indent among them."""


class _Line(NamedTuple):
    """A labelled text. `rank`: the higher, the sooner a text that is too long gets further lines, 0 never."""

    label: str
    text: str
    rank: int = 0


def said(report: Findings) -> str:
    """At most ten lines of at most 120 columns: the verdict, and what a reader needs next.

    Where sides part: both names of the module, the distance and what rounding allows, each side's values and
    operations, what it looks like and why. Where they agree: what was compared, and what came nearest to what is
    allowed. What failed is always said.
    """
    return "\n".join([words.fit(words.verdict(report), COLUMNS), *_set(_below(report)[: LINES - 1])])


def told(report: Findings) -> list[tuple[str, str]]:
    """The lines below the verdict, as labels and texts that are not cut. For notebooks."""
    return [(line.label, line.text) for line in _below(report)]


def _below(report: Findings) -> list[_Line]:
    parts = words.parted(report)
    if parts is not None and parts.first is not None:
        return list(_parted(report, parts, parts.first))
    return list(_unparted(report))


def _set(lines: list[_Line]) -> list[str]:
    """The lines as text; what is free of the ten goes to texts that need more than one."""
    width = COLUMNS - _LABEL
    rows = [[line.text] if len(line.text) <= width else textwrap.wrap(line.text, width) for line in lines]
    given = [1] * len(lines)
    free = LINES - 1 - len(lines)
    for index in sorted(range(len(lines)), key=lambda index: -lines[index].rank):
        more = min(free, len(rows[index]) - 1) if lines[index].rank else 0
        given[index] += more
        free -= more
    found = []
    for line, wrapped, count in zip(lines, rows, given, strict=True):
        kept = wrapped[: count - 1]
        for number, text in enumerate([*kept, words.cut(" ".join(wrapped[count - 1 :]), width)]):
            label = words.fit(line.label, _LABEL - 4) if number == 0 else ""
            found.append(f"  {label:<{_LABEL - 3}} {text}".rstrip())
    return found


def _parted(report: Findings, pair: Comparison, first: Divergence) -> Iterator[_Line]:
    """What follows the verdict where two sides part."""
    sides = list(first.sides.items())
    half = (COLUMNS - _LABEL) // max(len(sides), 1) - 16
    names = [(words.module(side.path), label) for label, side in sides]
    for width in (COLUMNS, half):
        named = ", ".join(f"{words.fit(path, width)} in {words.fit(label, 10)}" for path, label in names)
        if len(named) <= COLUMNS - _LABEL:
            break
    yield _Line("module", named or words.module(first.module))
    own = [
        f"{words.fit(label, 10)} {words.number(value, 2)}" for label, value in first.own.items() if value is not None
    ]
    apart = f"; own errors: {', '.join(own)}" if own else ""
    yield _Line("apart", words.distance(first) + apart)
    for (label, side), values in zip(sides, words.statistics(first).values(), strict=True):
        shape = f"[{', '.join(map(str, side.shape))}]" if side.shape else ""
        texts = [" ".join(filter(None, [side.dtype, shape])), *(f"{name} {text}" for name, text in values.items())]
        ran = f"; {'; '.join(words.operations(side))}" if side.operations else ""
        yield _Line(label, words.plain(", ".join(filter(None, texts)) + ran))
    yield _Line("looks like", f"{words.kind(first)}: {words.plain(first.sentence)}", 3)
    if first.evidence:
        more = f" (and {len(first.evidence) - 1} more)" if len(first.evidence) > 1 else ""
        yield _Line("because", words.plain(first.evidence[0]) + more, 2)
    yield from _failed(report)
    counting = sum(row.counts for row in pair.rows)
    before = f"{words.fit(words.module(first.after), 50)} is the last that agrees; " if first.after else ""
    if before or pair.rows:
        compared = words.counted(len(pair.rows), "quantity", "quantities")
        yield _Line("before" if before else "compared", f"{before}{counting:,} of {compared} differ")
    yield from _others(report, pair)


def _unparted(report: Findings) -> Iterator[_Line]:
    """What follows the verdict where no two sides are known to part."""
    yield from _failed(report)
    rows = [row for each in report.comparisons for row in each.rows]
    if rows:
        kinds = Counter(row.what.partition(",")[0] for row in rows)
        modules = words.counted(len({row.module for row in rows}), "module")
        until = "until then" if report.failures else "compared"
        most = ", ".join(f"{count:,} {words.plain(what)}" for what, count in kinds.most_common())
        yield _Line(until, f"{most}; of {modules}")
    for phase in report.phases[:3]:
        nearest = max((row for row in rows if row.phase == phase), key=_share, default=None)
        if nearest is not None:
            yield _Line("nearest", _near(nearest))
    for environment in report.environments[:3]:
        model = f"{environment.model}, {words.counted(environment.parameters, 'parameter')}, "
        yield _Line(environment.side, words.plain(model + words.software(environment)))
    notes = [note for each in report.comparisons for note in each.notes]
    if notes:
        more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
        yield _Line("note", words.plain(notes[0]) + more, 1)


def _failed(report: Findings) -> Iterator[_Line]:
    """The failures, in a line."""
    if report.failures:
        first, *others = report.failures
        named = f"{words.endings(first)}: " if report.first is not None else ""  # else the verdict says it
        message = words.plain(first.message).rstrip(".;")
        yield _Line("failed", "; ".join([named + message, *map(words.endings, others)]), 4)


def _others(report: Findings, pair: Comparison) -> Iterator[_Line]:
    """The other pairs of sides, in a line."""
    told = [
        f"{words.listed(list(each.sides))} {'agree' if each.first is None else 'differ: ' + words.place(each.first)}"
        for each in report.comparisons
        if each is not pair and not (each.first is None and report.failures)
    ]
    if told:
        yield _Line("others", words.plain("; ".join(told)))


def _share(row: Row) -> float:
    return 0.0 if row.distance is None or not row.allowed else row.distance / row.allowed


def _near(row: Row) -> str:
    share = f"{100 * _share(row):.0f} % of what rounding allows"
    at = f"{words.quantity(row.what, row.name)} of {words.module(row.module)}"
    return f"{share} under {row.phase}: {words.fit(at, 60)}, step {row.step}"
