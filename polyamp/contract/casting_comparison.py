"""`compare_families`: two casting reports compared by module and family, where their operations have other names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from polyamp.contract.casting_report import CastingReport, OperationCount
from polyamp.rules.operation_families import (
    ATTENTION,
    COMPOSITE_FAMILIES,
    CONVOLUTIONS,
    ELEMENTWISE,
    MATRIX_PRODUCTS,
    RECURRENT,
)

OTHER_MODULES = "(other modules)"
"""Operations without a counterpart in their module, which are compared as those of one module."""


class FamilyDifference(NamedTuple):
    """Operations of one family in one module that ran in other dtypes in two reports.

    Attributes:
        module: path of the module, "" at the top; "a = b" where it is a in the first report and b in the second; or
            `OTHER_MODULES`.
        family: of `polyamp.rules.operation_families`.
        direction: as in `OperationCount`.
        first, second: the dtypes in the two reports.
        first_operations, second_operations: the names of the operations.
    """

    module: str
    family: str
    direction: str
    first: str
    second: str
    first_operations: str
    second_operations: str


class FamilyComparison(NamedTuple):
    """Result of `compare_families`.

    Attributes:
        differences: in the order of the first report.
        compared: number of (module, family, direction) that both reports have.
        only_first, only_second: operations without a counterpart, as "operation (module)"; nothing is said of them.
    """

    differences: list[FamilyDifference]
    compared: int
    only_first: list[str]
    only_second: list[str]


def align_modules(first: CastingReport, second: CastingReport) -> dict[str, str]:
    """Return module paths of the first report -> those of the second, for modules whose paths only one report has.

    Such modules are paired in order, by what they compute: products, convolutions, attention, or a normalisation. The
    longest runs of modules of the same kinds are paired first, as in a comparison of two texts.
    """
    paths = [dict.fromkeys(row.module for row in report.operations) for report in (first, second)]
    kinds = [
        {path: kind for path in own if path and path not in other and (kind := _module_kind(report, path))}
        for report, own, other in ((first, paths[0], paths[1]), (second, paths[1], paths[0]))
    ]
    one, two = (list(each) for each in kinds)
    matcher = difflib.SequenceMatcher(None, list(kinds[0].values()), list(kinds[1].values()), autojunk=False)
    blocks = matcher.get_matching_blocks()
    return {one[block.a + n]: two[block.b + n] for block in blocks for n in range(block.size)}


def _module_kind(report: CastingReport, path: str) -> str:
    """Return the product that a module computes, or "normalisation"; "" for another module."""
    own = [row for row in report.operations if row.module == path and row.direction == "forward"]
    families = {report.families.get(row.name, ELEMENTWISE) for row in own}
    product = next((each for each in _PRODUCTS if each in families), "")
    norm = "normalisation" in families or families >= set(COMPOSITE_FAMILIES["normalisation"])
    return product or "normalisation" * norm


_PRODUCTS = (CONVOLUTIONS, RECURRENT, ATTENTION, MATRIX_PRODUCTS)
_Place = tuple[str, str]
_Families = dict[str, list[OperationCount]]
_Places = dict[_Place, _Families]


def compare_families(
    first: CastingReport, second: CastingReport, modules: Mapping[str, str] | None = None
) -> FamilyComparison:
    """Compare the dtypes of two reports by module, family and direction.

    A family of whole functions, such as a softmax, is compared with the operations that the other report has instead:
    exponentials, logarithms and sums (`COMPOSITE_FAMILIES`). What has no counterpart in its module is compared with
    what is left of the other report in other modules, elementwise operations apart. Counts are not compared.

    Args:
        first: a report.
        second: a report of the same model in another framework, or compiled.
        modules: module paths of the first report -> those of the second; for the rest, see `align_modules`.

    Example:
        >>> from polyamp import Policy
        >>> families = {"softmax": "softmax", "exp": "exponentials", "reduce_sum": "sums"}
        >>> one, two = (
        ...     CastingReport(Policy("mixed_float16"), [OperationCount("", *row, "", 1) for row in rows], (), families)
        ...     for rows in ([("softmax", "float32")], [("exp", "float16"), ("reduce_sum", "float32")])
        ... )
        >>> compare_families(one, two).differences[0][3:]
        ('float32', 'float16, float32', 'softmax', 'exp, reduce_sum')
    """
    paths = align_modules(first, second) | dict(modules or {})
    renamed = first.renamed(paths)
    labels = {second_path: f"{path} = {second_path}" for path, second_path in paths.items()}
    sides = (_by_place(renamed), _by_place(second))
    by_module, rest = _compare_places(*sides, labels)
    pooled, alone = _compare_places(_pooled(rest[0]), _pooled(rest[1]), labels)
    found = [each for each in by_module + pooled if each.first != each.second]
    texts = [_texts(one, two) for one, two in zip(alone, rest, strict=True)]
    return FamilyComparison(found, len(by_module) + len(pooled), *texts)


def _compare_places(
    first: _Places, second: _Places, labels: Mapping[str, str]
) -> tuple[list[FamilyDifference], tuple[_Places, _Places]]:
    """Return what was compared, equal dtypes included, and what one side alone has."""
    found: list[FamilyDifference] = []
    rest: tuple[_Places, _Places] = ({}, {})
    for place in dict.fromkeys([*first, *second]):
        one, two = first.get(place, {}), second.get(place, {})
        matched: tuple[set[str], set[str]] = (set(), set())
        for family in dict.fromkeys([*one, *two]):
            parts = [_parts(own, other, family) for own, other in ((one, two), (two, one))]
            if all(parts):
                rows = [
                    [row for part in each for row in own[part]] for each, own in zip(parts, (one, two), strict=True)
                ]
                dtypes = [_joined(each for row in own for each in row.dtype.split(", ")) for own in rows]
                names = [_joined(row.name for row in own) for own in rows]
                found.append(FamilyDifference(labels.get(place[0], place[0]), family, place[1], *dtypes, *names))
                for known, each in zip(matched, parts, strict=True):
                    known.update(each)
        for left, own, known in zip(rest, (one, two), matched, strict=True):
            left[place] = {family: rows for family, rows in own.items() if family not in known}
    return found, rest


def _parts(own: _Families, other: _Families, family: str) -> list[str]:
    """Return the families of one side that a family is compared by: itself, or what it is a program of here."""
    if family in own:
        return [family]
    return [part for part in COMPOSITE_FAMILIES.get(family, ()) if part in own and part not in other]


def _by_place(report: CastingReport) -> _Places:
    found: _Places = {}
    for row in report.operations:
        families = found.setdefault((row.module, row.direction), {})
        families.setdefault(report.families.get(row.name, ELEMENTWISE), []).append(row)
    return found


def _pooled(places: _Places) -> _Places:
    """Return operations of all modules as those of one. Elementwise operations are left out: a norm or a softmax is one
    operation here and a program with many of them there."""
    found: _Places = {}
    for (_, direction), families in places.items():
        for family, rows in families.items():
            if family != ELEMENTWISE:
                found.setdefault((OTHER_MODULES, direction), {}).setdefault(family, []).extend(rows)
    return found


def _texts(pooled: _Places, places: _Places) -> list[str]:
    """Return the operations without a counterpart, those that are not elementwise first."""
    rows = [row for families in pooled.values() for own in families.values() for row in own]
    rows += [row for families in places.values() for row in families.get(ELEMENTWISE, [])]
    return list(dict.fromkeys(f"{row.name} ({row.module or '.'}, {row.direction})" for row in rows))


def _joined(words: Iterable[str]) -> str:
    return ", ".join(sorted(set(words)))
