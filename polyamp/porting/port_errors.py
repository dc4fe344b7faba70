"""Error checks and messages of `port`: tables of both sides, with the line of code that resolves the error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from polyamp.errors import PortError, join_first
from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.matching.attribute_differences import AttributeComparison, Difference
from polyamp.porting.matching.layer_fit import find_layer_fit
from polyamp.porting.matching.matching import Matching
from polyamp.porting.port_report import format_layer, format_sides

_MAX_LISTED = 8
"""Largest number of detail lines in one message."""


def check_complete(
    matching: Matching, comparison: AttributeComparison, source: Inventory, target: Inventory, *, strict: bool
) -> set[int]:
    """Return the ids of pairs that must not be moved; empty with `strict`, which raises instead.

    Raises:
        PortError: with `strict`, anything prevents the target from being equal to the source.
    """
    ambiguous = [each for each in matching.pairs if each.fit.ambiguity]
    structural = {(each.source, each.target): each for each in comparison.differences if each.structural}
    other = [each for each in matching.pairs if (each.source.path, each.target.path) in structural]
    if strict:
        if matching.unmatched[0] or matching.unmatched[1] or matching.indistinguishable:
            raise PortError(_unmatched_message(matching, source, target))
        if ambiguous:
            raise PortError(
                _ambiguity_message(ambiguous[0].source, ambiguous[0].target, ambiguous[0].fit.ambiguity, len(ambiguous))
            )
        if other:
            raise PortError(_structural_message([structural[each.source.path, each.target.path] for each in other]))
    return {id(each) for each in (*ambiguous, *other)}


def dtype_error(wrong: Sequence[str], target: Inventory) -> PortError:
    """Return the error for leaves with different dtypes."""
    return PortError(
        f"dtypes differ, and casting would change values: {join_first(wrong, _MAX_LISTED, '; ')}. Give the "
        f"{target.framework} model the source's dtype, or port with strict=False, which casts."
    )


def _unmatched_message(matching: Matching, source: Inventory, target: Inventory) -> str:
    ours = [*matching.unmatched[0], *(layer for group, _ in matching.indistinguishable for layer in group)]
    theirs = [*matching.unmatched[1], *(layer for _, group in matching.indistinguishable for layer in group)]
    heading = f"source ({source.framework})", f"target ({target.framework})"
    lines = [_count_message(matching), format_sides(ours, theirs, heading)]
    lines += _rename_hints(ours, theirs, is_ambiguous=bool(matching.indistinguishable))
    lines.append("strict=False moves the rest and leaves these as they are.")
    return "\n".join(lines)


def _count_message(matching: Matching) -> str:
    said = []
    ours, theirs = matching.unmatched
    if ours or theirs:
        said.append(f"{len(ours)} of the source's layers and {len(theirs)} of the target's have no partner")
    for ours, theirs in matching.indistinguishable[:_MAX_LISTED]:
        said.append(
            f"nothing tells which of {', '.join(layer.path for layer in ours[:4])} is which of "
            f"{', '.join(layer.path for layer in theirs[:4])}: they are alike in kind and shape, and their names say "
            "nothing"
        )
    return "; ".join(said) + "."


def _rename_hints(ours: Sequence[NativeLayer], theirs: Sequence[NativeLayer], *, is_ambiguous: bool) -> list[str]:
    """Return the nearest candidates, and the `names=` line that resolves the error."""
    suggested: dict[str, str] = {}
    lines = []
    for layer in ours[:_MAX_LISTED]:
        free = [other for other in theirs if other.path not in suggested.values()]
        fitting = [other for other in free if find_layer_fit(layer, other) is not None]
        near = (fitting[0] if is_ambiguous and fitting else _nearest_layer(layer, fitting)) or _nearest_layer(
            layer, theirs
        )
        if near is None:
            continue
        if near in fitting:
            suggested[f"^{re.escape(layer.path)}$".replace("\\-", "-")] = near.path
        else:
            lines.append(f"  nearest to {layer.path} is {near.path}, but {_misfit_reason(layer, near)}")
    if lines:
        lines.insert(0, "Nearest candidates:")
    if suggested:
        shown_names = ", ".join(f"r{pattern!r}: {path!r}" for pattern, path in suggested.items())
        guessed = "Say which is which; if they come in the same order as here, write"
        said = "If this is what they are, write" if not is_ambiguous else guessed
        lines.append(f"{said}: names={{{shown_names}}}")
    return lines


def _nearest_layer(layer: NativeLayer, others: Sequence[NativeLayer]) -> NativeLayer | None:
    by_path = {other.path: other for other in others}
    same_kind = {path for path, other in by_path.items() if other.forms[0].kind == layer.forms[0].kind}
    close = difflib.get_close_matches(layer.path, same_kind or by_path, n=1, cutoff=0.0)
    return by_path[close[0]] if close else None


def _misfit_reason(layer: NativeLayer, other: NativeLayer) -> str:
    if layer.forms[0].kind != other.forms[0].kind:
        return f"it is a {other.forms[0].kind.replace('_', ' ')} and no {layer.forms[0].kind.replace('_', ' ')}"
    try:
        ours, theirs = layer.forms[0].shapes(layer.arrays), other.forms[0].shapes(other.arrays)
    except (ValueError, KeyError):
        return "its arrays have other shapes"
    for name in ours.keys() - theirs.keys():
        return f"it has no {name}"
    for name in theirs.keys() - ours.keys():
        return f"it has a {name}, and {layer.path} has none"
    for name, shape in ours.items():
        if theirs[name] != shape:
            return f"its {name} is {theirs[name]} and not {shape}"
    return "another layer fits it too"


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
