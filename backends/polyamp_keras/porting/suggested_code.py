"""Lines of code that set a layer's attribute, shown with the differences in a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import keras

from polyamp.porting.layouts.layer_layout import Form
from polyamp_keras.compat import layer_attributes
from polyamp_keras.models.layers import is_container, list_layers

AttributeLine = Callable[[Any], str]
_ASSIGNABLE: Final = (
    *("epsilon", "momentum", "rate", "dropout", "recurrent_dropout"),
    *("negative_slope", "alpha", "axis"),
)
"""Canonical attributes that Keras layers have under the same names."""
_COMMENT: Final = "  # at "
_SEQUENCES: Final = {"strides": "strides", "dilation": "dilation_rate", "window": "pool_size", "size": "size"}
_ACTIVATION_CODE: Final = {
    "gelu_tanh": "lambda x: keras.activations.gelu(x, approximate=True)",
    "quick_gelu": "lambda x: x * keras.ops.sigmoid(1.702 * x)",
    "relu_squared": "lambda x: keras.ops.square(keras.ops.relu(x))",
}
"""Activation without a name in `keras.activations` -> its code."""


def attribute_lines(layer: Any, form: Form, place: str) -> dict[str, AttributeLine]:
    """Return attribute -> function from a canonical value to the line of code that sets it.

    Args:
        layer: the Keras layer with these attributes.
        form: the form that was read from it.
        place: the layer's entry in `layer_expressions`: code that reaches it, such as "model.get_layer('norm')", or
            a comment if no code does.
    """
    found: dict[str, AttributeLine] = {}
    place, unreached, path = place.partition(_COMMENT)
    if unreached:
        place = "layer"
    for name in form.attributes:
        if name in _ASSIGNABLE and name in vars(layer):
            found[name] = _assignment_line(f"{place}.{name}")
        elif name in _SEQUENCES and hasattr(layer, _SEQUENCES[name]):
            found[name] = _sequence_line(f"{place}.{_SEQUENCES[name]}")
        elif name in ("activation", "recurrent_activation") and hasattr(layer, name):
            found[name] = _activation_line(f"{place}.{name}")
        elif name == "padding" and hasattr(layer, "padding"):
            found[name] = _padding_line(place, transposed="Transpose" in type(layer).__name__)
    return {name: _with_comment(line, f"{_COMMENT}{path}") for name, line in found.items()} if unreached else found


def _with_comment(line: AttributeLine, comment: str) -> AttributeLine:
    return lambda value: f"{line(value)}{comment}"


def _assignment_line(target: str) -> AttributeLine:
    return lambda value: f"{target} = {value!r}"


def _sequence_line(target: str) -> AttributeLine:
    return lambda value: f"{target} = {tuple(value)!r}"


def _activation_line(target: str) -> AttributeLine:
    return lambda value: f"{target} = {_ACTIVATION_CODE.get(value, f'keras.activations.get({value!r})')}"


def _padding_line(place: str, *, transposed: bool) -> AttributeLine:
    def line(value: Any) -> str:
        if isinstance(value, str):
            return f"{place}.padding = {value!r}"
        rank = len(value)
        if transposed:
            cut = tuple((max(before, 0), max(after, 0)) for before, after in value)
            return f"keras.layers.Cropping{rank}D({cut}) behind {place}, whose padding is 'valid'"
        pads = tuple(map(tuple, value))
        return (
            f"keras.layers.ZeroPadding{rank}D({pads if rank > 1 else pads[0]}) before {place}, whose padding is 'valid'"
        )

    return line


def layer_expressions(model: Any) -> dict[int, str]:
    """Return id of each layer -> the code that reaches it from `model`, else "model  # at" and its path."""
    found = {id(model): "model"}
    for module in list_layers(model):
        place = found.get(id(module.layer), "model")
        for inner, code in _child_expressions(module.layer):
            found.setdefault(id(inner), f"{place}{code}")
    return {**{id(module.layer): f"model{_COMMENT}{module.path}" for module in list_layers(model)}, **found}


def _child_expressions(layer: Any) -> Iterator[tuple[Any, str]]:
    """Yield the child layers of a layer, each with the code appended to the layer's expression to reach it."""
    if is_container(layer):
        for inner in layer.layers:
            yield inner, f".get_layer({inner.name!r})"
        return
    for name, value in layer_attributes(layer).items():
        if name.startswith("_"):
            continue
        yield from _value_expressions(value, f".{name}")
    for name in ("query_dense", "key_dense", "value_dense", "output_dense"):
        if isinstance(inner := getattr(layer, name, None), keras.Layer):
            yield inner, f".{name}"


def _value_expressions(value: Any, code: str) -> Iterator[tuple[Any, str]]:
    if isinstance(value, keras.Layer):
        yield value, code
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _value_expressions(item, f"{code}[{number}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _value_expressions(item, f"{code}[{key!r}]")
