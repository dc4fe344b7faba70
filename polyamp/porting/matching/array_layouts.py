"""Layouts of arrays that the user gives, `forms={"rel_embedding": "transpose"}`, for arrays of no known layer.

A layout names an array's axes by letters, and says how they make the kernel (inputs, features): "ndh -> d(nh)". An axis
that the result lacks stacks the arrays of several layers: "cdf -> df" (`array_parts`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from polyamp.errors import PortError, closest_words, describe_value
from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import Operation, Reshape, Shape, Transpose
from polyamp.porting.matching.array_parts import Parts, StackedPart, split_layer

GIVEN_KIND: Final = "array"
"""Kind of an array in a layout that the user gave: it fits any layer with one array of that shape, as it is."""
_TRANSPOSE: Final = "ab -> ba"
_EXAMPLE: Final = '{"rel_embedding": "transpose", "q_einsum": "ndh -> d(nh)"}'


class ArrayLayout(NamedTuple):
    """Axes of an array, and how they make another one.

    Attributes:
        axes: a letter for each axis.
        groups: the letters of each new axis.
        stack: the axis that stacks several layers; None if there is none.
    """

    axes: str
    groups: tuple[str, ...]
    stack: int | None = None

    @classmethod
    def parse(cls, text: str) -> ArrayLayout | None:
        """Return the layout that a text describes; None if it describes none.

        >>> ArrayLayout.parse("ndh -> d(nh)")
        ArrayLayout(axes='ndh', groups=('d', 'nh'), stack=None)
        >>> ArrayLayout.parse("cdf -> df")
        ArrayLayout(axes='df', groups=('d', 'f'), stack=0)
        >>> ArrayLayout.parse("transpose").groups, ArrayLayout.parse("nd -> dd") is None
        (('b', 'a'), True)
        """
        words = _TRANSPOSE if text == "transpose" else text
        axes, arrow, result = re.sub(r"\s", "", words).partition("->")
        if not arrow or not re.fullmatch(r"[A-Za-z]+", axes) or not re.fullmatch(r"([A-Za-z]|\([A-Za-z]+\))+", result):
            return None
        groups = tuple(one or other for one, other in re.findall(r"([A-Za-z])|\(([A-Za-z]+)\)", result))
        letters = "".join(groups)
        rest = [letter for letter in axes if letter not in letters]
        if len({*axes}) != len(axes) or len({*letters}) != len(letters) or not {*letters} <= {*axes} or len(rest) > 1:
            return None
        return cls(
            "".join(letter for letter in axes if letter in letters), groups, axes.index(rest[0]) if rest else None
        )

    @property
    def rank(self) -> int:
        """Number of axes of the array."""
        return len(self.axes) + (self.stack is not None)

    def operations(self, shape: Shape) -> tuple[Operation, ...]:
        """Return the operations for an array of this shape, without the axis that stacks."""
        order = tuple(self.axes.index(letter) for letter in "".join(self.groups))
        turned = tuple(shape[axis] for axis in order)
        lengths = dict(zip(self.axes, shape, strict=True))
        joined = tuple(math.prod(lengths[letter] for letter in group) for group in self.groups)
        found: list[Operation] = [Transpose(order)] if order != tuple(range(len(order))) else []
        return (*found, Reshape(turned, joined)) if joined != turned else tuple(found)


GivenForm = ArrayLayout | Form
"""What an entry of `forms=` gives: a layout of one array, or the form of a layer."""


def check_forms(forms: object) -> dict[str, GivenForm]:
    """Validate the argument `forms`, and return it with parsed layouts.

    Raises:
        PortError: `forms` is not a mapping of regular expressions to layouts.
    """
    if forms is None:
        return {}
    if not isinstance(forms, Mapping):
        raise PortError(
            f"forms must map regular expressions over paths to layouts: {_EXAMPLE}. Received: {describe_value(forms)}."
        )
    found: dict[str, GivenForm] = {}
    for pattern, text in forms.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise PortError(f"forms: {describe_value(pattern)} is no regular expression: {error}.") from error
        given = ArrayLayout.parse(text) if isinstance(text, str) else text
        if not isinstance(given, GivenForm):
            raise PortError(
                f'forms: {pattern!r} must have "transpose", a polyamp.porting.Form, or a layout such as "ndh -> d(nh)" '
                "with one letter for each axis, and each letter once on both sides; one may be missing on the right, "
                f"of an axis that stacks several layers. Received: {describe_value(text)}."
            )
        found[pattern] = given
    return found


def with_forms(
    source: Inventory, target: Inventory, forms: Mapping[str, GivenForm]
) -> tuple[Inventory, Inventory, tuple[Parts, Parts]]:
    """Return both sides with the given layouts, and the parts of each side's stacked arrays.

    Raises:
        PortError: an expression matches no path, or a layer with several arrays or with another number of axes.
    """
    parts: tuple[Parts, Parts] = {}, {}
    if not forms:
        return source, target, parts
    for pattern in forms:
        paths = [layer.path for side in (source, target) for layer in side.layers if layer.leaves]
        if not any(re.search(pattern, path) for path in paths):
            close = closest_words(pattern, paths) or paths[:3]
            raise PortError(
                f"forms: {pattern!r} matches no path of either model. Nearest: {', '.join(map(repr, close))}."
            )
    ours, theirs = (
        dataclasses.replace(side, layers=[made for layer in side.layers for made in _with_form(layer, forms, known)])
        for side, known in zip((source, target), parts, strict=True)
    )
    return ours, theirs, parts


def _with_form(layer: NativeLayer, forms: Mapping[str, GivenForm], parts: Parts) -> list[NativeLayer]:
    """Return a layer with its given layout, or its parts, which are added to `parts`."""
    found = [(pattern, given) for pattern, given in forms.items() if layer.leaves and re.search(pattern, layer.path)]
    if not found:
        return [layer]
    pattern, given = found[0]
    if len(found) > 1:
        raise PortError(f"forms: {pattern!r} and {found[1][0]!r} both match {layer.path!r}. Give one of them.")
    if isinstance(given, Form):
        _check_form(pattern, given, layer)
        return [dataclasses.replace(layer, forms=(given,))]
    return _with_layout(pattern, given, layer, parts)


def _check_form(pattern: str, form: Form, layer: NativeLayer) -> None:
    named = [name for rule in form.rules for name in rule.native]
    try:
        if sorted(named) == sorted(layer.leaves):
            form.shapes(layer.arrays)
            return
        why = f"its rules name {', '.join(named) or 'no arrays'}"
    except (ValueError, IndexError) as error:
        why = str(error)
    shapes = ", ".join(f"{name} {array.shape}" for name, array in layer.arrays.items())
    raise PortError(f"forms: the form of {pattern!r} does not fit {layer.path!r}, which has {shapes}: {why}.")


def _with_layout(pattern: str, layout: ArrayLayout, layer: NativeLayer, parts: Parts) -> list[NativeLayer]:
    if len(layer.leaves) > 1:
        raise PortError(
            f"forms: {pattern!r} matches {layer.path!r}, a layer of {len(layer.leaves)} arrays "
            f"({', '.join(layer.leaves)}), and a layout is one array's. Give a polyamp.porting.Form."
        )
    ((name, leaf),) = layer.leaves.items()
    shape = leaf.array.shape
    if len(shape) != layout.rank:
        raise PortError(
            f"forms: {pattern!r} has a layout of {layout.rank} axes, and {layer.path!r} has {len(shape)}: {shape}."
        )
    inner = shape if layout.stack is None else (*shape[: layout.stack], *shape[layout.stack + 1 :])
    form = Form(GIVEN_KIND, (Rule((name,), ("value",), layout.operations(inner)),))
    if layout.stack is None:
        return [dataclasses.replace(layer, forms=(form,))]
    made = split_layer(layer, layout.stack, form)
    parts.update({part.path: StackedPart(layer, number, layout.stack) for number, part in enumerate(made)})
    return made
