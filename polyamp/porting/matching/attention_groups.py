"""Matching of attention that one framework has as one layer, and the other model composes of dense layers.

Projections are found by their names ("q_proj", "query", "c_attn", "qkv", ...) below one module. Several dense layers
become one layer. Its kind is "attention", with the heads of the other side, or "projections" if both sides use dense
layers that are packed differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from polyamp.porting.layouts.inventory import InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import Apart, Operation, Reshape, Shape, Split
from polyamp.porting.matching.layer_fit import LayerFit, find_layer_fit
from polyamp.porting.matching.module_names import parse_module_name

_SEPARATE_ROLES: Final = ("query", "key", "value")
_PACKED_ROLE: Final = "queries, keys, values"

FittedPair = tuple[NativeLayer, NativeLayer, LayerFit]


class _DenseAttention(NamedTuple):
    """Attention composed of dense layers: a module's path, and role -> dense layer."""

    path: str
    parts: Mapping[str, NativeLayer]


_LocatedT = TypeVar("_LocatedT", _DenseAttention, NativeLayer)


def regroup_attention(
    source: Sequence[NativeLayer], target: Sequence[NativeLayer]
) -> tuple[list[FittedPair], tuple[list[NativeLayer], list[NativeLayer]]]:
    """Return pairs of layers merged from several, and the remaining layers of both sides."""
    sides = list(source), list(target)
    pairs: list[FittedPair] = []
    for number in (0, 1):  # dense layers on one side, an attention layer on the other
        composed = _find_dense_attentions(sides[number])
        whole = [layer for layer in sides[1 - number] if layer.forms[0].kind == "attention"]
        for attention, other in _pair_by_numbers(composed, whole):
            made = _attention_layer(attention, other)
            fit = None if made is None else find_layer_fit(*((made, other) if number == 0 else (other, made)))
            if made is not None and fit is not None:
                fit = fit._replace(ambiguity=fit.ambiguity or _ambiguity_reason(attention))
                pairs.append((made, other, fit) if number == 0 else (other, made, fit))
                sides[number][:] = [layer for layer in sides[number] if layer not in attention.parts.values()]
                sides[1 - number][:] = [layer for layer in sides[1 - number] if layer is not other]
    for one, two in _pair_by_numbers(_find_dense_attentions(sides[0]), _find_dense_attentions(sides[1])):
        if one.parts.keys() == two.parts.keys():
            continue
        lengths = _packed_lengths(one) or _packed_lengths(two)
        made_one, made_two = (_projection_layer(each, lengths) for each in (one, two)) if lengths else (None, None)
        fit = None if made_one is None or made_two is None else find_layer_fit(made_one, made_two)
        if made_one is not None and made_two is not None and fit is not None:
            pairs.append(
                (
                    made_one,
                    made_two,
                    fit._replace(ambiguity=fit.ambiguity or _ambiguity_reason(one) or _ambiguity_reason(two)),
                )
            )
            for side, attention in zip(sides, (one, two), strict=True):
                side[:] = [layer for layer in side if layer not in attention.parts.values()]
    return pairs, sides


def _find_dense_attentions(layers: Sequence[NativeLayer]) -> list[_DenseAttention]:
    """Return sets of dense layers that are an attention's projections.

    Queries, keys and values are in one module. The output is in the same module, or elsewhere in the module around it
    (`attention/self/query`, `attention/output/dense`). Paths are the model's own, whatever `names=` makes of them.
    """
    modules: dict[str, list[NativeLayer]] = {}
    free = [
        layer
        for layer in layers
        if layer.forms[0].kind == "dense" and all(leaf.tied is None for leaf in layer.leaves.values())
    ]
    for layer in free:
        modules.setdefault(layer.path.rpartition("/")[0], []).append(layer)
    found = []
    for path, dense in modules.items():
        parts = {}
        rest = []
        for layer in dense:
            role = parse_module_name(layer.path.rpartition("/")[2]).stem
            if role in (*_SEPARATE_ROLES, _PACKED_ROLE) and role not in parts:
                parts[role] = layer
            else:
                rest.append(layer)
        if set(parts) != set(_SEPARATE_ROLES) and set(parts) != {_PACKED_ROLE}:
            continue
        around = path.rpartition("/")[0]
        if not rest and around:
            path, rest = around, [each for each in free if _is_beside(each.path, path, around)]
        outputs = [layer for layer in rest if parse_module_name(layer.path.rpartition("/")[2]).stem == "output"] or rest
        if len(outputs) == 1:
            found.append(_DenseAttention(path, {**parts, "output": outputs[0]}))
    return found


def _is_beside(path: str, module: str, around: str) -> bool:
    """Return whether a layer is an output next to the module of an attention's queries, in the module around both."""
    inside = path.startswith(f"{around}/") and not path.startswith(f"{module}/")
    return inside and parse_module_name(path.removeprefix(f"{around}/")).stem.partition("/")[0] == "output"


