"""What TensorFlow's errors become: a layer with operands of two dtypes is named, with the override that settles it."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import ModelError, ReplicaError
from polyamp_tensorflow.step import error_hints

X = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3)


class Sampling(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """The layer of Keras's own example of a variational autoencoder."""

    def call(self, z: Any) -> Any:
        return z + tf.random.normal(tf.shape(z))


def nested() -> Any:
    inputs = keras.Input((3,))
    z = Sampling(name="sampling")(keras.layers.Dense(2)(inputs))
    encoder = keras.Model(inputs, z, name="encoder")
    return keras.Sequential([keras.Input((3,)), encoder, keras.layers.Dense(1)])


def loss_fn(model: Any, batch: Any) -> Any:
    return tf.reduce_mean(model(batch["x"]) ** 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("compiled", [True, False])
def test_s20_a_layer_with_two_dtypes_is_named_and_its_override_settles_it(dtype: str, compiled: bool) -> None:
    recipe = polyamp.Recipe(policy=f"mixed_{dtype}", optimizer=polyamp.sgd(0.1))
    state = polyamp.init(nested(), recipe)
    before = state.backend.export_state(state)
    with pytest.raises(ModelError, match=rf"layer 'encoder/sampling' \(Sampling\) .*of {dtype} and float32") as caught:
        polyamp.train_step(loss_fn, recipe, compile=compiled)(state, {"x": X})
    after = state.backend.export_state(state)
    assert all(after[name].tobytes() == array.tobytes() for name, array in before.items())
    said = re.search(r"overrides=(\{.*?\})", str(caught.value))
    assert said is not None
    settled = recipe.replace(policy=polyamp.Policy(f"mixed_{dtype}", overrides=eval(said[1])))
    state, result = polyamp.train_step(loss_fn, settled, compile=compiled)(polyamp.init(nested(), settled), {"x": X})
    assert np.isfinite(float(result.loss))


def test_an_error_of_the_models_own_stays_its_own() -> None:
    class Broken(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def call(self, x: Any) -> Any:
            raise ValueError("broken on purpose")

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    recipe = polyamp.Recipe(policy="mixed_bfloat16")
    state = polyamp.init(model, recipe)
    broken = Broken()
    with pytest.raises(ValueError, match="broken on purpose") as caught:
        polyamp.train_step(lambda model, batch: tf.reduce_sum(broken(model(batch["x"]))), recipe)(state, {"x": X})
    assert "{'x': float32[4, 3]}" in caught.value.__notes__[0]


def test_s32_the_worker_that_is_gone_is_named() -> None:
    """The words are TensorFlow 2.21's, of two workers of which the second was killed."""
    words = (
        "Graph execution error:\n\nCollective ops is aborted by: Error reported from /job:worker/task:1: The following "
        "tasks are unhealthy (stopped sending heartbeats):\n/job:worker/replica:0/task:1\nThe tasks have crashed.\nThe "
        "error could be from a previous operation. Restart your program to reset.\n [[{{node CollectiveReduceV2}}]]"
    )
    error = error_hints.explain_error(tf.errors.UnavailableError(None, None, words), [])
    assert isinstance(error, ReplicaError)
    assert str(error).startswith(
        "worker 1 ended, raised or was killed: a collective of this one was aborted (Error reported from "
        "/job:worker/task:1: The following tasks are unhealthy"
    )
