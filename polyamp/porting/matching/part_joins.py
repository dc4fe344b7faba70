"""`join_parts`, which makes one pair of the pairs of a stacked array's parts, once a matching has found them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyamp.porting.layouts.inventory import InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import Apart, Chain, Operation, Reshape, Split
from polyamp.porting.matching.array_parts import Parts, StackedPart
from polyamp.porting.matching.layer_fit import LayerFit
from polyamp.porting.matching.matching import LayerMatch, Matching


def join_parts(matching: Matching, parts: tuple[Parts, Parts]) -> Matching:
    """Return the matching with one pair for each stacked array. If a part has no partner, none of them moves.

    Args:
        matching: the matching.
        parts: the parts of each side's stacked arrays.
    """
    if not any(parts):
        return matching
    joined = Matching([], ([*matching.unmatched[0]], [*matching.unmatched[1]]), matching.indistinguishable)
    groups: dict[tuple[int, str], list[tuple[StackedPart, LayerMatch]]] = {}
    for pair in matching.pairs:
        places = parts[0].get(pair.source.path), parts[1].get(pair.target.path)
        side = 0 if places[0] is not None else 1
        place = places[side]
        if place is None:
            joined.pairs.append(pair)
        elif None not in places:  # a stack and a stack: layers of the same form fit as they are, without forms=
            for number in (0, 1):
                joined.unmatched[number].append((pair.source, pair.target)[number])
        else:
            groups.setdefault((side, place.whole.path), []).append((place, pair))
    for (side, _), group in groups.items():
        group.sort(key=lambda each: each[0].number)
        whole, axis = group[0][0].whole, group[0][0].axis
        ((_, leaf),) = whole.leaves.items()
        if len(group) == leaf.array.shape[axis]:
            joined.pairs.append(_joined_pair([pair for _, pair in group], whole, axis, side))
        else:
            for number in (0, 1):
                joined.unmatched[number].extend((pair.source, pair.target)[number] for _, pair in group)
    return joined


def _joined_pair(pairs: Sequence[LayerMatch], whole: NativeLayer, axis: int, side: int) -> LayerMatch:
    """Return the pair of a stacked array, on the given side, and the layers of the other side as one."""
    ((name, leaf),) = whole.leaves.items()
    shape = leaf.array.shape
    inner = (*shape[:axis], *shape[axis + 1 :])
    one = (*shape[:axis], 1, *shape[axis + 1 :])
    forms = [(pair.fit.source, pair.fit.target) for pair in pairs]
    layers = [(pair.source, pair.target)[1 - side] for pair in pairs]
    steps: list[Operation] = [Chain((Reshape(one, inner), *each[side].rules[0].operations)) for each in forms]
    names = tuple(str(number) for number in range(len(pairs)))
    stacked = Form("stack", (Rule((name,), names, (Split((1,) * len(pairs), axis), Apart(tuple(steps)))),))
    leaves: dict[str, InventoryLeaf] = {}
    rules = []
    for number, layer, each in zip(names, layers, forms, strict=True):
        leaves |= {f"{number}/{own}": held for own, held in layer.leaves.items()}
        (rule,) = each[1 - side].rules
        rules.append(Rule(tuple(f"{number}/{own}" for own in rule.native), (number,), rule.operations))
    path = " + ".join(layer.path for layer in layers)
    other = NativeLayer(path, leaves, (Form("stack", tuple(rules)),), layers[0].module)
    whole = dataclasses.replace(whole, forms=(stacked,))
    evidence = next((pair.evidence for pair in pairs if pair.evidence == "order"), pairs[0].evidence)
    if side == 0:
        return LayerMatch(whole, other, LayerFit(stacked, other.forms[0]), evidence)
    return LayerMatch(other, whole, LayerFit(other.forms[0], stacked), evidence)
