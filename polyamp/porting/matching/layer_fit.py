"""Test whether two layers are the same layer in two frameworks: the form of each, and the mapping between the forms.

Kinds and canonical shapes decide. A parameter of no layer fits any layer with one array of the same shape.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.porting.layouts.absent_bias import AbsentBias
from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.layouts.layer_kinds import BIASED_KINDS, find_kind
from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.layouts.operations import Reshape, Shape, Transpose
from polyamp.porting.matching.array_layouts import GIVEN_KIND

_ARRAY_KINDS: Final = {"parameter", GIVEN_KIND}
"""Kinds that fit any layer with one array of their shape."""
_PROBE_LIMIT: Final = 1 << 20
"""Largest number of elements for which two readings of a layer are compared by converting numbers with both."""


class LayerFit(NamedTuple):
    """Conversion of one layer's arrays to another layer's.

    Attributes:
        source: form with which the source's layer is read.
        target: form with which the target's layer is written; its canonical arrays have the source's names.
        ambiguity: why this reading may be the wrong one, a sentence; "" if it is certain.
        absent_bias: the side without a bias, "source" or "target", where the other side has one; else "".
        is_turned: whether an array of no layer is read as a transposed kernel.
    """

    source: Form
    target: Form
    ambiguity: str = ""
    absent_bias: str = ""
    is_turned: bool = False


def find_layer_fit(source: NativeLayer, target: NativeLayer, *, absent_bias: bool = False) -> LayerFit | None:
    """Return the conversion from `source` to `target`; None if the layers do not fit.

    If several readings fit, the likeliest is returned; `ambiguity` is set if they place the numbers differently.

    Args:
        source: a layer of the source.
        target: a layer of the target.
        absent_bias: whether a dense layer or convolution may have a bias that its counterpart lacks.

    >>> import numpy as np
    >>> from polyamp.porting.layouts.inventory import InventoryLeaf
    >>> from polyamp.porting.layouts.layer_layout import same
    >>> def layer(path, **arrays):
    ...     leaves = {name: InventoryLeaf(f"{path}/{name}", Lazy.of(array)) for name, array in arrays.items()}
    ...     return NativeLayer(path, leaves, (Form("dense", same(*arrays)),))
    >>> find_layer_fit(layer("a", kernel=np.zeros((2, 3))), layer("b", kernel=np.ones((2, 3)))).ambiguity
    ''
    >>> find_layer_fit(layer("a", kernel=np.zeros((2, 3))), layer("b", kernel=np.ones((3, 2)))) is None
    True
    """
    found = list(_candidate_fits(source, target, absent_bias=absent_bias))
    found = [each for each in found if not each.absent_bias] or found
    if not found:
        return None
    best = found[0]
    others = [each for each in found[1:] if not _is_same_placement(best, each, source, target)]
    if not others or _is_decisive(best, others, source, target):
        return best
    return best._replace(ambiguity=_ambiguity_reason(best, others[0]))


def _is_decisive(best: LayerFit, others: list[LayerFit], source: NativeLayer, target: NativeLayer) -> bool:
    """Return whether one side's only form decides between the other's. Two forms that fit it are ambiguous only if they
    are of one kind (two orientations of a kernel)."""
    if len(source.forms) > 1 and len(target.forms) > 1:
        return False
    kinds = [(each.source.kind, each.target.kind) for each in (best, *others)]
    return kinds[0] not in kinds[1:] and kinds[0][0] == kinds[0][1]


def _ambiguity_reason(best: LayerFit, other: LayerFit) -> str:
    one, two = best.source.kind, other.source.kind
    if one != two or best.target.kind != other.target.kind:
        return f"it may be a {_describe_fit(best)} or a {_describe_fit(other)}, which lie in memory in two ways"
    return "its kernel may be (inputs, features) or (features, inputs), and both are equally long"


def _describe_fit(fit: LayerFit) -> str:
    return (fit.source.kind if fit.source.kind != "parameter" else fit.target.kind).replace("_", " ")


def _candidate_fits(source: NativeLayer, target: NativeLayer, *, absent_bias: bool) -> Iterator[LayerFit]:
    for one in source.forms:
        for other in target.forms:
            shapes = _canonical_shapes(one, source), _canonical_shapes(other, target)
            if shapes[0] is None or shapes[1] is None:
                continue
            if one.kind == other.kind and shapes[0] == shapes[1]:
                yield LayerFit(one, other)
            elif (
                absent_bias
                and one.kind == other.kind
                and (found := _fit_without_bias(one, other, shapes[0], shapes[1], target.path))
            ):
                yield found
            elif one.kind == other.kind and one.kind not in _ARRAY_KINDS:
                continue
            elif {one.kind, other.kind} & _ARRAY_KINDS or _is_related(one.kind, other.kind):
                for between in _array_mappings(shapes[0], shapes[1], {one.kind, other.kind}):
                    is_turned = any(isinstance(each, Transpose) for _, steps in between.values() for each in steps)
                    yield LayerFit(one, _rename_arrays(other, between, shapes[0], shapes[1]), is_turned=is_turned)


def _fit_without_bias(
    one: Form, other: Form, ours: Mapping[str, Shape], theirs: Mapping[str, Shape], path: str
) -> LayerFit | None:
    """Return the conversion between layers of which one lacks a bias; None if they differ in more than that."""
    if one.kind not in BIASED_KINDS or ours.get("kernel") != theirs.get("kernel"):
        return None
    if {*ours} == {"kernel"} and {*theirs} == {"kernel", "bias"}:
        return LayerFit(_with_absent_bias(one, AbsentBias(theirs["bias"], path)), other, absent_bias="source")
    if {*ours} == {"kernel", "bias"} and {*theirs} == {"kernel"}:
        return LayerFit(one, _with_absent_bias(other, AbsentBias(ours["bias"], path)), absent_bias="target")
    return None


def _with_absent_bias(form: Form, bias: AbsentBias) -> Form:
    (rule,) = form.rules
    return dataclasses.replace(form, rules=(Rule(rule.native, ("kernel", "bias"), (*rule.operations, bias)),))


def _is_related(one: str, other: str) -> bool:
    """Return whether the kinds may contain the same array: an embedding as a kernel, a dense layer as a 1x1 kernel."""
    return other == find_kind(one).related or one == find_kind(other).related


def _canonical_shapes(form: Form, layer: NativeLayer) -> Mapping[str, Shape] | None:
    try:
        return form.shapes(layer.arrays)
    except (ValueError, KeyError):
        return None


def _array_mappings(
    one: Mapping[str, Shape], other: Mapping[str, Shape], kinds: set[str]
) -> Iterator[Mapping[str, Any]]:
    """Yield ways to read the arrays `other` as the arrays `one`: name in `one` -> (name in `other`, operations)."""
    if one.keys() == other.keys():
        if all(_squeeze_shape(one[name]) == _squeeze_shape(other[name]) for name in one):
            yield {name: (name, (Reshape(other[name], one[name]),)) for name in one}
        return
    if len(one) != 1 or len(other) != 1:
        return
    (name, shape), (other_name, other_shape) = *one.items(), *other.items()
    if _squeeze_shape(shape) == _squeeze_shape(other_shape):
        yield {name: (other_name, (Reshape(other_shape, shape),))}
    if kinds == {"parameter", "dense"} and shape == other_shape[::-1] and len(shape) == 2:
        yield {name: (other_name, (Transpose((1, 0)),))}


def _squeeze_shape(shape: Shape) -> Shape:
    return tuple(length for length in shape if length != 1)


def _rename_arrays(
    form: Form, between: Mapping[str, Any], one: Mapping[str, Shape], other: Mapping[str, Shape]
) -> Form:
    """Return `form` with the names and layout of the other form's canonical arrays."""
    back = {name: (own, operations) for own, (name, operations) in between.items()}
    rules = []
    for rule in form.rules:
        (name,) = rule.canonical
        own, operations = back[name]
        same = all(isinstance(each, Reshape) and each.native == each.canonical for each in operations)
        rules.append(Rule(rule.native, (own,), rule.operations + (() if same else operations)))
    return dataclasses.replace(form, rules=tuple(rules))


def _is_same_placement(one: LayerFit, other: LayerFit, source: NativeLayer, target: NativeLayer) -> bool:
    """Return whether two readings put every number into the same place."""
    if one.absent_bias:
        return False
    if sum(array.size for array in source.arrays.values()) > _PROBE_LIMIT:
        return False
    numbers, start = {}, 0
    for name, array in source.arrays.items():
        numbers[name] = Lazy.of(np.arange(start, start + array.size, dtype=np.float64).reshape(array.shape))
        start += math.prod(array.shape)
    carried = [
        {name: array.read() for name, array in each.target.leaves(each.source.arrays(numbers), target.arrays).items()}
        for each in (one, other)
    ]
    return carried[0].keys() == carried[1].keys() and all(
        np.array_equal(carried[0][name], carried[1][name]) for name in carried[0]
    )
