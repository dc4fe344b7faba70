"""Reader of `EinsumDense` as a dense layer. Summed kernel axes are the inputs, the others the features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import Operation, Reshape, Shape, Transpose
from polyamp_tensorflow.porting.layers.activations import activation_attributes
from polyamp_tensorflow.porting.layers.layer_record import (
    UNKNOWN,
    LayerRecord,
    array_rules,
    opaque_kind,
    own_variables,
    plain_form,
)


def read_einsum_dense(layer: Any) -> list[LayerRecord]:
    """Read a dense layer. Its inputs are in the order of the input's axes, its features in the output's."""
    arrays = own_variables(layer)
    given, kernel, result = split_equation(layer.equation)
    inputs = [axis for axis in given if axis in kernel and axis not in result]
    outputs = [axis for axis in result if axis in kernel and axis not in given]
    biased = set(layer.bias_axes or outputs)
    if sorted(inputs + outputs) != sorted(kernel) or biased != set(outputs):
        unchanged = array_rules(arrays, kernel="kernel", bias="bias")
        attributes = activation_attributes(layer.activation)
        return [LayerRecord(plain_form(opaque_kind(layer, layer.equation), unchanged, **attributes), arrays)]
    lengths = dict(zip(kernel, arrays["kernel"].shape, strict=True))
    shapes = [tuple(lengths[axis] for axis in axes) for axes in (inputs, outputs)]
    rules = [Rule(("kernel",), ("kernel",), _operations(kernel, inputs + outputs, shapes))]
    if "bias" in arrays:
        rules.append(_bias_rule(tuple(arrays["bias"].shape)))
    said = {
        **activation_attributes(layer.activation),
        "inputs": shapes[0] if len(inputs) > 1 else UNKNOWN,
        "outputs": shapes[1] if len(outputs) > 1 else UNKNOWN,
    }
    return [LayerRecord(plain_form("dense", tuple(rules), **said), arrays)]


def _bias_rule(shape: Shape) -> Rule:
    return Rule(("bias",), ("bias",), () if len(shape) == 1 else (Reshape(shape, (math.prod(shape),)),))


def file_forms(shapes: Mapping[str, Shape]) -> Iterator[Form]:
    """Yield possible forms of variables. The bias determines the output axes; without it, every split is possible."""
    kernel, bias = shapes["kernel"], shapes.get("bias")
    for inputs in range(1, len(kernel)):
        given, result = kernel[:inputs], kernel[inputs:]
        if bias in (None, result):
            flat = Reshape(kernel, (math.prod(given), math.prod(result)))
            biases = () if bias is None else (_bias_rule(bias),)
            yield Form("dense", (Rule(("kernel",), ("kernel",), (flat,)), *biases))


def split_equation(equation: str) -> tuple[str, str, str]:
    """Return the axes of an equation's input, kernel and output, without the ellipsis.

    >>> split_equation("...x,xyz->...yz")
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
