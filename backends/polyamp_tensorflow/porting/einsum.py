"""`EinsumDense` as a dense layer: the axes of its kernel that are summed over are the inputs, the others the features.

Called by `layers`.
"""

from __future__ import annotations

import math
from typing import Any

from polyamp.porting.layouts.forms import Rule, same
from polyamp.porting.layouts.operations import Operation, Reshape, Transpose
from polyamp_tensorflow.porting.activations import said_of
from polyamp_tensorflow.porting.parts import UNKNOWN, Part, form, only, own, present


def parts_of(layer: Any) -> list[Part]:
    """One dense layer, its inputs in the order in which the input has them and its features in the output's."""
    arrays = own(layer)
    given, kernel, result = split(layer.equation)
    inputs = [axis for axis in given if axis in kernel and axis not in result]
    outputs = [axis for axis in result if axis in kernel and axis not in given]
    biased = set(layer.bias_axes or outputs)
    if sorted(inputs + outputs) != sorted(kernel) or biased != set(outputs):
        as_they_are = present(same("kernel", "bias"), arrays)
        return [Part(form(only(layer, layer.equation), as_they_are, **said_of(layer.activation)), arrays)]
    lengths = dict(zip(kernel, arrays["kernel"].shape, strict=True))
    shapes = [tuple(lengths[axis] for axis in axes) for axes in (inputs, outputs)]
    rules = [Rule(("kernel",), ("kernel",), _operations(kernel, inputs + outputs, shapes))]
    if "bias" in arrays:
        features = math.prod(shapes[1])
        native = tuple(arrays["bias"].shape)
        rules.append(Rule(("bias",), ("bias",), () if native == (features,) else (Reshape(native, (features,)),)))
    said = {
        **said_of(layer.activation),
        "inputs": shapes[0] if len(inputs) > 1 else UNKNOWN,
        "outputs": shapes[1] if len(outputs) > 1 else UNKNOWN,
    }
    return [Part(form("dense", tuple(rules), **said), arrays)]


def split(equation: str) -> tuple[str, str, str]:
    """The axes of an equation's input, kernel and output; an ellipsis is none.

    >>> split("...x,xyz->...yz")
    ('x', 'xyz', 'yz')
    """
    left, result = equation.replace(" ", "").replace("...", "").split("->")
    given, kernel = left.split(",")
    return given, kernel, result


def _operations(kernel: str, order: list[str], shapes: list[tuple[int, ...]]) -> tuple[Operation, ...]:
    found: list[Operation] = []
    axes = tuple(kernel.index(axis) for axis in order)
    if axes != tuple(range(len(axes))):
        found.append(Transpose(axes))
    if len(order) != 2:
        found.append(Reshape((*shapes[0], *shapes[1]), (math.prod(shapes[0]), math.prod(shapes[1]))))
    return tuple(found)
