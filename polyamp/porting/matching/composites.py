"""Attention that one framework keeps as one layer and a model of another writes by hand, of dense layers.

Projections are found by their names ("q_proj", "query", "c_attn", "qkv", ...) below one module; as many dense layers
become one layer of kind "attention", whose heads are those of the other side, or of kind "projections" where both
sides are made of dense layers, packed differently. Called by `matching` with what found no partner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from polyamp.porting.layouts.forms import Form, Rule
from polyamp.porting.layouts.inventory import Leaf, NativeLayer
from polyamp.porting.layouts.operations import Apart, Operation, Reshape, Shape, Split
from polyamp.porting.matching.fits import Fit, fit
from polyamp.porting.matching.names import name_of

_APART: Final = ("query", "key", "value")
_PACKED: Final = "queries, keys, values"

Pair = tuple[NativeLayer, NativeLayer, Fit]


class _Hand(NamedTuple):
    """Attention by hand: a module's path, and role -> dense layer."""

    path: str
    parts: Mapping[str, NativeLayer]


_PlacedT = TypeVar("_PlacedT", _Hand, NativeLayer)


def regrouped(
    source: Sequence[NativeLayer], target: Sequence[NativeLayer]
) -> tuple[list[Pair], tuple[list[NativeLayer], list[NativeLayer]]]:
    """Pairs of layers made of several, and what is left of both sides."""
    sides = list(source), list(target)
    pairs: list[Pair] = []
    for number in (0, 1):  # by hand on one side, a layer on the other
        hands = _by_hand(sides[number])
        whole = [layer for layer in sides[1 - number] if layer.forms[0].kind == "attention"]
        for hand, other in _in_order(hands, whole):
            made = _attention(hand, other)
            way = None if made is None else fit(*((made, other) if number == 0 else (other, made)))
            if made is not None and way is not None:
                way = way._replace(unsure=way.unsure or _unsure(hand))
                pairs.append((made, other, way) if number == 0 else (other, made, way))
                sides[number][:] = [layer for layer in sides[number] if layer not in hand.parts.values()]
                sides[1 - number][:] = [layer for layer in sides[1 - number] if layer is not other]
    for one, two in _in_order(_by_hand(sides[0]), _by_hand(sides[1])):
        if one.parts.keys() == two.parts.keys():
            continue
        lengths = _lengths(one) or _lengths(two)
        made_one, made_two = (_projections(each, lengths) for each in (one, two)) if lengths else (None, None)
        way = None if made_one is None or made_two is None else fit(made_one, made_two)
        if made_one is not None and made_two is not None and way is not None:
            pairs.append((made_one, made_two, way._replace(unsure=way.unsure or _unsure(one) or _unsure(two))))
            for side, hand in zip(sides, (one, two), strict=True):
                side[:] = [layer for layer in side if layer not in hand.parts.values()]
    return pairs, sides


def _by_hand(layers: Sequence[NativeLayer]) -> list[_Hand]:
    """Sets of dense layers below one module that are an attention's projections."""
    modules: dict[str, list[NativeLayer]] = {}
    for layer in layers:
        if layer.forms[0].kind == "dense" and all(leaf.tied is None for leaf in layer.leaves.values()):
            modules.setdefault(layer.path.rpartition("/")[0], []).append(layer)
    found = []
    for path, dense in modules.items():
        parts = {}
        rest = []
        for layer in dense:
            role = name_of(layer.path.rpartition("/")[2]).stem
            if role in (*_APART, _PACKED) and role not in parts:
                parts[role] = layer
            else:
                rest.append(layer)
        outputs = [layer for layer in rest if name_of(layer.path.rpartition("/")[2]).stem == "output"] or rest
        if len(outputs) == 1 and (set(parts) == set(_APART) or set(parts) == {_PACKED}):
            found.append(_Hand(path, {**parts, "output": outputs[0]}))
    return found


def _in_order(one: Sequence[_Hand], two: Sequence[_PlacedT]) -> list[tuple[_Hand, _PlacedT]]:
    """Both in pairs, by the numbers in their paths; none where numbers do not tell."""
    if len(one) != len(two):
        return []
    if len(one) == 1:
        return [(one[0], two[0])]
    ours = {name_of(each.path).numbers: each for each in one}
    theirs = {name_of(each.path).numbers: each for each in two}
    if len(ours) != len(one) or len(theirs) != len(two):
        return []
    return [(ours[mine], theirs[yours]) for mine, yours in zip(sorted(ours), sorted(theirs), strict=True)]


