"""A Keras model goes into another one, with the check."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import polyamp
from polyamp.errors import PortError


def network(seed: int, *, epsilon: float = 1e-3, slope: float = 0.2) -> Any:
    keras.utils.set_random_seed(seed)
    stack = [
        *(
            layers.Conv2D(4, 3, padding="same", activation="gelu"),
            layers.BatchNormalization(epsilon=epsilon, name="norm"),
        ),
        *(layers.MaxPooling2D(3, 2, padding="same"), layers.LeakyReLU(slope, name="leaky"), layers.AveragePooling2D(2)),
        *(layers.Flatten(), layers.Dense(7), layers.Dropout(0.3)),
    ]
    return keras.Sequential([keras.Input((16, 16, 3)), *stack])


def test_a_model_is_ported_and_checked() -> None:
    source, target = network(0), network(1)
    x = np.random.default_rng(0).standard_normal((2, 16, 16, 3)).astype(np.float32)
    ported, report = polyamp.port(source, target, check=x)
    assert ported is target
    np.testing.assert_array_equal(source(x, training=False), target(x, training=False))
    assert report.differences == []
    assert report.checked.outputs == 0.0
    assert report.checked.gradients.keys() >= {"conv2d/kernel", "dense/bias"}


def test_differences_are_said_with_the_line_that_ends_them() -> None:
    source, target = network(0), network(1, epsilon=1e-5, slope=0.01)
    before = [weight.value.numpy() for weight in target.weights]
    x = np.random.default_rng(0).standard_normal((2, 16, 16, 3)).astype(np.float32)
    with pytest.raises(PortError, match="check: the outputs differ by"):
        polyamp.port(source, target, check=x)
    for weight, values in zip(target.weights, before, strict=True):
        np.testing.assert_array_equal(weight.value.numpy(), values)
    _, report = polyamp.port(source, target)
    assert [difference.line for difference in report.differences] == [
        "model.get_layer('norm').epsilon = 0.001",
        "model.get_layer('leaky').negative_slope = 0.2",
    ]


def test_s30_a_tied_table_into_an_untied_one_passes_the_check() -> None:
    class Model(keras.Model):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.tokens = layers.ReversibleEmbedding(7, 4, tie_weights=tied, name="tokens")
            self.body = layers.Dense(4, activation="tanh", name="body")

        def call(self, tokens: Any) -> Any:
            return self.tokens(self.body(self.tokens(tokens)), reverse=True)

    tokens = np.random.default_rng(0).integers(0, 7, (3, 5)).astype(np.int32)
    source, target = Model(tied=True), Model(tied=False)
    source(tokens)
    target(tokens)
    _, report = polyamp.port(source, target, check=tokens)
    assert report.checked.gradients["tokens/table"] < 1e-5
    assert any("where both are one array" in note for note in report.notes)