def _pair_by_numbers(
    one: Sequence[_DenseAttention], two: Sequence[_LocatedT]
) -> list[tuple[_DenseAttention, _LocatedT]]:
    """Return pairs matched by the numbers in their paths; empty if the numbers are not conclusive."""
    if len(one) != len(two):
        return []
    if len(one) == 1:
        return [(one[0], two[0])]
    ours = {parse_module_name(each.path).numbers: each for each in one}
    theirs = {parse_module_name(each.path).numbers: each for each in two}
    if len(ours) != len(one) or len(theirs) != len(two):
        return []
    return [(ours[mine], theirs[yours]) for mine, yours in zip(sorted(ours), sorted(theirs), strict=True)]


def _ambiguity_reason(attention: _DenseAttention) -> str:
    """Return why the reading of the dense layers is ambiguous, given that the first form of each is used; "" if each
    has one form."""
    for layer in attention.parts.values():
        first, *others = layer.forms
        if any(each.kind == first.kind and each.shapes(layer.arrays) == first.shapes(layer.arrays) for each in others):
            either = "(inputs, features) or (features, inputs)"
            return f"the kernel of {layer.path!r} may be {either}, and both are equally long"
    return ""


def _attention_layer(attention: _DenseAttention, other: NativeLayer) -> NativeLayer | None:
    """Return the dense layers as one "attention" layer with the heads of `other`; None if shapes do not allow it."""
    return _merge_layers(attention, "attention", other.forms[0].shapes(other.arrays))


def _projection_layer(attention: _DenseAttention, lengths: Sequence[int]) -> NativeLayer | None:
    """Return the dense layers as one layer with separate queries, keys and values of these lengths."""
    shapes: dict[str, Shape] = {}
    for role, layer in attention.parts.items():
        own = layer.forms[0].shapes(layer.arrays)
        roles = _SEPARATE_ROLES if role == _PACKED_ROLE else (role,)
        for each in roles:
            length = own["kernel"][1] if each == "output" else lengths[_SEPARATE_ROLES.index(each)]
            shapes[f"{each}_kernel"] = (own["kernel"][0], length)
            if "bias" in own:
                shapes[f"{each}_bias"] = (length,)
    return _merge_layers(attention, "projections", shapes)


def _packed_lengths(attention: _DenseAttention) -> tuple[int, ...] | None:
    if _PACKED_ROLE in attention.parts:
        return None
    return tuple(
        attention.parts[role].forms[0].shapes(attention.parts[role].arrays)["kernel"][1] for role in _SEPARATE_ROLES
    )


def _role_rules(role: str, layer: NativeLayer, shapes: Mapping[str, Shape]) -> list[Rule] | None:
    """Return the rules of a dense layer as one of an attention's projections, or as three of them."""
    form = layer.forms[0]
    own = form.shapes(layer.arrays)
    roles = _SEPARATE_ROLES if role == _PACKED_ROLE else (role,)
    rules = []
    for rule in form.rules:
        (part,) = rule.canonical
        names = tuple(f"{each}_{part}" for each in roles)
        if any(name not in shapes for name in names):
            return None
        wanted = [shapes[name] for name in names]
        flat = [_flat_shape(shape, part, each) for shape, each in zip(wanted, roles, strict=True)]
        if own[part][:-1] != flat[0][:-1] or own[part][-1] != sum(shape[-1] for shape in flat):
            return None
        split: tuple[Operation, ...] = (Split(tuple(shape[-1] for shape in flat)),) if len(roles) > 1 else ()
        reshaped = Apart(tuple(Reshape(a, b) for a, b in zip(flat, wanted, strict=True)))
        names_in = tuple(f"{role}/{name}" for name in rule.native)
        rules.append(Rule(names_in, names, (*rule.operations, *split, reshaped)))
    return rules


def _flat_shape(shape: Shape, part: str, role: str) -> Shape:
    """Return the shape of a projection as a dense layer stores it."""
    if part == "bias":
        return (shape[0],) if role == "output" or len(shape) == 1 else (shape[0] * shape[1],)
    if len(shape) == 2:
        return shape
    return (shape[0] * shape[1], shape[2]) if role == "output" else (shape[0], shape[1] * shape[2])


def _merge_layers(attention: _DenseAttention, kind: str, shapes: Mapping[str, Shape]) -> NativeLayer | None:
    """Return the dense layers as one layer with arrays of these shapes; None if they have no such arrays."""
    rules: list[Rule] = []
    for role, layer in attention.parts.items():
        made = _role_rules(role, layer, shapes)
        if made is None:
            return None
        rules += made
    leaves: dict[str, InventoryLeaf] = {
        f"{role}/{name}": leaf for role, layer in attention.parts.items() for name, leaf in layer.leaves.items()
    }
    modules = dict.fromkeys(layer.module for layer in attention.parts.values() if layer.module)
    return NativeLayer(attention.path, leaves, (Form(kind, tuple(rules)),), " + ".join(modules))
