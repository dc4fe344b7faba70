"""docs/explanation/why_three_frameworks_differ.md: Keras's defaults are those of its table."""

from __future__ import annotations

import keras

from tests.explanation import actual_defaults, stated_defaults


def test_the_defaults_are_keras_own() -> None:
    assert stated_defaults("tensorflow") == actual_defaults(
        {
            "epsilon of LayerNorm": (keras.layers.LayerNormalization, "epsilon"),
            "epsilon of BatchNorm": (keras.layers.BatchNormalization, "epsilon"),
            "momentum of BatchNorm": (keras.layers.BatchNormalization, "momentum"),
            "epsilon of GroupNorm": (keras.layers.GroupNormalization, "epsilon"),
            "epsilon of Adam": (keras.optimizers.Adam, "epsilon"),
            "decay of AdamW": (keras.optimizers.AdamW, "weight_decay"),
            "smoothing of RMSprop": (keras.optimizers.RMSprop, "rho"),
            "slope of the leaky ReLU": (keras.layers.LeakyReLU, "negative_slope"),
            "GELU by tanh": (keras.activations.gelu, "approximate"),
            "initial loss scale": (keras.optimizers.LossScaleOptimizer, "initial_scale"),
        }
    )
