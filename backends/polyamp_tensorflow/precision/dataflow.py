"""What the graph of a functional model says of its operations (S4 in detail): which products are sums or
multiplications, what feeds a logarithm or `1 - x`, and which gradients are sums over what was gathered.

Outside of functional models a layer's code is its own, and none of this is known. Called by `layer_choice`.
"""

from __future__ import annotations

from typing import Any, Final

import keras
import numpy as np

from polyamp_tensorflow.compat import built_with, calls_of, came_from, layers_named
from polyamp_tensorflow.models.layers import only_contains
from polyamp_tensorflow.precision.op_list import function_name, names

_LOGARITHMS: Final = names("Log Log1p Log2 Log10 log log1p log2 log10")
_SATURATING: Final = names(
    "Sigmoid HardSigmoid SparseSigmoid Tanh HardTanh Softsign Erf Erfc Arctan sigmoid hard_sigmoid sparse_sigmoid tanh "
    "hard_tanh softsign erf erfc arctan"
)
_ELEMENTWISE: Final = names(
    "Add Subtract Multiply Divide TrueDivide DivideNoNan Negative Maximum Minimum Clip Absolute Square Sqrt Where "
    "NanToNum Relu"
)
_MOVING: Final = names(
    "Reshape Transpose Squeeze ExpandDims Swapaxes Moveaxis Ravel GetItem Slice Split Unstack Stack Concatenate Flip "
    "Roll Pad BroadcastTo Tile Take TakeAlongAxis Repeat"
)
_PASSING: Final = _ELEMENTWISE | _MOVING
_PASSING_LAYERS: Final = layers_named(
    "Add Subtract Multiply Maximum Minimum Average Concatenate Reshape Flatten Permute RepeatVector Dropout Identity "
    "ReLU Cropping1D Cropping2D Cropping3D ZeroPadding1D ZeroPadding2D ZeroPadding3D"
)
_GATHERS: Final = names("Take TakeAlongAxis Repeat")
_GATHERING_LAYERS: Final = layers_named("RepeatVector UpSampling1D UpSampling2D UpSampling3D")


def is_inner_product(target: Any) -> bool:
    """True for a product without free axes, whatever its batch axes: a sum. Of layers, `Dot` of two vectors a row."""
    if isinstance(target, keras.layers.Dot):
        shapes = _input_shapes(target) or built_with(target)  # functional model, or one with its own call
        return bool(shapes) and all(len(shape) == 2 for shape in shapes)
    return _product(target) == "inner"


def multiplies(operation: Any) -> bool:
    """True for a product that contracts nothing, or axes of length 1: it follows its operands."""
    return _product(operation) == "multiplication"


def is_gather(target: Any) -> bool:
    """True for `take`, `take_along_axis` and `repeat`, and the layers made of them, whose gradients are sums."""
    if isinstance(target, keras.Layer):
        return isinstance(target, _GATHERING_LAYERS)
    return type(target).__name__ in _GATHERS


def feeding_logarithms(container: Any) -> set[int]:
    """ids of the operations and layers of a functional or sequential model between a logarithm, or `1 - x`, and the
    saturating functions before it, themselves included."""
    found: set[int] = set()
    for operation in getattr(container, "operations", None) or getattr(container, "layers", []):
        for node in calls_of(operation):
            for tensor in _sensitive_inputs(operation, node):
                _walk(tensor, found)
    return found


def _walk(tensor: Any, found: set[int]) -> None:
    operation, number, place = came_from(tensor)
    if isinstance(operation, keras.layers.InputLayer):
        return
    if only_contains(operation):
        _walk(keras.tree.flatten(operation.outputs)[place], found)
        return
    name = function_name(operation)
    saturating = name in _SATURATING
    passing = isinstance(operation, _PASSING_LAYERS) if isinstance(operation, keras.Layer) else name in _PASSING
    if not (saturating or passing) or id(operation) in found:
        return
    found.add(id(operation))
    if isinstance(operation, keras.layers.Wrapper):
        found.add(id(operation.layer))
    if not saturating:
        for source in calls_of(operation)[number].input_tensors:
            _walk(source, found)


def _sensitive_inputs(operation: Any, node: Any) -> list[Any]:
    """The tensors that lose digits before a logarithm or `1 - x`."""
    name = function_name(operation)
    if name in _LOGARITHMS:
        return list(node.input_tensors)
    if isinstance(operation, keras.Layer) or name != "Subtract":
        return []
    first = (*node.arguments.args, *node.arguments.kwargs.values())[0]
    constant = not keras.utils.is_keras_tensor(first) and np.ndim(first) == 0
    return list(node.input_tensors) if constant and float(first) == 1.0 else []


def _input_shapes(operation: Any) -> list[Any]:
    return [tuple(tensor.shape) for node in calls_of(operation) for tensor in node.input_tensors]


def _product(operation: Any) -> str:
    """ "inner", "multiplication" or "" for a product of both kinds of axes, by the operation's operands wherever it is
    called."""
    kinds = {_kind(operation, node) for node in calls_of(operation)}
    return kinds.pop() if len(kinds) == 1 else ""


def _kind(operation: Any, node: Any) -> str:
    name = type(operation).__name__
    operands = [
        leaf for leaf in keras.tree.flatten((node.arguments.args, node.arguments.kwargs)) if hasattr(leaf, "shape")
    ]
    shapes = [tuple(operand.shape) for operand in operands]
    if len(shapes) != 2:
        return ""
    axes = _axes(operation, name, shapes)
    if axes is None:
        return ""
    contracted, free = axes
    if all(length == 1 for length in contracted):
        return "multiplication"
    return "" if free else "inner"


def _axes(operation: Any, name: str, shapes: list[Any]) -> tuple[list[Any], int] | None:
    """Lengths of the contracted axes, and the number of free ones; None where this is not known."""
    left, right = (len(shape) for shape in shapes)
    if name == "Outer":
        return [], left + right
    if name == "Vdot":
        return list(shapes[0]), 0
    if name in ("Inner", "Dot", "Matmul"):
        if not (left and right):
            return [], left + right
        batch = min(left, right) - 2 if name == "Matmul" else 0
        return [shapes[0][-1]], left + right - 2 - 2 * max(batch, 0)
    if name == "Tensordot":
        axes = operation.axes
        count = axes if isinstance(axes, int) else np.size(axes[0])
        where = list(range(left - count, left)) if isinstance(axes, int) else np.atleast_1d(axes[0])
        return [shapes[0][int(axis)] for axis in where], left + right - 2 * count
    if name == "Einsum":
        return _einsum_axes(operation.subscripts.replace(" ", ""), shapes)
    return None


def _einsum_axes(subscripts: str, shapes: list[Any]) -> tuple[list[Any], int] | None:
    inputs, arrow, output = subscripts.partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2:
        return None
    lengths: dict[str, Any] = {}
    for term, shape in zip(terms, shapes, strict=True):
        before, dots, after = term.partition("...")
        lengths.update(zip(before, shape, strict=False))
        lengths.update(zip(reversed(after if dots else ""), reversed(shape), strict=False))
    first, second = (set(term) - {"."} for term in terms)
    contracted = [lengths[label] for label in (first | second) - set(output)]
    return contracted, len((first ^ second) & set(output)) + int(inputs.count("...") == 1)
