"""Canonical names of Keras activations, both `activation=` arguments and activation layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import keras
import numpy as np

from polyamp.porting.layouts.layer_layout import Form
from polyamp_tensorflow.compat import is_keras_code
from polyamp_tensorflow.porting.layers.layer_record import UNKNOWN, LayerRecord, plain_form

_PROBE_POINTS: Final = np.array([-4.0, -2.5, -1.0, -0.3, 0.0, 0.2, 1.5, 3.5, 7.0], np.float32)
_FORMULAS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "linear": lambda x: x,
    "relu": keras.activations.relu,
    "gelu": keras.activations.gelu,
    "gelu_tanh": lambda x: keras.activations.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * keras.ops.sigmoid(1.702 * x),
    "silu": keras.activations.silu,
    "relu6": keras.activations.relu6,
    "relu_squared": lambda x: keras.ops.square(keras.ops.relu(x)),
    "tanh": keras.activations.tanh,
    "sigmoid": keras.activations.sigmoid,
    "hard_sigmoid": keras.activations.hard_sigmoid,
    "hard_silu": keras.activations.hard_silu,
    "elu": keras.activations.elu,
    "selu": keras.activations.selu,
    "softplus": keras.activations.softplus,
    "mish": keras.activations.mish,
}
"""Canonical name -> formula. A function without a known name is compared with these at a few points."""
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
    return _match_by_values(activation)


def activation_attributes(activation: Any) -> dict[str, Any]:
    """Return the attributes of a layer with this activation: its name, and its slope or alpha if it has one.

    >>> activation_attributes(keras.activations.leaky_relu)
    {'activation': 'leaky_relu', 'negative_slope': 0.2}
    """
    if isinstance(activation, keras.Layer) and (read := activation_form(activation)) is not None:
        return dict(read.attributes)
    said = {"activation": activation_name(activation)}
    constant = {"leaky_relu": "negative_slope", "elu": "alpha"}.get(str(said["activation"]))
    values = _probe_values(activation) if constant is not None else None
    if constant is None or values is None:
        return said
    factor = values[2] / (_PROBE_POINTS[2] if constant == "negative_slope" else math.expm1(_PROBE_POINTS[2]))
    return {**said, constant: round(float(factor), 6)}


def _match_by_values(activation: Any) -> Any:
    """Return the name of the formula with the same values at a few points."""
    values = _probe_values(activation)
    if values is None or values.shape != _PROBE_POINTS.shape:
        return UNKNOWN
    for name, formula in _FORMULAS.items():
        if np.allclose(values, _probe_values(formula), rtol=1e-6, atol=1e-6):
            return name
    slopes = values[_PROBE_POINTS < 0] / _PROBE_POINTS[_PROBE_POINTS < 0]
    straight = np.allclose(values[_PROBE_POINTS >= 0], _PROBE_POINTS[_PROBE_POINTS >= 0]) and np.allclose(
        slopes, slopes[0]
    )
    return "leaky_relu" if straight else UNKNOWN


def _probe_values(activation: Any) -> Any:
    """Return a function's values at a few points; None if it cannot be called with them."""
    try:
        return np.asarray(keras.ops.convert_to_numpy(activation(keras.ops.convert_to_tensor(_PROBE_POINTS))))
    except Exception:  # noqa: BLE001  # a user's function may need other arguments; nothing is compared then
        return None


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
