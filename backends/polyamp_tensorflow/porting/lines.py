"""The lines of code that give a layer's attribute another value, for the differences in a report. Called by `walk`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import keras

from polyamp.porting.layouts.forms import Form
from polyamp_tensorflow.models.layers import modules, only_contains

Line = Callable[[Any], str]
_AS_THEY_ARE: Final = {
    "epsilon": "epsilon",
    "momentum": "momentum",
    "rate": "rate",
    "dropout": "dropout",
    "recurrent_dropout": "recurrent_dropout",
    "negative_slope": "negative_slope",
    "alpha": "alpha",
    "axis": "axis",
}
"""Canonical attribute -> the Keras layer's of the same meaning."""
_AT: Final = "  # at "
_SEQUENCES: Final = {"strides": "strides", "dilation": "dilation_rate", "window": "pool_size", "size": "size"}
_CODE: Final = {
    "gelu_tanh": "lambda x: keras.activations.gelu(x, approximate=True)",
    "quick_gelu": "lambda x: x * keras.ops.sigmoid(1.702 * x)",
    "relu_squared": "lambda x: keras.ops.square(keras.ops.relu(x))",
}
"""Activation -> the code of one that `keras.activations` has no name for."""


def lines_of(layer: Any, form: Form, place: str) -> dict[str, Line]:
    """Attribute -> the line that gives it a canonical value.

    Args:
        layer: the Keras layer that has them.
        form: what was read of it.
        place: the code that reaches the layer, "model.get_layer('norm')", or of one that no line reaches what
            `spelled` says.
    """
    found: dict[str, Line] = {}
    place, unreached, path = place.partition(_AT)
    if unreached:
        place = "layer"
    for name in form.attributes:
        if name in _AS_THEY_ARE and name in vars(layer):
            found[name] = _assigning(f"{place}.{_AS_THEY_ARE[name]}")
        elif name in _SEQUENCES and hasattr(layer, _SEQUENCES[name]):
            found[name] = _sequence(f"{place}.{_SEQUENCES[name]}")
        elif name in ("activation", "recurrent_activation") and hasattr(layer, name):
            found[name] = _activation(f"{place}.{name}")
        elif name == "padding" and hasattr(layer, "padding"):
            found[name] = _padding(place, transposed="Transpose" in type(layer).__name__)
    return {name: _commented(line, f"{_AT}{path}") for name, line in found.items()} if unreached else found


def _commented(line: Line, comment: str) -> Line:
    return lambda value: f"{line(value)}{comment}"


def _assigning(target: str) -> Line:
    return lambda value: f"{target} = {value!r}"


def _sequence(target: str) -> Line:
    return lambda value: f"{target} = {tuple(value)!r}"


def _activation(target: str) -> Line:
    return lambda value: f"{target} = {_CODE.get(value, f'keras.activations.get({value!r})')}"


def _padding(place: str, *, transposed: bool) -> Line:
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


def spelled(model: Any) -> dict[int, str]:
    """id of each layer -> the code that reaches it from `model`, or "model  # at" and its path."""
    found = {id(model): "model"}
    for module in modules(model):
        place = found.get(id(module.layer), "model")
        for inner, code in _reached(module.layer):
            found.setdefault(id(inner), f"{place}{code}")
    return {**{id(module.layer): f"model{_AT}{module.path}" for module in modules(model)}, **found}


def _reached(layer: Any) -> Iterator[tuple[Any, str]]:
    """The layers that a layer holds, and what is written behind its own name to reach each."""
    if only_contains(layer):
        for inner in layer.layers:
            yield inner, f".get_layer({inner.name!r})"
        return
    for name, value in vars(layer).items():
        if name.startswith("_"):
            continue
        yield from _in(value, f".{name}")
    for name in ("query_dense", "key_dense", "value_dense", "output_dense"):
        if isinstance(inner := getattr(layer, name, None), keras.Layer):
            yield inner, f".{name}"


def _in(value: Any, code: str) -> Iterator[tuple[Any, str]]:
    if isinstance(value, keras.Layer):
        yield value, code
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _in(item, f"{code}[{number}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _in(item, f"{code}[{key!r}]")
