"""Activations in NumPy, by their canonical names.

A check uses them to compare outputs after the activation, if only one framework's layer includes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from polyamp.porting.layouts.lazy_array import Array


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
    function = _FUNCTIONS.get(name)
    return None if function is None else function(np.asarray(array, np.float64))


def _relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def _sigmoid(x: Array) -> Array:
    found: Array = 0.5 * (1.0 + np.tanh(0.5 * x))
    return found


def _tanh(x: Array) -> Array:
    return np.tanh(x)


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _gelu(x: Array) -> Array:
    erf = np.fromiter((math.erf(each) for each in x.ravel() / math.sqrt(2.0)), np.float64, x.size)
    found: Array = 0.5 * x * (1.0 + erf.reshape(x.shape))
    return found


def _gelu_tanh(x: Array) -> Array:
    found: Array = 0.5 * x * (1.0 + _tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return found


_FUNCTIONS: Final[Mapping[str, Callable[[Array], Array]]] = {
    "relu": _relu,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}
