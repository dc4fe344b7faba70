"""What `watch` shows is what a GradientTape gives by hand, and it leaves nothing behind."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import polyamp
from polyamp_keras.models.variables import model_variables
from polyamp_tensorflow.arrays import to_numpy
from polyamp_tensorflow.backend import BACKEND
from polyamp_tensorflow.observe.observer import OBSERVER

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((8, 6)).astype("f4"), RNG.integers(0, 3, 8)


class Seen:
    """What `see` got."""

    def __init__(self) -> None:
        self.order: list[tuple[str, str]] = []
        self.arrays: dict[tuple[str, str], Array] = {}
        self.dtypes: dict[tuple[str, str], str] = {}

    def __call__(self, path: str, what: str, array: Array, dtype: str) -> None:
        assert (path, what) not in self.arrays
        assert array.dtype in (np.float32, np.float64)
        self.order.append((path, what))
        self.arrays[path, what], self.dtypes[path, what] = np.array(array), dtype


def network() -> Any:
    keras.utils.set_random_seed(0)
    given = keras.Input((6,))
    hidden = layers.Dense(5, name="first")(given)
    hidden = layers.BatchNormalization(name="norm")(hidden)
    hidden = layers.Dropout(0.5, name="drop")(layers.ReLU(name="act")(hidden))
    return keras.Model(given, layers.Dense(3, name="head")(hidden))


def loss_of(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch[0]), batch[1])


def state_of(model: Any, policy: Any = "float32", **more: Any) -> Any:
    return polyamp.init(model, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1), **more))


def everything(model: Any) -> dict[str, Array]:
    return {name: to_numpy(variable) for role in model_variables(model) for name, variable in role.items()}


def same(before: dict[str, Array], after: dict[str, Array]) -> None:
    assert list(before) == list(after)
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)


def test_aux_beside_the_loss_changes_nothing() -> None:
    plain, seen = Seen(), Seen()
    expected = BACKEND.observer.capture_pass(state_of(network()), loss_of, (X, Y), plain)
    found = BACKEND.observer.capture_pass(
        state_of(network()), lambda m, batch: (loss_of(m, batch), {"rows": 8.0}), (X, Y), seen
    )
    assert found.loss == expected.loss
    assert seen.order == plain.order


def test_outputs_cotangents_and_gradients_are_those_of_a_tape() -> None:
    model, seen = network(), Seen()
    with OBSERVER.disable_dropout(model, None):
        found = BACKEND.observer.capture_pass(state_of(model), loss_of, (X, Y), seen)
    inner = ["first", "norm", "act", "drop", "head", ""]
    forward = [(path, what) for path in inner for what in ("input", "output") if (path, what) != ("", "input")]
    assert seen.order == forward + [(path, "cotangent") for path in inner[::-1]]
    for before, path in itertools.pairwise(inner[:-1]):
        np.testing.assert_array_equal(seen.arrays[path, "input"], seen.arrays[before, "output"])
    np.testing.assert_array_equal(seen.arrays["first", "input"], X)
    weights = {name: variable.value for name, variable in model_variables(model).parameters.items()}
    outputs: dict[str, Any] = {}
    with tf.GradientTape() as tape:
        value = tf.constant(X)
        for name in inner[:-1]:
            if name != "drop":
                value = model.get_layer(name)(value, **({"training": True} if name == "norm" else {}))
            outputs[name] = value = tf.identity(value)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.constant(Y), value))
    gradients = tape.gradient(loss, {"weights": weights, "outputs": outputs})
    np.testing.assert_allclose(found.loss, loss, rtol=1e-6)
    assert found.hidden_reason == ""
    assert list(found.gradients) == list(weights)
    for name, gradient in found.gradients.items():
        np.testing.assert_allclose(gradient, gradients["weights"][name], rtol=1e-5, atol=1e-7)
    for name, output in outputs.items():
        np.testing.assert_allclose(seen.arrays[name, "output"], output, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(seen.arrays[name, "cotangent"], gradients["outputs"][name], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(seen.arrays["", "output"], seen.arrays["head", "output"])


def test_the_loss_scale_is_not_in_cotangents_and_dtypes_are_those_of_the_policy() -> None:
    model, wide, narrow = network(), Seen(), Seen()
    with OBSERVER.disable_dropout(model, None):
        OBSERVER.capture_pass(state_of(model), loss_of, (X, Y), wide)
        scaler = polyamp.LossScaler(init_scale=1024.0)
        found = OBSERVER.capture_pass(state_of(model, "mixed_float16", scaler=scaler), loss_of, (X, Y), narrow)
    outputs = [narrow.dtypes[name, "output"] for name in ("first", "norm", "act", "")]
    assert outputs == ["float16", "float32", "float16", "float16"]
    assert narrow.dtypes["first", "cotangent"] == "float16"
    assert {array.dtype.name for array in narrow.arrays.values()} == {"float32"}
    for key, array in wide.arrays.items():
        np.testing.assert_allclose(narrow.arrays[key], array, rtol=0.05, atol=5e-3)
    assert {gradient.dtype.name for gradient in found.gradients.values() if gradient is not None} == {"float32"}


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_nothing_is_left_behind(policy: str) -> None:
    model = network()
    model(X, training=True)
    state = state_of(model, policy)
    before, attributes = everything(model), {layer.name: dict(vars(layer)) for layer in model.layers}
    first, second = Seen(), Seen()
    OBSERVER.capture_pass(state, loss_of, (X, Y), first)
    same(before, everything(model))
    assert attributes == {layer.name: dict(vars(layer)) for layer in model.layers}
    OBSERVER.capture_pass(state, loss_of, (X, Y), second)  # the same mask again
    for key, array in first.arrays.items():
        np.testing.assert_array_equal(second.arrays[key], array)
    assert not tf.config.functions_run_eagerly()
