"""Readers of Keras's convolutions and poolings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import keras

from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import Reshape, Shape, Transpose
from polyamp_keras.compat import inbound_nodes, keras_history
from polyamp_keras.porting.layers.activations import activation_attributes, activation_name
from polyamp_keras.porting.layers.layer_record import (
    LayerRecord,
    LayerRow,
    array_rules,
    own_variables,
    plain_form,
    weight_layer,
)

_PADDINGS: Final = (keras.layers.ZeroPadding1D, keras.layers.ZeroPadding2D, keras.layers.ZeroPadding3D)


def _convolution_attributes(layer: Any, **instead: Any) -> dict[str, Any]:
    """Return the attributes of a convolution; `instead` overrides them."""
    return {
        **activation_attributes(layer.activation),
        "strides": layer.strides,
        "padding": canonical_padding(layer),
        "padding_mode": "zeros",
        "dilation": layer.dilation_rate,
        "groups": getattr(layer, "groups", 1),
        "channels": _channel_position(layer),
        **instead,
    }


def _channel_position(layer: Any) -> str:
    return "first" if layer.data_format == "channels_first" else "last"


def canonical_padding(layer: Any) -> Any:
    """Return the canonical padding of a convolution or pooling. It includes the zeros of a padding layer that is the
    only source of its input."""
    if layer.padding != "valid" or not isinstance(layer.kernel_size, tuple):
        return layer.padding
    return preceding_zero_padding(layer) or "valid"


def preceding_zero_padding(layer: Any) -> list[list[int]] | None:
    """Return [[before, after]] per axis of the ZeroPadding layer that feeds a layer; None if there is none.

    The graph of a functional or sequential model is searched.
    """
    nodes = inbound_nodes(layer)
    sources = {
        id(keras_history(tensor)[0]): keras_history(tensor)[0] for node in nodes for tensor in node.input_tensors
    }
    if len(sources) != 1:
        return None
    (source,) = sources.values()
    if not isinstance(source, _PADDINGS) or getattr(source, "data_format", layer.data_format) != layer.data_format:
        return None
    pads = source.padding if isinstance(source.padding[0], tuple | list) else (source.padding,)
    return [list(map(int, pair)) for pair in pads] if any(map(any, pads)) else None


def _convolution(shapes: Mapping[str, Shape]) -> Form:
    return Form("conv", array_rules(shapes, kernel="kernel", bias="bias"))


def _depthwise_convolution(shapes: Mapping[str, Shape], kernel: str = "kernel") -> Form:
    """Return the form of a depthwise kernel, (..., inputs, multiplier): one input channel per group, and the outputs of
    the first group first."""
    shape = shapes[kernel]
    grouped = Reshape(shape, (*shape[:-2], 1, shape[-2] * shape[-1]))
    rules = (Rule((kernel,), ("kernel",), (grouped,)), *array_rules(shapes, bias="bias"))
    return Form("conv", rules, {"groups": shape[-2]})


def _read_separable_convolution(layer: Any) -> list[LayerRecord]:
    arrays = own_variables(layer)
    first = {"depthwise_kernel": arrays["depthwise_kernel"]}
    second = {name: array for name, array in arrays.items() if name not in first}
    ones = [1] * layer.rank
    form = _depthwise_convolution({"depthwise_kernel": tuple(arrays["depthwise_kernel"].shape)}, "depthwise_kernel")
    depthwise = _convolution_attributes(layer, activation="linear", **form.attributes)
    pointwise = _convolution_attributes(layer, strides=ones, padding="valid", dilation=ones)
    rules = array_rules(second, pointwise_kernel="kernel", bias="bias")
    return [
        LayerRecord(plain_form("conv", form.rules, **depthwise), first, "depthwise"),
        LayerRecord(plain_form("conv", rules, **pointwise), second, "pointwise"),
    ]


def _transposed_convolution(shapes: Mapping[str, Shape]) -> Form:
    rank = len(shapes["kernel"]) - 2
    kernel = Rule(("kernel",), ("kernel",), (Transpose((*range(rank), rank + 1, rank)),))
    return Form("conv_transpose", (kernel, *array_rules(shapes, bias="bias")))


def output_crop(layer: Any) -> list[list[int]]:
    """Return what a transposed convolution crops from its full output, per axis; negative where it adds zeros.

    TensorFlow computes it as the gradient of a convolution whose input has the output's size. If that padding is odd,
    the extra element is at the end. Keras decides the size (`compute_output_shape`).

    >>> output_crop(keras.layers.Conv1DTranspose(1, 3, strides=2, padding="same"))
    [[0, 1]]
    >>> output_crop(keras.layers.Conv1DTranspose(1, 2, strides=3))
    [[0, -1]]
    """
    found = []
    given = layer.output_padding or (None,) * layer.rank
    for size, stride, dilation, extra in zip(layer.kernel_size, layer.strides, layer.dilation_rate, given, strict=True):
        reach = (size - 1) * dilation + 1
        if layer.padding == "valid":
            found.append([0, -(max(reach, stride) - reach if extra is None else extra)])
            continue
        cut = reach - stride if extra is None else reach - reach % 2 - extra
        before = max(cut, 0) // 2
        found.append([before, cut - before])
    return found


def _pooling(layer: Any) -> list[LayerRecord]:
    operation = "max" if isinstance(layer, _MAX_POOLINGS) else "average"
    padding, counts = layer.padding, False
    zeros = preceding_zero_padding(layer) if padding == "valid" else None
    if zeros is not None and (operation == "average" or _is_non_negative(layer)):
        padding, counts = zeros, operation == "average"
    said = {"window": layer.pool_size, "strides": layer.strides, "padding": padding}
    return [LayerRecord(_pool_form(operation, counts_padding=counts, **said))]


def _is_non_negative(layer: Any) -> bool:
    """Return whether the input is non-negative, as after a ReLU, so that zero padding does not change its maximum."""
    (padding,) = {keras_history(tensor)[0] for node in inbound_nodes(layer) for tensor in node.input_tensors}
    sources = [keras_history(tensor)[0] for node in inbound_nodes(padding) for tensor in node.input_tensors]
    names = [activation_name(source) if isinstance(source, keras.Layer) else source.name for source in sources]
    return all(str(name).startswith(("relu", "sigmoid")) for name in names)


def _global_pooling(layer: Any) -> list[LayerRecord]:
    operation = "max" if "Max" in type(layer).__name__ else "average"
    return [LayerRecord(_pool_form(operation, window=[], strides=[], padding="valid", counts_padding=False))]


def _adaptive_pooling(layer: Any) -> list[LayerRecord]:
    if math.prod(layer.output_size) == 1:
        return _global_pooling(layer)
    operation = "max" if "Max" in type(layer).__name__ else "average"
    return [LayerRecord(_pool_form(operation, size=layer.output_size))]


def _pool_form(operation: str, **attributes: Any) -> Form:
    return plain_form("pooling", (), operation=operation, **attributes)


_MAX_POOLINGS: Final = (keras.layers.MaxPooling1D, keras.layers.MaxPooling2D, keras.layers.MaxPooling3D)
_KERNEL_AND_BIAS: Final = ("kernel bias", "kernel")


def _is_kernel(shapes: Sequence[Shape]) -> bool:
    return len(shapes[0]) in (3, 4, 5) and [len(shape) for shape in shapes[1:]] in ([], [1])


def _fits_convolution(shapes: Sequence[Shape]) -> bool:
    return _is_kernel(shapes) and shapes[1:] in ([], [shapes[0][-1:]])


def _fits_transposed_convolution(shapes: Sequence[Shape]) -> bool:
    return _is_kernel(shapes) and shapes[1:] in ([], [shapes[0][-2:-1]])


def _fits_depthwise_convolution(shapes: Sequence[Shape]) -> bool:
    """Return whether the bias shows the layer: its features are the product of the kernel's last axes."""
    if not _is_kernel(shapes) or len(shapes) == 1:
        return False
    inputs, multiplier = shapes[0][-2:]
    return inputs * multiplier == shapes[1][0] != multiplier


