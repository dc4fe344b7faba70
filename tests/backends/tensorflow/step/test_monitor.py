"""A monitor names an embedding whose gradient underflows (S35)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tests.fixtures.embedding_underflow import LOSS_FACTOR, ROWS, check_embedding_underflow


def words() -> Any:
    """The mean of 4,096 embeddings: each row has a 4,096th of the gradient."""
    keras.utils.set_random_seed(0)
    bias = keras.initializers.Constant(0.3)
    embed = keras.layers.Embedding(
        ROWS, 8, embeddings_initializer=keras.initializers.RandomNormal(stddev=1.0), name="embed"
    )
    pool = keras.layers.GlobalAveragePooling1D()
    head = keras.layers.Dense(4, bias_initializer=bias, name="head")
    return keras.Sequential([keras.Input((ROWS,)), embed, pool, head])


def small_loss(model: Any, batch: Any) -> Any:
    return keras.ops.mean(keras.ops.square(model(batch))) * LOSS_FACTOR


def test_s35_an_embedding_whose_gradient_underflows_is_named() -> None:
    check_embedding_underflow(words, small_loss, np.arange(ROWS)[None])
