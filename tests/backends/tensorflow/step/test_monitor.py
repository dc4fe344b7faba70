"""A monitor names an embedding whose gradient underflows (S35)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import polyamp


def words() -> Any:
    """The mean of 4,096 embeddings: each row has a 4,096th of the gradient."""
    keras.utils.set_random_seed(0)
    bias = keras.initializers.Constant(0.3)
    embed = keras.layers.Embedding(
        4096, 8, embeddings_initializer=keras.initializers.RandomNormal(stddev=1.0), name="embed"
    )
    pool = keras.layers.GlobalAveragePooling1D()
    head = keras.layers.Dense(4, bias_initializer=bias, name="head")
    return keras.Sequential([keras.Input((4096,)), embed, pool, head])


def small_loss(model: Any, batch: Any) -> Any:
    return keras.ops.mean(keras.ops.square(model(batch))) * 2e-4


def test_s35_an_embedding_whose_gradient_underflows_is_named() -> None:
    """Below 2^-24 at a loss scale of 1, where the head's gradients are not."""
    lost = []
    for scale in (1.0, 2.0**16):
        scaler = polyamp.LossScaler.static(scale)
        recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1), scaler=scaler)
        monitor = polyamp.Monitor(every=1)
        step = polyamp.train_step(small_loss, recipe, monitor=monitor)
        step(polyamp.init(words(), recipe), np.arange(4096)[None])
        found = {row.module: row.gradients for row in monitor.records[0].modules}
        lost.append({name: each.zero + each.underflow for name, each in found.items() if each is not None})
    assert lost[0]["embed"] > 0.9
    assert lost[0]["head"] < 0.2
    assert lost[1] == {"embed": 0.0, "head": 0.0}
