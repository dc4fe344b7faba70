"""`polyamp.find_nonfinite` of Keras models, on every Keras backend."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

import polyamp

X = 0.1 * np.random.default_rng(0).standard_normal((16, 32), np.float32)


def test_the_first_value_that_is_not_finite_is_found_at_its_layer() -> None:
    large = layers.Lambda(lambda x: x * 1e30, name="large")
    model = keras.Sequential([keras.Input((32,)), layers.Dense(3, name="first"), large, layers.Dense(2, name="last")])
    found = polyamp.find_nonfinite(lambda model, x: keras.ops.mean(model(x)), "mixed_float16", model, X)
    assert str(found).startswith("The first value that is not finite arises in the forward pass, in large.")
    assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}
