"""Table of Keras's layers, with the forms of dense layers, embeddings, norms and layers without arrays.

`convolutions`, `recurrent` and `attention` have the other rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from polyamp.porting.layouts.layer_layout import Form, Rule, same
from polyamp.porting.layouts.operations import Operation, Reshape, Shape, Transpose
from polyamp_keras.compat import build_shapes, layer_classes
from polyamp_keras.porting.layers import activations, attention, convolutions, recurrent
from polyamp_keras.porting.layers.activations import activation_attributes
from polyamp_keras.porting.layers.layer_record import (
    UNKNOWN,
    LayerRecord,
    LayerRow,
    are_of_channels,
    array_rules,
    opaque_kind,
    own_variables,
    plain_form,
    read_variables,
    weight_layer,
)


def read_layer(layer: Any) -> list[LayerRecord] | None:
    """Return the canonical layers of a Keras layer; None for a class outside the tables: a container or custom layer.

    A subclass is read as its nearest base class in the tables.
    """
    for kind in type(layer).__mro__:
        reader = _READERS.get(kind)
        if reader is not None:
            return reader(layer)
    return None


def possible_rows(shapes: Sequence[Shape]) -> Iterator[LayerRow]:
    """Yield the rows of classes that variables of these shapes in a weights file may have, likeliest first."""
    yield from (row for row in dict.fromkeys(_ROWS.values()) if row.fits(shapes))


def file_row(word: str) -> LayerRow | None:
    """Return the row of the class after which Keras named a group in a weights file; None if it has no such row.

    >>> file_row("p_re_lu").variables
    (('alpha',),)
    """
    return _FILE_ROWS.get(word)


def _dense(shapes: Mapping[str, Shape]) -> Form:
    return Form("dense", array_rules(shapes, kernel="kernel", bias="bias"))


def _dense_attributes(layer: Any) -> dict[str, Any]:
    return activation_attributes(layer.activation)


def _read_einsum_dense(layer: Any) -> list[LayerRecord]:
    """Read an `EinsumDense` as a dense layer: summed kernel axes are the inputs, the others the features.

    The inputs are in the order of the input's axes, the features in the output's.
    """
    arrays = own_variables(layer)
    given, kernel, result = _split_equation(layer.equation)
    inputs = [axis for axis in given if axis in kernel and axis not in result]
    outputs = [axis for axis in result if axis in kernel and axis not in given]
    biased = set(layer.bias_axes or outputs)
    if sorted(inputs + outputs) != sorted(kernel) or biased != set(outputs):
        unchanged = array_rules(arrays, kernel="kernel", bias="bias")
        attributes = activation_attributes(layer.activation)
        return [LayerRecord(plain_form(opaque_kind(layer, layer.equation), unchanged, **attributes), arrays)]
    lengths = dict(zip(kernel, arrays["kernel"].shape, strict=True))
    shapes = [tuple(lengths[axis] for axis in axes) for axes in (inputs, outputs)]
    rules = [Rule(("kernel",), ("kernel",), _flat_kernel_operations(kernel, inputs + outputs, shapes))]
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


def _einsum_dense_forms(shapes: Mapping[str, Shape]) -> Iterator[Form]:
    """Yield possible forms of variables. The bias determines the output axes; without it, every split is possible."""
    kernel, bias = shapes["kernel"], shapes.get("bias")
    for inputs in range(1, len(kernel)):
        given, result = kernel[:inputs], kernel[inputs:]
        if bias in (None, result):
            flat = Reshape(kernel, (math.prod(given), math.prod(result)))
            biases = () if bias is None else (_bias_rule(bias),)
            yield Form("dense", (Rule(("kernel",), ("kernel",), (flat,)), *biases))


def _split_equation(equation: str) -> tuple[str, str, str]:
    """Return the axes of an equation's input, kernel and output, without the ellipsis.

    >>> _split_equation("...x,xyz->...yz")
    ('x', 'xyz', 'yz')
    """
    left, result = equation.replace(" ", "").replace("...", "").split("->")
    given, kernel = left.split(",")
    return given, kernel, result


def _flat_kernel_operations(kernel: str, order: list[str], shapes: list[tuple[int, ...]]) -> tuple[Operation, ...]:
    found: list[Operation] = []
    axes = tuple(kernel.index(axis) for axis in order)
    if axes != tuple(range(len(axes))):
        found.append(Transpose(axes))
    if len(order) != 2:
        found.append(Reshape((*shapes[0], *shapes[1]), (math.prod(shapes[0]), math.prod(shapes[1]))))
    return tuple(found)


def _embedding(shapes: Mapping[str, Shape]) -> Form:
    return Form("embedding", (Rule(("embeddings",), ("table",)),))


def _embedding_attributes(layer: Any) -> dict[str, Any]:
    return {"padding_index": None}


def _read_reversible_embedding(layer: Any) -> list[LayerRecord]:
    (table,) = read_variables(layer, _embedding, _embedding_attributes(layer))
    cap = layer.logit_soft_cap
    activation = "linear" if cap is None else f"soft_cap({cap:g})"
    if layer.tie_weights:  # one array in two places: the head is the transposed table
        variable = {"reverse": table.arrays["embeddings"]}
        rule = Rule(("reverse",), ("kernel",), (Transpose((1, 0)),))
    else:
        variable = {"reverse_embeddings": own_variables(layer)["reverse_embeddings"]}
        rule = Rule(("reverse_embeddings",), ("kernel",))
    return [table, LayerRecord(plain_form("dense", (rule,), activation=activation), variable, "reverse")]


def _layer_norm(shapes: Mapping[str, Shape]) -> Form:
    return Form("layer_norm", array_rules(shapes, gamma="scale", beta="bias"))


def _read_layer_norm(layer: Any) -> list[LayerRecord]:
    axes, attributes = _last_axes(layer), _epsilon(layer)
    if layer.rms_scaling:
        kind = opaque_kind(layer, "rms_scaling: it divides by the deviation from the mean, and takes no mean away")
        return read_variables(layer, _layer_norm, attributes, kind)
    if axes is None:
        return read_variables(layer, _layer_norm, attributes, opaque_kind(layer, f"over axes {layer.axis}"))
    return read_variables(layer, _layer_norm, {**attributes, "axes": axes})


def _rms_norm(shapes: Mapping[str, Shape]) -> Form:
    return Form("rms_norm", array_rules(shapes, scale="scale"))


def _read_rms_norm(layer: Any) -> list[LayerRecord]:
    kind = opaque_kind(layer, f"over axes {layer.axis}") if _last_axes(layer) is None else ""
    return read_variables(layer, _rms_norm, _epsilon(layer), kind)


def _epsilon(layer: Any) -> dict[str, Any]:
    return {"epsilon": float(layer.epsilon)}


def _last_axes(layer: Any) -> int | None:
    """Return the number of trailing axes that a norm covers; None if it covers other axes.

    A norm over the channels of channels-first inputs counts as 1: channels are last in the canonical layout.
    """
    axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    rank = len(build_shapes(layer) or ())
    if len(axes) == 1 and (axes[0] == -1 or not rank or axes[0] % rank in (rank - 1, 1)):
        return 1
    if not rank:
        return len(axes) if list(axes) == list(range(-len(axes), 0)) else None
    return len(axes) if sorted(axis % rank for axis in axes) == list(range(rank - len(axes), rank)) else None


def _group_norm(shapes: Mapping[str, Shape]) -> Form:
    return Form("group_norm", array_rules(shapes, gamma="scale", beta="bias"))


def _batch_norm(shapes: Mapping[str, Shape]) -> Form:
    names = {"gamma": "scale", "beta": "bias", "moving_mean": "mean", "moving_variance": "variance"}
    return Form("batch_norm", array_rules(shapes, **names))


def _prelu(shapes: Mapping[str, Shape]) -> Form:
    shape = shapes["alpha"]
    if sum(length > 1 for length in shape) > 1:
        raise ValueError(f"slopes of shape {list(shape)}")
    operations = () if len(shape) == 1 else (Reshape(shape, (math.prod(shape),)),)
    return Form("prelu", (Rule(("alpha",), ("slope",), operations),))


def _read_prelu(layer: Any) -> list[LayerRecord]:
    try:
        return read_variables(layer, _prelu, {})
    except ValueError as error:
        arrays = own_variables(layer)
        return [LayerRecord(plain_form(opaque_kind(layer, str(error)), same("alpha")), arrays)]


def _dropout(layer: Any) -> list[LayerRecord]:
    return [LayerRecord(plain_form("dropout", (), rate=float(layer.rate)))]


def _other_dropout(layer: Any) -> list[LayerRecord]:
    return [LayerRecord(plain_form(opaque_kind(layer, "what it drops is not zero"), (), rate=float(layer.rate)))]


def _flatten(layer: Any) -> list[LayerRecord]:
    # With data_format="channels_first" Keras moves the channels last before it flattens. `inventory` sets "first" where
    # the model's convolutions are channels-first and the flatten layer does not have that setting.
    return [LayerRecord(plain_form("flatten", (), channels="last"))]


def _reshape(layer: Any) -> list[LayerRecord]:
    return _flatten(layer) if len(layer.target_shape) == 1 else []


def _resize(layer: Any) -> list[LayerRecord]:
    size = layer.size if isinstance(layer.size, list | tuple) else (layer.size,)
    method = {"bilinear": "linear", "bicubic": "cubic"}.get(word := getattr(layer, "interpolation", "nearest"), word)
    return [
        LayerRecord(plain_form("resize", (), method=method, size=[int(factor) for factor in size], align_corners=False))
    ]


_ROWS: Final[Mapping[str, LayerRow]] = {
    **convolutions.ROWS,
    "Dense": weight_layer(
        _dense,
        _dense_attributes,
        "kernel bias",
        "kernel",
        fits=lambda shapes: len(shapes[0]) == 2 and shapes[1:] in ([], [shapes[0][1:]]),
    ),
    "EinsumDense": LayerRow(
        _read_einsum_dense,
        (("kernel", "bias"), ("kernel",)),
        _einsum_dense_forms,
        lambda shapes: len(shapes[0]) == 3 and [len(shape) for shape in shapes[1:]] in ([], [1], [2]),
    ),
    "Embedding": weight_layer(
        _embedding, _embedding_attributes, "embeddings", fits=lambda shapes: [len(shape) for shape in shapes] == [2]
    ),
    "ReversibleEmbedding": LayerRow(
        _read_reversible_embedding, (("embeddings",),), lambda shapes: [_embedding(shapes)]
    ),
    "LayerNormalization": LayerRow(
        _read_layer_norm,
        (("gamma", "beta"), ("gamma",), ("beta",)),
        lambda shapes: [_layer_norm(shapes)],
        lambda shapes: are_of_channels(shapes, 2),
    ),
    "RMSNormalization": LayerRow(
        _read_rms_norm, (("scale",),), lambda shapes: [_rms_norm(shapes)], lambda shapes: are_of_channels(shapes, 1)
    ),
    "GroupNormalization": weight_layer(
        _group_norm,
        lambda layer: {**_epsilon(layer), "groups": int(layer.groups)},
        "gamma beta",
        "gamma",
        "beta",
        fits=lambda shapes: are_of_channels(shapes, 2),
    ),
    "BatchNormalization": weight_layer(
        _batch_norm,
        lambda layer: {**_epsilon(layer), "momentum": float(layer.momentum), "unbiased": False},
        "gamma beta moving_mean moving_variance",
        "beta moving_mean moving_variance",
        "gamma moving_mean moving_variance",
        "moving_mean moving_variance",
        fits=lambda shapes: are_of_channels(shapes, 4),
    ),
    "PReLU": LayerRow(_read_prelu, (("alpha",),), lambda shapes: [_prelu(shapes)]),
    **dict.fromkeys(("Activation", "ReLU", "LeakyReLU", "ELU", "Softmax"), LayerRow(activations.read_activation)),
    **dict.fromkeys(("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D"), LayerRow(_dropout)),
    **dict.fromkeys(("AlphaDropout", "GaussianDropout"), LayerRow(_other_dropout)),
    "Flatten": LayerRow(_flatten),
    "Reshape": LayerRow(_reshape),
    **dict.fromkeys(("UpSampling1D", "UpSampling2D", "UpSampling3D"), LayerRow(_resize)),
    **recurrent.ROWS,
    **attention.ROWS,
}
"""Name in `keras.layers` -> its row; of rows that fit the same shapes, the likeliest first."""
_READERS: Final = {kind: row.read for name, row in _ROWS.items() for kind in layer_classes(name)}


def _group_name(name: str) -> str:
    """Return the name that Keras gives to a layer of a class, without a number: "conv2d" for "Conv2D"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)).lower()


_FILE_ROWS: Final = {_group_name(name): row for name, row in _ROWS.items() if row.variables}
