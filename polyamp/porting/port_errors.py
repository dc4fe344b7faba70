"""Error checks and messages of `port`: tables of both sides, with the line of code that resolves the error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from polyamp.errors import PortError, join_first
from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.matching.attribute_differences import AttributeComparison, Difference
from polyamp.porting.matching.matching import Matching
from polyamp.porting.port_report import format_layer, format_sides
from polyamp.porting.rename_hints import Rematch, hint_lines

PARTIAL_PORT_HINT: Final = "strict=False moves the rest and leaves these as they are."
"""Last line of an error about layers without a partner, for callers that have the argument."""
_MAX_LISTED = 8
"""Largest number of detail lines in one message."""


def check_complete(matching: Matching, source: Inventory, target: Inventory, rematch: Rematch, why: str = "") -> None:
    """Raise if a layer has no partner, or alike layers could not be told apart.

    Args:
        matching: the matching.
        source: the source's layers.
        target: the target's layers.
        rematch: function that matches the layers again with more entries of `names=`.
        why: why a batch does not show which of the alike layers is which; "" without one.

    Raises:
        PortError: the matching is not complete.
    """
    if not matching.unmatched[0] and not matching.unmatched[1] and not matching.indistinguishable:
        return
    ours = [*matching.unmatched[0], *(layer for group, _ in matching.indistinguishable for layer in group)]
    theirs = [*matching.unmatched[1], *(layer for _, group in matching.indistinguishable for layer in group)]
    heading = f"source ({source.framework})", f"target ({target.framework})"
    lines = [_count_message(matching), format_sides(ours, theirs, heading)]
    lines += hint_lines(matching, rematch, why)
    lines.append(PARTIAL_PORT_HINT)
    raise PortError("\n".join(lines))


def check_equality(matching: Matching, comparison: AttributeComparison, *, strict: bool) -> set[int]:
    """Return the ids of pairs that must not be moved; empty with `strict`, which raises instead.

    Raises:
        PortError: with `strict`, how an array goes into another cannot be told, or the target has another formula.
    """
    ambiguous = [each for each in matching.pairs if each.fit.ambiguity]
    structural = {(each.source, each.target): each for each in comparison.differences if each.structural}
    other = [each for each in matching.pairs if (each.source.path, each.target.path) in structural]
    if strict and ambiguous:
        first = ambiguous[0]
        raise PortError(_ambiguity_message(first.source, first.target, first.fit.ambiguity, len(ambiguous)))
    if strict and other:
        raise PortError(_structural_message([structural[each.source.path, each.target.path] for each in other]))
    return {id(each) for each in (*ambiguous, *other)}


def dtype_error(wrong: Sequence[str], target: Inventory) -> PortError:
    """Return the error for leaves with different dtypes."""
    return PortError(
        f"dtypes differ, and casting would change values: {join_first(wrong, _MAX_LISTED, '; ')}. Give the "
        f"{target.framework} model the source's dtype, or port with strict=False, which casts."
    )


def _count_message(matching: Matching) -> str:
    said = []
    ours, theirs = matching.unmatched
    if ours or theirs:
        said.append(f"{len(ours)} of the source's layers and {len(theirs)} of the target's have no partner")
    for ours, theirs in matching.indistinguishable[:_MAX_LISTED]:
        said.append(
            f"nothing tells which of {', '.join(layer.path for layer in ours[:4])} is which of "
            f"{', '.join(layer.path for layer in theirs[:4])}: they are alike in kind and shape, and neither names nor "
            "numbers decide"
        )
    return "; ".join(said) + "."


def _ambiguity_message(source: NativeLayer, target: NativeLayer, why: str, count: int) -> str:
    more = f" ({count} layers in all)" if count > 1 else ""
    return (
        f"how {source.path!r} goes into {target.path!r} cannot be told{more}: {why}.\n"
        f"  source: {format_layer(source)}\n  target: {format_layer(target)}\n"
        "Give a batch (check=batch), which shows what layers a linen or haiku model calls; or give a parameter of your "
        "own layer its form: polyamp.porting.layouts.layer_registration."
    )


def _structural_message(differences: Sequence[Difference]) -> str:
    return (
        "the target computes another function with these weights, which no conversion of weights can mend: "
        f"{join_first([str(each) for each in differences], _MAX_LISTED, '; ')}"
    )
