"""Canonical names and attributes of JAX's activation functions, and of custom functions by their values."""

from __future__ import annotations

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp.porting.layouts.activations import identify_activation
from polyamp.porting.layouts.layer_layout import Form

ACTIVATION_NAMES: Final = {
    jax.nn.relu: "relu",
    jax.nn.relu6: "relu6",
    jax.nn.sigmoid: "sigmoid",
    jnp.tanh: "tanh",
    jax.nn.tanh: "tanh",
    jax.nn.silu: "silu",
    jax.nn.swish: "silu",
    jax.nn.elu: "elu",
    jax.nn.selu: "selu",
    jax.nn.softplus: "softplus",
    jax.nn.softmax: "softmax",
    jax.nn.log_softmax: "log_softmax",
    jax.nn.gelu: "gelu_tanh",  # approximate=True is JAX's default
    jax.nn.leaky_relu: "leaky_relu",
    jax.nn.hard_sigmoid: "hard_sigmoid",
    jax.nn.hard_silu: "hard_silu",
    jax.nn.mish: "mish",
}


def activation_form(function: Any) -> Form | None:
    """Return the form of an activation function; None for any other object.

    >>> import functools, jax
    >>> activation_form(functools.partial(jax.nn.gelu, approximate=False)).attributes
    {'activation': 'gelu'}
    """
    given: dict[str, Any] = {}
    if isinstance(function, functools.partial) and not function.args:
        given, function = dict(function.keywords), function.func
    try:
        name = ACTIVATION_NAMES.get(function)
    except TypeError:  # not hashable
        return None
    if name is None:
        return None
    attributes: dict[str, Any] = {"activation": name}
    if name == "gelu_tanh":
        attributes["activation"] = "gelu_tanh" if given.pop("approximate", True) else "gelu"
    elif name == "leaky_relu":
        attributes["negative_slope"] = float(given.pop("negative_slope", 0.01))
    elif name == "elu":
        attributes["alpha"] = float(given.pop("alpha", 1.0))
    elif name in ("softmax", "log_softmax"):
        attributes["axis"] = given.pop("axis", -1)
    return None if given else Form("activation", (), attributes)


def activation_attributes(function: Any) -> dict[str, Any]:
    """Return the attributes of an activation; empty if it has no canonical name.

    A custom function is identified by its values at a few points.

    >>> import jax
    >>> activation_attributes(jax.nn.gelu)
    {'activation': 'gelu_tanh'}
    >>> activation_attributes(lambda x: jax.nn.leaky_relu(x, 0.2))
    {'activation': 'leaky_relu', 'negative_slope': 0.2}
    """
    form = activation_form(function)
    return dict(form.attributes) if form is not None else identify_activation(lambda x: function(jnp.asarray(x)))
