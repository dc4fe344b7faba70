"""Activations by their canonical names: formulas in NumPy, and the name of a function by its values.

A check uses the formulas to compare outputs after the activation, if only one framework's layer includes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from polyamp.porting.layouts.lazy_array import Array

PROBE_POINTS: Final = np.linspace(-7.3, 7.1, 13, dtype=np.float32)
"""Inputs at which an unknown function is compared with the formulas."""
_ABSOLUTE_TOLERANCE: Final = 1e-6


def apply_activation(name: str, array: Array) -> Array | None:
    """Apply an activation to an array; return None if the activation is not implemented here.

    Args:
        name: canonical name, as in the table of kinds.
        array: any shape.

    Example:
        >>> import numpy as np
        >>> apply_activation("relu", np.array([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """
    function = _FORMULAS.get(name)
    return None if function is None else function(np.asarray(array, np.float64))


def identify_activation(function: Callable[[Array], Any]) -> dict[str, Any]:
    """Return the attributes of the activation that has the same values as a function; empty if there is none.

    Example:
        >>> identify_activation(lambda x: np.where(x > 0, x, 0.2 * x))
        {'activation': 'leaky_relu', 'negative_slope': 0.2}
    """
    try:
        values = np.asarray(function(PROBE_POINTS))
    except Exception:  # noqa: BLE001  # a user's function may need other arguments; it has no name then
        return {}
    if values.shape != PROBE_POINTS.shape:
        return {}
    for name, formula in {**_FORMULAS, **_SOFTMAXES}.items():
        if np.allclose(values, formula(PROBE_POINTS.astype(np.float64)), 1e-5, _ABSOLUTE_TOLERANCE):
            return {"activation": name}
    positive = PROBE_POINTS > 0
    if not np.allclose(values[positive], PROBE_POINTS[positive], 1e-5, _ABSOLUTE_TOLERANCE):
        return {}
    below = PROBE_POINTS[~positive]
    for name, constant, unit in (("leaky_relu", "negative_slope", below), ("elu", "alpha", np.expm1(below))):
        factors = values[~positive] / unit
        if np.allclose(factors, factors[0], 1e-4, _ABSOLUTE_TOLERANCE):
            return {"activation": name, constant: float(f"{factors[0]:.6g}")}
    return {}


def _sigmoid(x: Array) -> Array:
    found: Array = 0.5 * (1.0 + np.tanh(0.5 * x))
    return found


def _softplus(x: Array) -> Array:
    found: Array = np.logaddexp(x, 0.0)
    return found


def _gelu(x: Array) -> Array:
    erf = np.fromiter((math.erf(each) for each in x.ravel() / math.sqrt(2.0)), np.float64, x.size)
    found: Array = 0.5 * x * (1.0 + erf.reshape(x.shape))
    return found


def _gelu_tanh(x: Array) -> Array:
    found: Array = 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return found


def _hard_sigmoid(x: Array) -> Array:
    return np.clip(x + 3.0, 0.0, 6.0) / 6.0


def _selu(x: Array) -> Array:
    found: Array = 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0.0)))
    return found


_FORMULAS: Final[Mapping[str, Callable[[Array], Array]]] = {
    "linear": lambda x: x,
    "relu": lambda x: np.maximum(x, 0.0),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu6": lambda x: np.clip(x, 0.0, 6.0),
    "relu_squared": lambda x: np.maximum(x, 0.0) ** 2,
    "hard_sigmoid": _hard_sigmoid,
    "hard_silu": lambda x: x * _hard_sigmoid(x),
    "selu": _selu,
    "softplus": _softplus,
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "soft_sign": lambda x: x / (1.0 + np.abs(x)),
}
"""Activations without constants and axes."""
ACTIVATION_NAMES: Final = tuple(_FORMULAS)
"""Names of the activations without constants and axes."""
_SOFTMAXES: Final[Mapping[str, Callable[[Array], Array]]] = {
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(),
    "log_softmax": lambda x: x - np.log(np.exp(x).sum()),
}
"""Softmaxes of the probe points, which have one axis."""
