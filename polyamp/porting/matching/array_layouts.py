"""Layouts of arrays that the user gives, `forms={"rel_embedding": "transpose"}`, for arrays of no known layer.

A layout names an array's axes by letters, and says how they make the kernel (inputs, features): "ndh -> d(nh)".
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

GIVEN_KIND: Final = "array"
"""Kind of an array in a layout that the user gave: it fits any layer with one array of that shape, as it is."""
_TRANSPOSE: Final = "ab -> ba"
_EXAMPLE: Final = '{"rel_embedding": "transpose", "q_einsum": "ndh -> d(nh)"}'


class ArrayLayout(NamedTuple):
    """Axes of an array, and how they make another one.

    Attributes:
        axes: a letter for each axis.
        groups: the letters of each new axis.
    """

    axes: str
    groups: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> ArrayLayout | None:
        """Return the layout that a text describes; None if it describes none.

        >>> ArrayLayout.parse("ndh -> d(nh)")
        ArrayLayout(axes='ndh', groups=('d', 'nh'))
        >>> ArrayLayout.parse("transpose").groups, ArrayLayout.parse("nd -> n") is None
        (('b', 'a'), True)
        """
        words = _TRANSPOSE if text == "transpose" else text
        axes, arrow, result = re.sub(r"\s", "", words).partition("->")
        if not arrow or not re.fullmatch(r"[A-Za-z]+", axes) or not re.fullmatch(r"([A-Za-z]|\([A-Za-z]+\))+", result):
            return None
        groups = tuple(one or other for one, other in re.findall(r"([A-Za-z])|\(([A-Za-z]+)\)", result))
        letters = "".join(groups)
        return cls(axes, groups) if sorted(letters) == sorted(axes) and len({*axes}) == len(axes) else None

    def operations(self, shape: Shape) -> tuple[Operation, ...]:
        """Return the operations for an array of this shape."""
        order = tuple(self.axes.index(letter) for letter in "".join(self.groups))
        turned = tuple(shape[axis] for axis in order)
        lengths = dict(zip(self.axes, shape, strict=True))
        joined = tuple(math.prod(lengths[letter] for letter in group) for group in self.groups)
        found: list[Operation] = [Transpose(order)] if order != tuple(range(len(order))) else []
        return (*found, Reshape(turned, joined)) if joined != turned else tuple(found)


def check_forms(forms: object) -> dict[str, ArrayLayout]:
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
    found = {}
    for pattern, text in forms.items():
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise PortError(f"forms: {describe_value(pattern)} is no regular expression: {error}.") from error
        layout = ArrayLayout.parse(text) if isinstance(text, str) else None
        if layout is None:
            raise PortError(
                f'forms: {pattern!r} must have "transpose" or a layout such as "ndh -> d(nh)", with one letter for '
                f"each axis, and each letter once on both sides. Received: {describe_value(text)}."
            )
        found[pattern] = layout
    return found


def with_forms(source: Inventory, target: Inventory, forms: Mapping[str, ArrayLayout]) -> tuple[Inventory, Inventory]:
    """Return both sides with the given layouts.

    Raises:
        PortError: an expression matches no path, or a layer with several arrays or with another number of axes.
    """
    if not forms:
        return source, target
    for pattern in forms:
        paths = [layer.path for side in (source, target) for layer in side.layers if layer.leaves]
        if not any(re.search(pattern, path) for path in paths):
            close = closest_words(pattern, paths) or paths[:3]
            raise PortError(
                f"forms: {pattern!r} matches no path of either model. Nearest: {', '.join(map(repr, close))}."
            )
    ours, theirs = (
        dataclasses.replace(side, layers=[_with_form(layer, forms) for layer in side.layers])
        for side in (source, target)
    )
    return ours, theirs


def _with_form(layer: NativeLayer, forms: Mapping[str, ArrayLayout]) -> NativeLayer:
    found = [(pattern, layout) for pattern, layout in forms.items() if layer.leaves and re.search(pattern, layer.path)]
    if not found:
        return layer
    pattern, layout = found[0]
    if len(found) > 1:
        raise PortError(f"forms: {pattern!r} and {found[1][0]!r} both match {layer.path!r}. Give one of them.")
    if len(layer.leaves) > 1:
        raise PortError(
            f"forms: {pattern!r} matches {layer.path!r}, a layer of {len(layer.leaves)} arrays "
            f"({', '.join(layer.leaves)}), and a layout is one array's. Give its class a form: "
            "polyamp.porting.register."
        )
    ((name, leaf),) = layer.leaves.items()
    if len(leaf.array.shape) != len(layout.axes):
        raise PortError(
            f"forms: {pattern!r} has {len(layout.axes)} axes, {layout.axes!r}, and {layer.path!r} has "
            f"{len(leaf.array.shape)}: {leaf.array.shape}."
        )
    rule = Rule((name,), ("value",), layout.operations(leaf.array.shape))
    return dataclasses.replace(layer, forms=(Form(GIVEN_KIND, (rule,)),))
