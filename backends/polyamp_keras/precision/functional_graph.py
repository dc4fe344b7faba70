"""Properties of the operations in a functional model's graph (details of S4).

- Which products are inner products (sums) or multiplications.
- Which operations feed a logarithm or `1 - x`.
- Which operations gather, so that their gradients are sums.

Outside functional models none of this is known.
"""

from __future__ import annotations

from typing import Any, Final

import keras
import numpy as np

from polyamp_keras.compat import build_shapes, inbound_nodes, keras_history, layer_classes, split_names
from polyamp_keras.models.layers import is_container
from polyamp_keras.precision.op_list import function_name

_LOGARITHMS: Final = split_names("Log Log1p Log2 Log10 log log1p log2 log10")
_SATURATING_FUNCTIONS: Final = split_names(
    "Sigmoid HardSigmoid SparseSigmoid Tanh HardTanh Softsign Erf Erfc Arctan sigmoid hard_sigmoid sparse_sigmoid tanh "
    "hard_tanh softsign erf erfc arctan"
)
_ELEMENTWISE: Final = split_names(
    "Add Subtract Multiply Divide TrueDivide DivideNoNan Negative Maximum Minimum Clip Absolute Square Sqrt Where "
    "NanToNum Relu"
)
_MOVEMENT: Final = split_names(
    "Reshape Transpose Squeeze ExpandDims Swapaxes Moveaxis Ravel GetItem Slice Split Unstack Stack Concatenate Flip "
    "Roll Pad BroadcastTo Tile Take TakeAlongAxis Repeat"
)
_TRANSPARENT: Final = _ELEMENTWISE | _MOVEMENT
_TRANSPARENT_LAYERS: Final = layer_classes(
    "Add Subtract Multiply Maximum Minimum Average Concatenate Reshape Flatten Permute RepeatVector Dropout Identity "
    "ReLU Cropping1D Cropping2D Cropping3D ZeroPadding1D ZeroPadding2D ZeroPadding3D"
)
_GATHERS: Final = split_names("Take TakeAlongAxis Repeat")
_GATHER_LAYERS: Final = layer_classes("RepeatVector UpSampling1D UpSampling2D UpSampling3D")


def is_inner_product(target: Any) -> bool:
    """Return whether a product has no free axes, except batch axes: a sum. For layers: `Dot` of two vectors per row."""
    if isinstance(target, keras.layers.Dot):
        shapes = _input_shapes(target) or build_shapes(target)  # in a functional model, or in a custom call
        return bool(shapes) and all(len(shape) == 2 for shape in shapes)
    return _product(target) == "inner"


def is_multiplication(operation: Any) -> bool:
    """Return whether a product contracts nothing, or axes of length 1. Its dtype follows its operands."""
    return _product(operation) == "multiplication"


def is_gather(target: Any) -> bool:
    """Return whether a target is `take`, `take_along_axis`, `repeat` or a layer based on them; gradients are sums."""
    if isinstance(target, keras.Layer):
        return isinstance(target, _GATHER_LAYERS)
    return type(target).__name__ in _GATHERS


def logarithm_sources(container: Any) -> set[int]:
    """Return the ids of the operations and layers between a saturating function (included) and a logarithm or `1 - x`,
    in a functional or sequential model."""
    found: set[int] = set()
    for operation in getattr(container, "operations", None) or getattr(container, "layers", []):
        for node in inbound_nodes(operation):
            for tensor in _sensitive_inputs(operation, node):
                _collect_sources(tensor, found)
    return found


def _collect_sources(tensor: Any, found: set[int]) -> None:
    operation, node_index, output_index = keras_history(tensor)
    if isinstance(operation, keras.layers.InputLayer):
        return
    if is_container(operation):
        _collect_sources(keras.tree.flatten(operation.outputs)[output_index], found)
        return
    name = function_name(operation)
    saturating = name in _SATURATING_FUNCTIONS
    passing = isinstance(operation, _TRANSPARENT_LAYERS) if isinstance(operation, keras.Layer) else name in _TRANSPARENT
    if not (saturating or passing) or id(operation) in found:
        return
    found.add(id(operation))
    if isinstance(operation, keras.layers.Wrapper):
        found.add(id(operation.layer))
    if not saturating:
        for source in inbound_nodes(operation)[node_index].input_tensors:
            _collect_sources(source, found)


def _sensitive_inputs(operation: Any, node: Any) -> list[Any]:
    """Return the inputs of a logarithm or `1 - x`, where rounding loses digits."""
    name = function_name(operation)
    if name in _LOGARITHMS:
        return list(node.input_tensors)
    if isinstance(operation, keras.Layer) or name != "Subtract":
        return []
    first = (*node.arguments.args, *node.arguments.kwargs.values())[0]
    constant = not keras.utils.is_keras_tensor(first) and np.ndim(first) == 0
    return list(node.input_tensors) if constant and float(first) == 1.0 else []


def _input_shapes(operation: Any) -> list[Any]:
    return [tuple(tensor.shape) for node in inbound_nodes(operation) for tensor in node.input_tensors]


def _product(operation: Any) -> str:
    """Return "inner" or "multiplication" if all calls of an operation are such products; otherwise ""."""
    kinds = {_product_kind(operation, node) for node in inbound_nodes(operation)}
    return kinds.pop() if len(kinds) == 1 else ""


def _product_kind(operation: Any, node: Any) -> str:
    name = type(operation).__name__
    operands = [
        leaf for leaf in keras.tree.flatten((node.arguments.args, node.arguments.kwargs)) if hasattr(leaf, "shape")
    ]
    shapes = [tuple(operand.shape) for operand in operands]
    if len(shapes) != 2:
        return ""
    axes = _contraction_axes(operation, name, shapes)
    if axes is None:
        return ""
    contracted, free = axes
    if all(length == 1 for length in contracted):
        return "multiplication"
    return "" if free else "inner"


def _contraction_axes(operation: Any, name: str, shapes: list[Any]) -> tuple[list[Any], int] | None:
    """Return the lengths of the contracted axes and the number of free axes; None if unknown."""
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