ROWS: Final[Mapping[str, LayerRow]] = {
    **dict.fromkeys(
        ("Conv1D", "Conv2D", "Conv3D"),
        weight_layer(_convolution, _convolution_attributes, *_KERNEL_AND_BIAS, fits=_fits_convolution),
    ),
    **dict.fromkeys(
        ("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"),
        weight_layer(
            _transposed_convolution,
            lambda layer: _convolution_attributes(layer, padding=output_crop(layer), groups=1),
            *_KERNEL_AND_BIAS,
            fits=_fits_transposed_convolution,
        ),
    ),
    **dict.fromkeys(
        ("DepthwiseConv1D", "DepthwiseConv2D"),
        weight_layer(
            _depthwise_convolution, _convolution_attributes, *_KERNEL_AND_BIAS, fits=_fits_depthwise_convolution
        ),
    ),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), LayerRow(_read_separable_convolution)),
    **{f"{word}Pooling{rank}D": LayerRow(_pooling) for word in ("Max", "Average") for rank in (1, 2, 3)},
    **{f"Global{word}Pooling{rank}D": LayerRow(_global_pooling) for word in ("Max", "Average") for rank in (1, 2, 3)},
    **{
        f"Adaptive{word}Pooling{rank}D": LayerRow(_adaptive_pooling)
        for word in ("Max", "Average")
        for rank in (1, 2, 3)
    },
}
"""Name in `keras.layers` -> its row."""
