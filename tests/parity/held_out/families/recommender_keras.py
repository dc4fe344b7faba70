"""A recommender as DLRM, in Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

DENSE, WIDTH, TABLES = 6, 8, (11, 17, 5)


def make() -> Any:
    given, categories = keras.Input((DENSE,)), keras.Input((3,), dtype="int32")
    dense = ops.log1p(given)
    x = layers.Dense(16, activation="relu", name="bottom1")(dense)
    x = layers.Dense(WIDTH, activation="relu", name="bottom2")(x)
    parts = [x]
    for number, size in enumerate(TABLES):
        parts.append(layers.Embedding(size, WIDTH, name=f"tables_{number}")(categories[:, number]))
    stacked = ops.stack(parts, axis=1)
    products = ops.matmul(stacked, ops.transpose(stacked, (0, 2, 1)))
    rows, columns = np.tril_indices(4, -1)
    pairs = ops.stack(
        [products[:, row, column] for row, column in zip(rows.tolist(), columns.tolist(), strict=True)], axis=1
    )
    y = ops.concatenate([x, pairs], axis=1)
    y = layers.Dense(16, activation="relu", name="top1")(y)
    y = layers.Dense(12, activation="relu", name="top2")(y)
    return keras.Model([given, categories], layers.Dense(1, name="top3")(y))


def loss_fn(model: Any, batch: Any) -> Any:
    logits = tf.cast(model([batch["dense"], batch["categories"]]), tf.float32)[:, 0]
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=batch["clicked"], logits=logits)
    return tf.reduce_mean(losses)
