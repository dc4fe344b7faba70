"""The name of an activation function that a user wrote: `lambda x: jax.nn.gelu(x, approximate=False)`. Called by the
libraries whose modules keep functions as fields."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp_jax.porting.activations import NAMES, activation

_PROBE: Final = np.linspace(-7.3, 7.1, 13, dtype=np.float32)


def attributes(function: Any) -> dict[str, Any]:
    """The attributes of an activation; empty where it is none that has a name.

    A function of the user's own is known by what it makes of a few numbers.

    >>> attributes(jax.nn.gelu)
    {'activation': 'gelu_tanh'}
    >>> attributes(lambda x: jax.nn.leaky_relu(x, 0.2))
    {'activation': 'leaky_relu', 'negative_slope': 0.2}
    """
    form = activation(function)
    if form is not None:
        return dict(form.attributes)
    made = _made(function)
    if made is None:
        return {}
    for name, values in _known().items():
        if np.allclose(made, values, 1e-5, 1e-6):
            slope = {"negative_slope": 0.01} if name == "leaky_relu" else {}
            alpha = {"alpha": 1.0} if name == "elu" else {}
            return {"activation": name, **slope, **alpha}
    return _with_constant(made)


def _with_constant(made: Any) -> dict[str, Any]:
    positive = _PROBE > 0
    if not np.allclose(made[positive], _PROBE[positive], 1e-5, 1e-6):
        return {}
    slopes = made[~positive] / _PROBE[~positive]
    if np.allclose(slopes, slopes[0], 1e-5, 1e-6):
        return {"activation": "leaky_relu", "negative_slope": _short(slopes[0])}
    alphas = made[~positive] / np.expm1(_PROBE[~positive])
    if np.allclose(alphas, alphas[0], 1e-4, 1e-6):
        return {"activation": "elu", "alpha": _short(alphas[0])}
    return {}


def _short(number: Any) -> float:
    return float(f"{number:.6g}")


@functools.cache
def _known() -> Mapping[str, Any]:
    functions: dict[str, Callable[[Any], Any]] = {
        **{name: function for function, name in NAMES.items()},
        "linear": lambda x: x,
    }
    functions["gelu"] = functools.partial(jax.nn.gelu, approximate=False)
    return {name: np.asarray(function(jnp.asarray(_PROBE))) for name, function in functions.items()}


def _made(function: Any) -> Any:
    try:
        made = np.asarray(function(jnp.asarray(_PROBE)))
    except Exception:  # noqa: BLE001  # the user's own function, which takes something else: it has then no name
        return None
    return made if made.shape == _PROBE.shape else None
