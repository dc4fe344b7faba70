"""Operations that a user writes in a layer's own `call` follow their operands, and are recorded as such (S31)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import polyamp
from polyamp_tensorflow.observe.observer import OBSERVER

X = np.random.default_rng(0).standard_normal((6, 5, 8)).astype("f4")


class Pooled(keras.Model):  # type: ignore[misc]  # Keras is untyped
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = layers.Dense(16, name="up"), layers.Dense(3, name="head")

    def call(self, x: Any) -> Any:
        return self.head(tf.reduce_mean(self.up(x), 1))


def functional() -> Any:
    given = keras.Input((5, 8))
    return keras.Model(given, layers.Dense(3, name="head")(ops.mean(layers.Dense(16, name="up")(given), axis=1)))


def rules(model: Any) -> set[tuple[str, str]]:
    """Rule and dtype of the means in a model under bfloat16."""
    model(X)
    state = polyamp.init(model, polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1)))
    with OBSERVER.disable_dropout(model, None):
        found = OBSERVER.capture_pass(
            state, lambda bound, x: ops.sum(ops.cast(bound(x), "float32")), X, lambda *_: None
        )
    return {(row.rule, row.dtype) for row in found.operations if row.name == "Mean"}


def test_a_mean_in_a_models_own_call_follows_its_operand() -> None:
    assert rules(Pooled()) == {("follow", "bfloat16")}


def test_a_mean_between_layers_is_one_of_the_policys_sums() -> None:
    assert rules(functional()) == {("sums", "float32")}