def _unsure(hand: _Hand) -> str:
    """Why nothing tells how the dense layers are to be read: the first form of each is; "" where it is the only one."""
    for layer in hand.parts.values():
        first, *others = layer.forms
        if any(each.kind == first.kind and each.shapes(layer.arrays) == first.shapes(layer.arrays) for each in others):
            either = "(inputs, features) or (features, inputs)"
            return f"the kernel of {layer.path!r} may be {either}, and both are equally long"
    return ""


def _attention(hand: _Hand, other: NativeLayer) -> NativeLayer | None:
    """The dense layers as one layer of kind "attention", with the heads of `other`; None if shapes do not allow it."""
    return _made(hand, "attention", other.forms[0].shapes(other.arrays))


def _projections(hand: _Hand, lengths: Sequence[int]) -> NativeLayer | None:
    """The dense layers as one layer whose queries, keys and values are apart, of these lengths."""
    shapes: dict[str, Shape] = {}
    for role, layer in hand.parts.items():
        own = layer.forms[0].shapes(layer.arrays)
        roles = _APART if role == _PACKED else (role,)
        for each in roles:
            length = own["kernel"][1] if each == "output" else lengths[_APART.index(each)]
            shapes[f"{each}_kernel"] = (own["kernel"][0], length)
            if "bias" in own:
                shapes[f"{each}_bias"] = (length,)
    return _made(hand, "projections", shapes)


def _lengths(hand: _Hand) -> tuple[int, ...] | None:
    if _PACKED in hand.parts:
        return None
    return tuple(hand.parts[role].forms[0].shapes(hand.parts[role].arrays)["kernel"][1] for role in _APART)


def _rules(role: str, layer: NativeLayer, shapes: Mapping[str, Shape]) -> list[Rule] | None:
    """The rules of a dense layer, as one of an attention's projections, or as three of them."""
    form = layer.forms[0]
    own = form.shapes(layer.arrays)
    roles = _APART if role == _PACKED else (role,)
    rules = []
    for rule in form.rules:
        (part,) = rule.canonical
        names = tuple(f"{each}_{part}" for each in roles)
        if any(name not in shapes for name in names):
            return None
        wanted = [shapes[name] for name in names]
        flat = [_flat(shape, part, each) for shape, each in zip(wanted, roles, strict=True)]
        if own[part][:-1] != flat[0][:-1] or own[part][-1] != sum(shape[-1] for shape in flat):
            return None
        split: tuple[Operation, ...] = (Split(tuple(shape[-1] for shape in flat)),) if len(roles) > 1 else ()
        reshaped = Apart(tuple(Reshape(a, b) for a, b in zip(flat, wanted, strict=True)))
        names_in = tuple(f"{role}/{name}" for name in rule.native)
        rules.append(Rule(names_in, names, (*rule.operations, *split, reshaped)))
    return rules


def _flat(shape: Shape, part: str, role: str) -> Shape:
    """The shape of a projection as a dense layer has it."""
    if part == "bias":
        return (shape[0],) if role == "output" or len(shape) == 1 else (shape[0] * shape[1],)
    if len(shape) == 2:
        return shape
    return (shape[0] * shape[1], shape[2]) if role == "output" else (shape[0], shape[1] * shape[2])


def _made(hand: _Hand, kind: str, shapes: Mapping[str, Shape]) -> NativeLayer | None:
    """The dense layers as one layer with arrays of these shapes; None if they have no such."""
    rules: list[Rule] = []
    for role, layer in hand.parts.items():
        made = _rules(role, layer, shapes)
        if made is None:
            return None
        rules += made
    leaves: dict[str, Leaf] = {
        f"{role}/{name}": leaf for role, layer in hand.parts.items() for name, leaf in layer.leaves.items()
    }
    modules = dict.fromkeys(layer.module for layer in hand.parts.values() if layer.module)
    return NativeLayer(hand.path, leaves, (Form(kind, tuple(rules)),), " + ".join(modules))
