"""`hint_lines`: what an error about layers without a partner offers.

A line of `names=` is offered only if words of both names say it, and if a new matching with it leaves no layer unplaced
that was placed. Layers of which nothing tells which is which are a choice, and not a line to copy.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from polyamp.errors import join_first
from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.matching.layer_fit import find_layer_fit
from polyamp.porting.matching.matching import Matching
from polyamp.porting.matching.module_names import ModuleName, parse_module_name

Rematch = Callable[[Mapping[str, str]], Matching]
"""Function from more entries of `names=` to a new matching."""
_MAX_LISTED: Final = 8
"""Largest number of layers in a list."""


def hint_lines(matching: Matching, rematch: Rematch, why: str) -> list[str]:
    """Return the lines of an error that say how it is resolved.

    Args:
        matching: an incomplete matching.
        rematch: function that matches the layers again with more entries of `names=`.
        why: why a batch does not tell alike layers apart; "" without one.
    """
    ours, theirs = matching.unmatched
    pairs = _similar_pairs(ours, theirs)
    offered = _checked_names(matching, rematch, pairs)
    lines = _nearest_lines(ours, theirs, pairs)
    if matching.indistinguishable:
        lines += _choice_lines(matching.indistinguishable, why)
    if offered:
        shown = ", ".join(f"r{pattern!r}: {path!r}" for pattern, path in offered.items())
        lines.append(f"If this is what they are, write: names={{{shown}}}")
    return lines


def exact_pattern(path: str) -> str:
    """Return the regular expression for one path.

    >>> exact_pattern("blocks/0/q-proj")
    '^blocks/0/q-proj$'
    """
    return f"^{re.escape(path)}$".replace("\\-", "-")


def _similar_pairs(ours: Sequence[NativeLayer], theirs: Sequence[NativeLayer]) -> list[tuple[NativeLayer, NativeLayer]]:
    """Return layers that fit each other, and whose names have more in common than with any other layer's."""
    fitting = {id(one): [other for other in theirs if find_layer_fit(one, other) is not None] for one in ours}
    found = []
    for one in ours:
        other = _most_similar(one, fitting[id(one)])
        if other is None:
            continue
        rivals = [each for each in ours if any(other is layer for layer in fitting[id(each)])]
        if _most_similar(other, rivals) is one:
            found.append((one, other))
    return found


def _most_similar(layer: NativeLayer, others: Sequence[NativeLayer]) -> NativeLayer | None:
    """Return the layer whose name has the most words in common; None unless there is exactly one."""
    name = parse_module_name(layer.path)
    counts = [(_shared_words(name, parse_module_name(other.path)), other) for other in others]
    best = max((count for count, _ in counts), default=0)
    first = [other for count, other in counts if count == best]
    return first[0] if best and len(first) == 1 else None


def _shared_words(one: ModuleName, other: ModuleName) -> int:
    """Return the number of common words; 0 if one name has a role that the other has not, or another number."""
    same_role = one.has_role == other.has_role and (
        not one.has_role or one.stem.rpartition("/")[2] == other.stem.rpartition("/")[2]
    )
    same_numbers = one.numbers == other.numbers or not one.numbers or not other.numbers
    return len(one.words & other.words) if same_role and same_numbers and one.branch == other.branch else 0


def _checked_names(
    matching: Matching, rematch: Rematch, pairs: Sequence[tuple[NativeLayer, NativeLayer]]
) -> dict[str, str]:
    """Return entries of `names=` with which more layers have a partner, and none has lost its own."""
    names: dict[str, str] = {}
    before = _open_paths(matching)
    for one, other in pairs[:_MAX_LISTED]:
        tried = {**names, exact_pattern(one.path): other.path}
        after = _open_paths(rematch(tried))
        if after < before and (0, one.path) not in after and (1, other.path) not in after:
            names, before = tried, after
    return names


def _open_paths(matching: Matching) -> set[tuple[int, str]]:
    """Return the layers without a partner, as (side, path)."""
    groups = [(side, group[side]) for group in matching.indistinguishable for side in (0, 1)]
    return {(side, layer.path) for side, layers in (*enumerate(matching.unmatched), *groups) for layer in layers}


def _choice_lines(groups: Sequence[tuple[list[NativeLayer], list[NativeLayer]]], why: str) -> list[str]:
    first = (
        why or "Say which is which. polyamp.port shows it by runs of both models, with batch=inputs or check=inputs."
    )
    lines = [f"{first} Or choose the target's path for each with names=, from:"]
    shown = [(layer, theirs) for ours, theirs in groups for layer in ours]
    for layer, theirs in shown[:_MAX_LISTED]:
        choices = join_first([repr(other.path) for other in theirs], 4)
        lines.append(f"  r{exact_pattern(layer.path)!r}: {choices}")
    if len(shown) > _MAX_LISTED:
        lines.append(f"  and {len(shown) - _MAX_LISTED} more")
    return lines


def _nearest_lines(
    ours: Sequence[NativeLayer], theirs: Sequence[NativeLayer], pairs: Sequence[tuple[NativeLayer, NativeLayer]]
) -> list[str]:
    """Return the nearest layer of each without a similar one, and why it is not its partner."""
    similar = {id(one) for one, _ in pairs}
    lines = []
    for layer in [each for each in ours if id(each) not in similar][:_MAX_LISTED]:
        near = _nearest_layer(layer, theirs)
        if near is not None:
            lines.append(f"  nearest to {layer.path} is {near.path}, but {_misfit_reason(layer, near)}")
    return ["Nearest candidates:", *lines] if lines else []


def _nearest_layer(layer: NativeLayer, others: Sequence[NativeLayer]) -> NativeLayer | None:
    by_path = {other.path: other for other in others}
    same_kind = {path for path, other in by_path.items() if other.forms[0].kind == layer.forms[0].kind}
    close = difflib.get_close_matches(layer.path, same_kind or by_path, n=1, cutoff=0.0)
    return by_path[close[0]] if close else None


def _misfit_reason(layer: NativeLayer, other: NativeLayer) -> str:
    if find_layer_fit(layer, other) is not None:
        return "other layers fit as well, and their numbers are not equal"
    if layer.forms[0].kind != other.forms[0].kind:
        return f"it is {_with_article(other.forms[0].kind)} and no {layer.forms[0].kind.replace('_', ' ')}"
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
    return "its arrays are laid out in another way"


def _with_article(kind: str) -> str:
    """Return a kind with its article.

    >>> _with_article("attention"), _with_article("layer_norm")
    ('an attention', 'a layer norm')
    """
    return f"{'an' if kind[0] in 'aeio' else 'a'} {kind.replace('_', ' ')}"
