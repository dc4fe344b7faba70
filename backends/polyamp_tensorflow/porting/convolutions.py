"""Keras's convolutions and poolings as canonical layers. Called by `layers`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import keras

from polyamp.porting.layouts.forms import Form, Rule, same
from polyamp.porting.layouts.operations import Reshape, Transpose
from polyamp_tensorflow.compat import calls_of, came_from
from polyamp_tensorflow.porting.activations import name_of, said_of
from polyamp_tensorflow.porting.parts import Part, Reader, form, own, present

_PADDINGS: Final = (keras.layers.ZeroPadding1D, keras.layers.ZeroPadding2D, keras.layers.ZeroPadding3D)


def _said(layer: Any, **instead: Any) -> dict[str, Any]:
    """The attributes of a convolution."""
    return {
        **said_of(layer.activation),
        "strides": layer.strides,
        "padding": padding_of(layer),
        "padding_mode": "zeros",
        "dilation": layer.dilation_rate,
        "groups": getattr(layer, "groups", 1),
        "channels": _channels(layer),
        **instead,
    }


def _channels(layer: Any) -> str:
    return "first" if layer.data_format == "channels_first" else "last"


def padding_of(layer: Any) -> Any:
    """The canonical padding of a convolution or pooling. Zeros that a layer before it puts around its input, and
    around no other's, are its own."""
    if layer.padding != "valid" or not isinstance(layer.kernel_size, tuple):
        return layer.padding
    return zeros_before(layer) or "valid"


def zeros_before(layer: Any) -> list[list[int]] | None:
    """[[before, after]] per axis of the ZeroPadding layer that feeds a layer in the graph of a functional or sequential
    model; None where none does."""
    nodes = calls_of(layer)
    sources = {id(came_from(tensor)[0]): came_from(tensor)[0] for node in nodes for tensor in node.input_tensors}
    if len(sources) != 1:
        return None
    (source,) = sources.values()
    if not isinstance(source, _PADDINGS) or getattr(source, "data_format", layer.data_format) != layer.data_format:
        return None
    pads = source.padding if isinstance(source.padding[0], tuple | list) else (source.padding,)
    return [list(map(int, pair)) for pair in pads] if any(map(any, pads)) else None


def _convolution(layer: Any) -> list[Part]:
    arrays = own(layer)
    return [Part(form("conv", present(same("kernel", "bias"), arrays), **_said(layer)), arrays)]


def _depthwise(layer: Any) -> list[Part]:
    arrays = own(layer)
    rules = (_depthwise_kernel("kernel", arrays), *present(same("bias"), arrays))
    return [Part(form("conv", rules, **_said(layer, groups=_inputs(arrays["kernel"]))), arrays)]


def _depthwise_kernel(name: str, arrays: Mapping[str, Any]) -> Rule:
    """(..., inputs, multiplier) is one input channel a group, and the outputs of the first group first."""
    shape = tuple(arrays[name].shape)
    return Rule((name,), ("kernel",), (Reshape(shape, (*shape[:-2], 1, shape[-2] * shape[-1])),))


def _inputs(kernel: Any) -> int:
    return int(kernel.shape[-2])


def _separable(layer: Any) -> list[Part]:
    arrays = own(layer)
    first = {"depthwise_kernel": arrays["depthwise_kernel"]}
    second = {name: array for name, array in arrays.items() if name not in first}
    ones = [1] * layer.rank
    depthwise = _said(layer, groups=_inputs(first["depthwise_kernel"]), activation="linear")
    pointwise = _said(layer, strides=ones, padding="valid", dilation=ones)
    rules = (Rule(("pointwise_kernel",), ("kernel",)), *present(same("bias"), second))
    return [
        Part(form("conv", (_depthwise_kernel("depthwise_kernel", first),), **depthwise), first, "depthwise"),
        Part(form("conv", rules, **pointwise), second, "pointwise"),
    ]


def _transposed(layer: Any) -> list[Part]:
    arrays = own(layer)
    rank = layer.rank
    kernel = Rule(("kernel",), ("kernel",), (Transpose((*range(rank), rank + 1, rank)),))
    attributes = _said(layer, padding=crops(layer), groups=1)
    return [Part(form("conv_transpose", (kernel, *present(same("bias"), arrays)), **attributes), arrays)]


def crops(layer: Any) -> list[list[int]]:
    """What a transposed convolution cuts off its full output, per axis; negative where it adds zeros.

    TensorFlow takes it as the gradient of a convolution from an image of the output's size: of what that pads, the odd
    one is behind. Keras decides the size (`compute_output_shape`).

    >>> crops(keras.layers.Conv1DTranspose(1, 3, strides=2, padding="same"))
    [[0, 1]]
    >>> crops(keras.layers.Conv1DTranspose(1, 2, strides=3))
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


def _pooling(layer: Any) -> list[Part]:
    operation = "max" if isinstance(layer, _MAXIMA) else "average"
    padding, counts = layer.padding, False
    zeros = zeros_before(layer) if padding == "valid" else None
    if zeros is not None and (operation == "average" or _not_negative(layer)):
        padding, counts = zeros, operation == "average"
    said = {"window": layer.pool_size, "strides": layer.strides, "padding": padding}
    return [Part(_pool(operation, counts_padding=counts, **said))]


def _not_negative(layer: Any) -> bool:
    """True where the zeros before a maximum are what it would take of no padding: after a ReLU."""
    (padding,) = {came_from(tensor)[0] for node in calls_of(layer) for tensor in node.input_tensors}
    sources = [came_from(tensor)[0] for node in calls_of(padding) for tensor in node.input_tensors]
    names = [name_of(source) if isinstance(source, keras.Layer) else source.name for source in sources]
    return all(str(name).startswith(("relu", "sigmoid")) for name in names)


def _global(layer: Any) -> list[Part]:
    operation = "max" if "Max" in type(layer).__name__ else "average"
    return [Part(_pool(operation, window=[], strides=[], padding="valid", counts_padding=False))]


def _adaptive(layer: Any) -> list[Part]:
    if math.prod(layer.output_size) == 1:
        return _global(layer)
    operation = "max" if "Max" in type(layer).__name__ else "average"
    return [Part(_pool(operation, size=layer.output_size))]


def _pool(operation: str, **attributes: Any) -> Form:
    return form("pooling", (), operation=operation, **attributes)


_MAXIMA: Final = (keras.layers.MaxPooling1D, keras.layers.MaxPooling2D, keras.layers.MaxPooling3D)
TABLE: Final[Mapping[str, Reader]] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D"), _convolution),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), _depthwise),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), _separable),
    **dict.fromkeys(("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"), _transposed),
    **{f"{word}Pooling{rank}D": _pooling for word in ("Max", "Average") for rank in (1, 2, 3)},
    **{f"Global{word}Pooling{rank}D": _global for word in ("Max", "Average") for rank in (1, 2, 3)},
    **{f"Adaptive{word}Pooling{rank}D": _adaptive for word in ("Max", "Average") for rank in (1, 2, 3)},
}
"""Name in `keras.layers` -> what reads it."""
