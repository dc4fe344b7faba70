"""Activations by their canonical names, given to a Keras layer as `activation=` or a layer themselves.

Called by the tables of forms and by `lines`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import keras
import numpy as np

from polyamp.porting.layouts.forms import Form
from polyamp_tensorflow.compat import is_kerass
from polyamp_tensorflow.porting.parts import UNKNOWN, Part, form

_POINTS: Final = np.array([-4.0, -2.5, -1.0, -0.3, 0.0, 0.2, 1.5, 3.5, 7.0], np.float32)
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
"""What a function without a known name is compared with, at a few points."""
_OTHERWISE: Final = {"softsign": "soft_sign"}
"""Keras's name -> the one that torch and JAX have."""


def name_of(activation: Any) -> Any:
    """The canonical name of what a Keras layer has as its activation; `UNKNOWN` of a function that is none of them.

    >>> name_of(None), name_of(keras.activations.gelu)
    ('linear', 'gelu')
    >>> name_of(lambda x: keras.activations.gelu(x, approximate=True))
    'gelu_tanh'
    """
    if activation is None:
        return "linear"
    if isinstance(activation, keras.Layer):
        read = form_of(activation)
        return read.attributes.get("activation", UNKNOWN) if read is not None else UNKNOWN
    if isinstance(activation, functools.partial) and activation.func is keras.activations.gelu:
        return "gelu_tanh" if activation.keywords.get("approximate") else "gelu"
    name = getattr(activation, "__name__", "")
    if name and is_kerass(activation) and getattr(keras.activations, name, None) is activation:
        return _OTHERWISE.get(name, name)
    return _by_values(activation)


def said_of(activation: Any) -> dict[str, Any]:
    """The attributes of a layer with this activation: its name, and the slope or the alpha that belong to it.

    >>> said_of(keras.activations.leaky_relu)
    {'activation': 'leaky_relu', 'negative_slope': 0.2}
    """
    if isinstance(activation, keras.Layer) and (read := form_of(activation)) is not None:
        return dict(read.attributes)
    said = {"activation": name_of(activation)}
    constant = {"leaky_relu": "negative_slope", "elu": "alpha"}.get(str(said["activation"]))
    values = _values(activation) if constant is not None else None
    if constant is None or values is None:
        return said
    factor = values[2] / (_POINTS[2] if constant == "negative_slope" else math.expm1(_POINTS[2]))
    return {**said, constant: round(float(factor), 6)}


def _by_values(activation: Any) -> Any:
    """The name of the formula that gives the same at a few points."""
    values = _values(activation)
    if values is None or values.shape != _POINTS.shape:
        return UNKNOWN
    for name, formula in _FORMULAS.items():
        if np.allclose(values, _values(formula), rtol=1e-6, atol=1e-6):
            return name
    slopes = values[_POINTS < 0] / _POINTS[_POINTS < 0]
    straight = np.allclose(values[_POINTS >= 0], _POINTS[_POINTS >= 0]) and np.allclose(slopes, slopes[0])
    return "leaky_relu" if straight else UNKNOWN


def _values(activation: Any) -> Any:
    """What a function gives at a few points; None if it cannot be called with them."""
    try:
        return np.asarray(keras.ops.convert_to_numpy(activation(keras.ops.convert_to_tensor(_POINTS))))
    except Exception:  # noqa: BLE001  # the user's function may want other arguments: then nothing is compared
        return None


def form_of(layer: Any) -> Form | None:
    """The form of a layer that is an activation without arrays; None of another one."""
    if isinstance(layer, keras.layers.Activation):
        return form("activation", (), activation=name_of(layer.activation))
    if isinstance(layer, keras.layers.LeakyReLU):
        return form("activation", (), activation="leaky_relu", negative_slope=float(layer.negative_slope))
    if isinstance(layer, keras.layers.ELU):
        return form("activation", (), activation="elu", alpha=float(layer.alpha))
    if isinstance(layer, keras.layers.Softmax):
        axis = layer.axis
        return form("activation", (), activation="softmax", axis=axis[0] if _one(axis) else axis)
    if isinstance(layer, keras.layers.ReLU):
        return _relu(layer)
    return None


def parts_of(layer: Any) -> list[Part]:
    """The one part of a layer that is an activation; none of one that changes nothing."""
    found = form_of(layer)
    return [] if found is None or found.attributes.get("activation") == "linear" else [Part(found)]


def _one(axis: Any) -> bool:
    return isinstance(axis, list | tuple) and len(axis) == 1


def _relu(layer: Any) -> Form:
    top, slope, threshold = layer.max_value, float(layer.negative_slope), float(layer.threshold)
    if threshold or (top is not None and (slope or top != 6.0)):
        said = f"relu(max_value={top}, negative_slope={slope:g}, threshold={threshold:g})"
        return form("activation", (), activation=said)
    if top is not None:
        return form("activation", (), activation="relu6")
    if slope:
        return form("activation", (), activation="leaky_relu", negative_slope=slope)
    return form("activation", (), activation="relu")
