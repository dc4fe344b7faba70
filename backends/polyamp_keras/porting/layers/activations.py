"""Canonical names of Keras activations, both `activation=` arguments and activation layers."""

from __future__ import annotations

import functools
from typing import Any, Final

import keras

from polyamp.porting.layouts.activations import identify_activation
from polyamp.porting.layouts.layer_layout import Form
from polyamp_keras.compat import is_keras_code
from polyamp_keras.porting.layers.layer_record import UNKNOWN, LayerRecord, plain_form

_ALIASES: Final = {"softsign": "soft_sign"}
"""Keras's name -> the name in torch and JAX."""


def activation_name(activation: Any) -> Any:
    """Return the canonical name of a Keras layer's activation; `UNKNOWN` if no name fits.

    >>> activation_name(None), activation_name(keras.activations.gelu)
    ('linear', 'gelu')
    >>> activation_name(lambda x: keras.activations.gelu(x, approximate=True))
    'gelu_tanh'
    """
    if activation is None:
        return "linear"
    if isinstance(activation, keras.Layer):
        read = activation_form(activation)
        return read.attributes.get("activation", UNKNOWN) if read is not None else UNKNOWN
    if isinstance(activation, functools.partial) and activation.func is keras.activations.gelu:
        return "gelu_tanh" if activation.keywords.get("approximate") else "gelu"
    name = getattr(activation, "__name__", "")
    if name and is_keras_code(activation) and getattr(keras.activations, name, None) is activation:
        return _ALIASES.get(name, name)
    return _identify(activation).get("activation", UNKNOWN)


def activation_attributes(activation: Any) -> dict[str, Any]:
    """Return the attributes of a layer with this activation: its name, and its slope or alpha if it has one.

    >>> activation_attributes(keras.activations.leaky_relu)
    {'activation': 'leaky_relu', 'negative_slope': 0.2}
    """
    if isinstance(activation, keras.Layer) and (read := activation_form(activation)) is not None:
        return dict(read.attributes)
    name = activation_name(activation)
    return {"activation": name, **(_identify(activation) if name in ("leaky_relu", "elu") else {})}


def _identify(activation: Any) -> dict[str, Any]:
    return identify_activation(lambda x: keras.ops.convert_to_numpy(activation(keras.ops.convert_to_tensor(x))))


def activation_form(layer: Any) -> Form | None:
    """Return the form of an activation layer without arrays; None for other layers."""
    if isinstance(layer, keras.layers.Activation):
        return plain_form("activation", (), activation=activation_name(layer.activation))
    if isinstance(layer, keras.layers.LeakyReLU):
        return plain_form("activation", (), activation="leaky_relu", negative_slope=float(layer.negative_slope))
    if isinstance(layer, keras.layers.ELU):
        return plain_form("activation", (), activation="elu", alpha=float(layer.alpha))
    if isinstance(layer, keras.layers.Softmax):
        axis = layer.axis
        return plain_form("activation", (), activation="softmax", axis=axis[0] if _is_single_axis(axis) else axis)
    if isinstance(layer, keras.layers.ReLU):
        return _relu_form(layer)
    return None


def read_activation(layer: Any) -> list[LayerRecord]:
    """Read an activation layer; [] for a linear activation."""
    found = activation_form(layer)
    return [] if found is None or found.attributes.get("activation") == "linear" else [LayerRecord(found)]


def _is_single_axis(axis: Any) -> bool:
    return isinstance(axis, list | tuple) and len(axis) == 1


def _relu_form(layer: Any) -> Form:
    top, slope, threshold = layer.max_value, float(layer.negative_slope), float(layer.threshold)
    if threshold or (top is not None and (slope or top != 6.0)):
        said = f"relu(max_value={top}, negative_slope={slope:g}, threshold={threshold:g})"
        return plain_form("activation", (), activation=said)
    if top is not None:
        return plain_form("activation", (), activation="relu6")
    if slope:
        return plain_form("activation", (), activation="leaky_relu", negative_slope=slope)
    return plain_form("activation", (), activation="relu")
