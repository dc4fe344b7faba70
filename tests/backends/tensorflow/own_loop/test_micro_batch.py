"""`LossScaleOptimizer.micro_batch`: micro-batches of a loop of one's own, and of `fit`, by their rows (S8)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp_tensorflow import LossScaleOptimizer

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 2)).astype(np.float32)


def make_model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(2)])


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("sizes", [(1, 7), (5, 3), (2, 1, 5)], ids=str)
def test_s08_micro_batches_by_hand_count_by_their_rows_and_none_overflows(sizes: Any, built: bool) -> None:
    """Whichever is the largest, and where the first call builds the optimizer: no scaled loss is above loss * scale."""
    found = []
    for lengths in (sizes, (sum(sizes),)):
        model = make_model()
        scaler = polyamp.LossScaler(init_scale=64.0)
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), scaler, accumulate_steps=len(lengths))
        if built:
            optimizer.build(model.trainable_variables)
        for _ in range(2):
            for end, length in zip(np.cumsum(lengths), lengths, strict=True):
                with optimizer.micro_batch(length):
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_mean((model(X[end - length : end]) - Y[end - length : end]) ** 2)
                        scaled = optimizer.scale_loss(loss)
                    assert float(scaled) <= float(loss) * 64.0 * (1 + 1e-6)
                    optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        assert int(optimizer.iterations) == 2
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
