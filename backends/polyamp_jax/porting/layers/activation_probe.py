"""Detection of custom activation functions by their values, such as `lambda x: jax.nn.gelu(x, approximate=False)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp_jax.porting.layers.activations import ACTIVATION_NAMES, activation_form

_PROBE_POINTS: Final = np.linspace(-7.3, 7.1, 13, dtype=np.float32)


def activation_attributes(function: Any) -> dict[str, Any]:
    """Return the attributes of an activation; empty if it has no canonical name.

    A custom function is identified by its values at a few points.

    >>> activation_attributes(jax.nn.gelu)
    {'activation': 'gelu_tanh'}
    >>> activation_attributes(lambda x: jax.nn.leaky_relu(x, 0.2))
    {'activation': 'leaky_relu', 'negative_slope': 0.2}
    """
    form = activation_form(function)
    if form is not None:
        return dict(form.attributes)
    made = _probe_values(function)
    if made is None:
        return {}
    for name, values in _known_values().items():
        if np.allclose(made, values, 1e-5, 1e-6):
            slope = {"negative_slope": 0.01} if name == "leaky_relu" else {}
            alpha = {"alpha": 1.0} if name == "elu" else {}
            return {"activation": name, **slope, **alpha}
    return _parametric_attributes(made)


def _parametric_attributes(made: Any) -> dict[str, Any]:
    positive = _PROBE_POINTS > 0
    if not np.allclose(made[positive], _PROBE_POINTS[positive], 1e-5, 1e-6):
        return {}
    slopes = made[~positive] / _PROBE_POINTS[~positive]
    if np.allclose(slopes, slopes[0], 1e-5, 1e-6):
        return {"activation": "leaky_relu", "negative_slope": _round_constant(slopes[0])}
    alphas = made[~positive] / np.expm1(_PROBE_POINTS[~positive])
    if np.allclose(alphas, alphas[0], 1e-4, 1e-6):
        return {"activation": "elu", "alpha": _round_constant(alphas[0])}
    return {}


def _round_constant(number: Any) -> float:
    return float(f"{number:.6g}")


@functools.cache
def _known_values() -> Mapping[str, Any]:
    functions: dict[str, Callable[[Any], Any]] = {
        **{name: function for function, name in ACTIVATION_NAMES.items()},
        "linear": lambda x: x,
    }
    functions["gelu"] = functools.partial(jax.nn.gelu, approximate=False)
    return {name: np.asarray(function(jnp.asarray(_PROBE_POINTS))) for name, function in functions.items()}


def _probe_values(function: Any) -> Any:
    try:
        made = np.asarray(function(jnp.asarray(_PROBE_POINTS)))
    except Exception:  # noqa: BLE001  # a custom function with other arguments has no name
        return None
    return made if made.shape == _PROBE_POINTS.shape else None
