"""docs/explanation/why_three_frameworks_differ.md: the defaults of flax, optax and jax.nn are those of its table."""

from __future__ import annotations

import flax.linen as nn
import jax
import optax
from flax.training.dynamic_scale import DynamicScale

from tests.explanation import actual_defaults, stated_defaults


def test_the_defaults_are_those_of_the_libraries() -> None:
    assert stated_defaults("jax") == actual_defaults(
        {
            "epsilon of LayerNorm": (nn.LayerNorm, "epsilon"),
            "epsilon of BatchNorm": (nn.BatchNorm, "epsilon"),
            "momentum of BatchNorm": (nn.BatchNorm, "momentum"),
            "epsilon of GroupNorm": (nn.GroupNorm, "epsilon"),
            "epsilon of Adam": (optax.adam, "eps"),
            "decay of AdamW": (optax.adamw, "weight_decay"),
            "smoothing of RMSprop": (optax.rmsprop, "decay"),
            "slope of the leaky ReLU": (jax.nn.leaky_relu, "negative_slope"),
            "GELU by tanh": (jax.nn.gelu, "approximate"),
            "initial loss scale": (DynamicScale, "scale"),
        }
    )
