"""An error raised while the graph runs: nothing of the step has happened."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from polyamp.conformance.problems import batch, recipe

BACKEND = polyamp_tensorflow.BACKEND


def out_of_range(outputs: Any, x: Any) -> Any:
    """The gradient of a gather does not wait for the gather."""
    return tf.reduce_mean(tf.gather(outputs, tf.cast(x[:, 0] > 50.0, tf.int32) * 7, axis=1))


def asserted(outputs: Any, x: Any) -> Any:
    """Nothing waits for an assertion."""
    tf.debugging.assert_less(tf.reduce_max(x), 50.0)
    return tf.reduce_mean(tf.square(outputs))


def asserted_inside(outputs: Any, x: Any) -> Any:
    """In a function of its own."""
    tf.function(lambda: asserted(outputs, x), autograph=False)()
    return tf.reduce_mean(tf.square(outputs))


def aux_out_of_range(outputs: Any, x: Any) -> Any:
    return tf.reduce_mean(tf.square(outputs)), out_of_range(outputs, x)


@pytest.mark.parametrize(("accumulate_steps", "scaler"), [(1, "off"), (2, None)])
@pytest.mark.parametrize("fails", [out_of_range, asserted, asserted_inside, aux_out_of_range])
def test_an_error_of_the_graph_is_not_half_a_step(fails: Any, accumulate_steps: int, scaler: Any) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    made = recipe(optimizer=polyamp.sgd(0.1, momentum=0.9), accumulate_steps=accumulate_steps, scaler=scaler)
    state = polyamp.init(model, made)
    step = polyamp.train_step(lambda model, item: fails(model(item["x"]), item["x"]), made)
    step(state, batch())
    before = BACKEND.export_state(state)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(state, {**batch(), "x": np.full((8, 4), 99.0, np.float32)})
    assert [n for n, value in BACKEND.export_state(state).items() if not np.array_equal(value, before[n])] == []
    _, result = step(state, batch())
    assert int(result.step) == 2
