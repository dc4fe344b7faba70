"""Attributes of activations, also of custom functions such as `lambda x: jax.nn.gelu(x, approximate=False)`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from polyamp.porting.layouts.activations import identify_activation
from polyamp_jax.porting.layers.activations import activation_form


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
