"""`split_operations`: the operation at which two forward passes part, from the records of both.

Values are matched by what they are, in any order of elements, and not by names: frameworks write a formula with other
operations and in other layouts. Going back from the value at which the sides differ, through values that the other side
does not have, leads to the first operations whose inputs both sides have.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Final, NamedTuple

from polyamp.float_formats import FORMATS, HALF_DTYPES
from polyamp.parity.report_data import OperationSite
from polyamp.parity.trace.operation_log import OperationLog, OperationRecord, ValueSummary, are_equal

_TOLERANCES: Final = {"float32": 32 * FORMATS["float32"].unit_roundoff, "float64": 1e-10}
"""Relative distance up to which two values are the same, by the narrowest dtype before them."""
_EXACT: Final = 1e-12
"""Relative distance up to which a value was not rounded: float32 rounds at 6e-8."""
_SEPARATION: Final = 4.0
"""The difference has to be this many times the tolerance: else values before it and after it look alike."""


def split_operations(one: OperationLog, two: OperationLog, distance: float | None) -> tuple[OperationSite, ...]:
    """Return where each side's pass parts from the other's; nothing where the values do not show it.

    Args:
        one, two: operations of both sides up to the value at which they differ.
        distance: the relative distance there; None if one side is not finite.
    """
    if one.end is None or two.end is None:
        return ()
    sides = _Side(one.records), _Side(two.records)
    ends = one.end, two.end
    known = [_TOLERANCES.get(side.widths[end]) for side, end in zip(sides, ends, strict=True)]
    tolerance = max((each for each in known if each is not None), default=0.0)
    if None in known or (distance is not None and distance < _SEPARATION * tolerance):
        return ()
    for side, other in zip(sides, reversed(sides), strict=True):
        side.match(other, tolerance)
    regions = [side.unmatched_before([end]) for side, end in zip(sides, ends, strict=True)]
    has_region = any(regions)
    taken = one.records[one.end].value, two.records[two.end].value
    if not has_region and are_equal(taken[0], taken[1], tolerance):  # in another order of elements
        return ()
    firsts = [side.first(region, end) for side, region, end in zip(sides, regions, ends, strict=True)]
    constants = [side.unmatched_constants(first) for side, first in zip(sides, firsts, strict=True)]
    if set(constants[0]) & set(constants[1]):  # both take a table of the same size, with other values
        for number, side in enumerate(sides):
            tables = [constants[number][size] for size in set(constants[0]) & set(constants[1])]
            firsts[number] = side.first(side.unmatched_before(tables, has_constants=True), firsts[number])
    return tuple(
        side.site(first, is_missing=has_region and not region)
        for side, first, region in zip(sides, firsts, regions, strict=True)
    )


class _SortedValue(NamedTuple):
    """A value with what it is sorted by."""

    absolute: float
    number: int


class _Side:
    """Operations of one side.

    Attributes:
        widths: narrowest floating dtype in which a value or one before it was rounded; "16 bits" for those.
    """

    def __init__(self, records: Sequence[OperationRecord]) -> None:
        self._records = records
        self.widths: list[str] = []
        self._is_data: list[bool] = []
        self._by_size: dict[tuple[int, int], list[_SortedValue]] = {}
        for number, record in enumerate(records):
            self.widths.append(self._narrowest(record))
            self._is_data.append(not record.name or any(self._is_data[each] for each in record.inputs))
            key = record.value.size, record.value.nonfinite
            self._by_size.setdefault(key, []).append(_SortedValue(record.value.absolute, number))
        for candidates in self._by_size.values():
            candidates.sort()
        self._is_matched: list[bool] = []

    def _narrowest(self, record: OperationRecord) -> str:
        """Return the width of a value. One that is given, or that only moves or widens another, is not rounded."""
        if not record.name:
            return "float64"
        for each in record.inputs:
            if are_equal(record.value, self._records[each].value, _EXACT):
                return self.widths[each]
        return min([_width(record.value.dtype), *(self.widths[each] for each in record.inputs)], key=_WIDTHS.index)

    def match(self, other: _Side, tolerance: float) -> None:
        """Find out which values the other side has: constants, of few values, in the same order of elements."""
        self._is_matched = [
            other._has(record.value, tolerance, in_order=not is_data)
            for record, is_data in zip(self._records, self._is_data, strict=True)
        ]

    def _has(self, value: ValueSummary, tolerance: float, *, in_order: bool) -> bool:
        candidates = self._by_size.get((value.size, value.nonfinite), [])
        margin = 2 * tolerance * value.absolute
        start = bisect.bisect_left(candidates, (value.absolute - margin,))
        for absolute, number in candidates[start:]:
            if absolute > value.absolute + margin:
                return False
            if are_equal(value, self._records[number].value, tolerance, in_order=in_order):
                return True
        return False

    def unmatched_before(self, ends: Sequence[int], *, has_constants: bool = False) -> list[int]:
        """Return the operations from which the way to an end leads only through values that the other side lacks.

        Args:
            ends: indices of their records.
            has_constants: whether operations on constants alone (a mask, a table of positions) are among them.
        """
        found: set[int] = set()
        waiting = list(ends)
        while waiting:
            number = waiting.pop()
            record = self._records[number]
            is_candidate = bool(record.name) and (self._is_data[number] or has_constants)
            if is_candidate and number not in found and not self._is_matched[number]:
                found.add(number)
                waiting += record.inputs
        return sorted(found)

    def unmatched_constants(self, number: int) -> dict[int, int]:
        """Return size -> index of the constants that an operation takes and that the other side lacks."""
        return {
            self._records[each].value.size: each
            for each in self._records[number].inputs
            if not self._is_data[each] and not self._is_matched[each] and self._records[each].value.size > 1
        }

    def first(self, region: Sequence[int], default: int) -> int:
        """Return the first operation of a region that takes nothing from it; of an empty region the default."""
        inside = set(region)
        return next((number for number in region if not inside.intersection(self._records[number].inputs)), default)

    def site(self, number: int, *, is_missing: bool) -> OperationSite:
        """Return an operation as a report has it."""
        record = self._records[number]
        place = record.place
        return OperationSite(
            operation=record.name,
            file="" if place is None else place.file,
            line=0 if place is None else place.line,
            code="" if place is None else place.code,
            is_missing=is_missing,
        )


_WIDTHS: Final = ("16 bits", "float32", "float64")


def _width(dtype: str) -> str:
    """Return the precision of a dtype; integers and booleans are exact."""
    return "16 bits" if dtype in HALF_DTYPES else "float32" if dtype == "float32" else "float64"
