"""Figures of layers' outputs in Keras: recomputation, recurrent layers, layers that are called twice (S35)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.monitor.records import OutputStats

RECIPE = polyamp.Recipe(
    policy="mixed_bfloat16", optimizer=polyamp.sgd(0.01), scaler=polyamp.LossScaler(init_scale=2.0**10)
)


SIZES = {"": 32, "simple_rnn": 32, "dense": 64}


class Shared(keras.Model):
    """A recurrent layer, and a dense one that is called twice, recomputed or not."""

    def __init__(self, *, remat: bool) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        self.sequence = keras.layers.SimpleRNN(4)
        self.dense = keras.layers.Dense(4)
        self.remat = remat

    def call(self, x: Any) -> Any:
        hidden = self.sequence(x)
        dense = tf.recompute_grad(lambda given: self.dense(given)) if self.remat and self.dense.built else self.dense
        return dense(dense(hidden))


def loss_fn(model: Any, batch: Any) -> Any:
    return tf.reduce_mean(tf.square(tf.cast(model(batch), tf.float32) - 1.0))


def recorded(model: Any, policy: str = "mixed_bfloat16", **options: Any) -> dict[str, OutputStats]:
    monitor = polyamp.Monitor(every=1, gradients=False, updates=False, activations=True)
    recipe = RECIPE.replace(policy=policy)
    step = polyamp.train_step(loss_fn, recipe, monitor=monitor, **options)
    step(polyamp.init(model, recipe), np.random.default_rng(0).normal(size=(8, 3, 2)).astype(np.float32))
    return {each.module: each.activations for each in monitor.records[0].modules if each.activations is not None}


def test_s35_calls_are_counted_once_in_compiled_eager_and_recomputed_passes() -> None:
    plain = recorded(Shared(remat=False))
    assert {path: stats.elements for path, stats in plain.items()} == SIZES
    for remat, options in ((False, {"compile": False}), (True, {"policy": "float32"})):
        found = recorded(Shared(remat=remat), **options)
        assert {path: stats.elements for path, stats in found.items()} == SIZES
        for path, stats in found.items():
            assert stats.rms == pytest.approx(plain[path].rms, rel=2e-2), (remat, path)
