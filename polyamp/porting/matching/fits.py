"""Whether two layers are the same layer in two frameworks: which form of each, and what stands between the forms.

Kinds and canonical shapes decide; a parameter of no layer fits whatever has one array like it. Called by `matching`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from polyamp.porting.layouts.forms import Form, Rule
from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.layouts.operations import Reshape, Shape, Transpose

_ALIKE: Final = ({"embedding", "dense"}, {"conv", "dense"})
"""Kinds that may hold the same one array under other names: an embedding as a kernel; a dense layer as a 1x1 kernel."""
_PROBED: Final = 1 << 20
"""Elements up to which two readings of a layer are compared by carrying numbers through both."""


class Fit(NamedTuple):
    """How the arrays of one layer go into another.

    Attributes:
        source: the form by which the source's layer is read.
        target: the form by which the target's is written; its canonical arrays are named as the source's.
        unsure: why nothing tells that this reading is the right one, a sentence; "" where something does.
    """

    source: Form
    target: Form
    unsure: str = ""


def fit(source: NativeLayer, target: NativeLayer) -> Fit | None:
    """How `source` goes into `target`; None if it does not.

    Where several readings fit, the likeliest; `unsure` says so if they would put the numbers into other places.

    >>> import numpy as np
    >>> from polyamp.porting.layouts.inventory import Leaf
    >>> from polyamp.porting.layouts.forms import same
    >>> def layer(path, **arrays):
    ...     leaves = {name: Leaf(f"{path}/{name}", Lazy.of(array)) for name, array in arrays.items()}
    ...     return NativeLayer(path, leaves, (Form("dense", same(*arrays)),))
    >>> fit(layer("a", kernel=np.zeros((2, 3))), layer("b", kernel=np.ones((2, 3)))).unsure
    ''
    >>> fit(layer("a", kernel=np.zeros((2, 3))), layer("b", kernel=np.ones((3, 2)))) is None
    True
    """
    found = list(_fits(source, target))
    if not found:
        return None
    best = found[0]
    others = [each for each in found[1:] if not _same_places(best, each, source, target)]
    if not others or _settled(best, others, source, target):
        return best
    return best._replace(unsure=_why(best, others[0]))


def _settled(best: Fit, others: list[Fit], source: NativeLayer, target: NativeLayer) -> bool:
    """Whether one side's only form decides among the other's: two forms that both fit it leave the question open only
    if they are of one kind (two orientations of a kernel)."""
    if len(source.forms) > 1 and len(target.forms) > 1:
        return False
    kinds = [(each.source.kind, each.target.kind) for each in (best, *others)]
    return kinds[0] not in kinds[1:] and kinds[0][0] == kinds[0][1]


def _why(best: Fit, other: Fit) -> str:
    one, two = best.source.kind, other.source.kind
    if one != two or best.target.kind != other.target.kind:
        return f"it may be a {_plain(best)} or a {_plain(other)}, which lie in memory in two ways"
    return "its kernel may be (inputs, features) or (features, inputs), and both are equally long"


def _plain(found: Fit) -> str:
    return (found.source.kind if found.source.kind != "parameter" else found.target.kind).replace("_", " ")


def _fits(source: NativeLayer, target: NativeLayer) -> Iterator[Fit]:
    for one in source.forms:
        for other in target.forms:
            shapes = _shapes(one, source), _shapes(other, target)
            if shapes[0] is None or shapes[1] is None:
                continue
            if one.kind == other.kind and shapes[0] == shapes[1]:
                yield Fit(one, other)
            elif one.kind == other.kind and "parameter" not in (one.kind, other.kind):
                continue
            elif "parameter" in (one.kind, other.kind) or {one.kind, other.kind} in _ALIKE:
                for between in _between(shapes[0], shapes[1], {one.kind, other.kind}):
                    yield Fit(one, _renamed(other, between, shapes[0], shapes[1]))


def _shapes(form: Form, layer: NativeLayer) -> Mapping[str, Shape] | None:
    try:
        return form.shapes(layer.arrays)
    except (ValueError, KeyError):
        return None


def _between(one: Mapping[str, Shape], other: Mapping[str, Shape], kinds: set[str]) -> Iterator[Mapping[str, Any]]:
    """Ways to read the arrays `other` as the arrays `one`: its name -> (the other's name, operations)."""
    if kinds == {"conv", "dense"}:
        if one.keys() == other.keys() and all(_squeezed(one[name]) == _squeezed(other[name]) for name in one):
            yield {name: (name, (Reshape(other[name], one[name]),)) for name in one}
        return
    if len(one) != 1 or len(other) != 1:
        return
    (name, shape), (other_name, other_shape) = *one.items(), *other.items()
    if _squeezed(shape) == _squeezed(other_shape):
        yield {name: (other_name, (Reshape(other_shape, shape),))}
    if kinds == {"parameter", "dense"} and shape == other_shape[::-1] and len(shape) == 2:
        yield {name: (other_name, (Transpose((1, 0)),))}


def _squeezed(shape: Shape) -> Shape:
    return tuple(length for length in shape if length != 1)


def _renamed(form: Form, between: Mapping[str, Any], one: Mapping[str, Shape], other: Mapping[str, Shape]) -> Form:
    """`form`, whose canonical arrays are named and laid as those of the other layer's form."""
    back = {name: (own, operations) for own, (name, operations) in between.items()}
    rules = []
    for rule in form.rules:
        (name,) = rule.canonical
        own, operations = back[name]
        same = all(isinstance(each, Reshape) and each.native == each.canonical for each in operations)
        rules.append(Rule(rule.native, (own,), rule.operations + (() if same else operations)))
    return dataclasses.replace(form, rules=tuple(rules))


def _same_places(one: Fit, other: Fit, source: NativeLayer, target: NativeLayer) -> bool:
    """Whether two readings put every number into the same place."""
    import numpy as np

    if sum(array.size for array in source.arrays.values()) > _PROBED:
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
