"""Dropout passes its input on, or takes the numbers that it is given: where layers run, and where a step is traced."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import polyamp
from polyamp_tensorflow.observe.observer import OBSERVER

Array = np.ndarray[Any, Any]
X = np.random.default_rng(0).standard_normal((4, 3, 6)).astype("f4")


def draws_from(seed: int, shapes: list[tuple[int, ...]]) -> Any:
    rng = np.random.default_rng(seed)

    def draws(shape: tuple[int, ...]) -> Array:
        shapes.append(shape)
        return rng.random(shape, np.float32)

    return draws


DROPPING = {
    "Dropout": lambda: layers.Dropout(0.5),
    "noise_shape": lambda: layers.Dropout(0.5, noise_shape=(None, 1, None)),
    "SpatialDropout1D": lambda: layers.SpatialDropout1D(0.5),
    "GaussianDropout": lambda: layers.GaussianDropout(0.5),
    "GaussianNoise": lambda: layers.GaussianNoise(0.5),
    "AlphaDropout": lambda: layers.AlphaDropout(0.5),
    "recurrent": lambda: layers.LSTM(5, dropout=0.5, recurrent_dropout=0.5),
    "attention": lambda: layers.MultiHeadAttention(2, 4, dropout=0.5),
}


def called(layer: Any, **options: Any) -> Array:
    keras.utils.set_random_seed(0)
    inputs = (X, X) if isinstance(layer, layers.MultiHeadAttention) else (X,)
    return np.asarray(layer(*inputs, **options))


@pytest.mark.parametrize("kind", DROPPING)
def test_without_draws_inputs_are_passed_on(kind: str) -> None:
    layer = DROPPING[kind]()
    plain = called(layer, training=False)
    with OBSERVER.disable_dropout(layer, None) as count:
        np.testing.assert_array_equal(called(layer, training=False), plain)
        assert count.calls == (None if kind == "recurrent" else 0)
        np.testing.assert_array_equal(called(layer, training=True), plain)
        assert count.calls == (None if kind == "recurrent" else 1)
    assert (called(layer, training=True) != plain).any()
    assert "call" not in vars(layer)


@pytest.mark.parametrize(("kind", "asked"), [("Dropout", (4, 3, 6)), ("noise_shape", (4, 1, 6))])
def test_a_mask_is_what_is_at_least_the_rate(kind: str, asked: tuple[int, ...]) -> None:
    layer = DROPPING[kind]()
    called(layer)
    shapes: list[tuple[int, ...]] = []
    with OBSERVER.disable_dropout(layer, draws_from(1, shapes)):
        given = called(layer, training=True)
    mask = np.random.default_rng(1).random(asked, np.float32) >= 0.5
    np.testing.assert_array_equal(given, X * mask * 2)
    assert shapes == [asked]


def test_functions_of_keras_and_tensorflow_take_the_draws_in_their_order() -> None:
    shapes: list[tuple[int, ...]] = []
    ones = tf.ones((2, 3), tf.bfloat16)
    with OBSERVER.disable_dropout(layers.Dropout(0.5), draws_from(1, shapes)):
        found = [
            tf.nn.dropout(ones, 0.25),
            keras.random.dropout(ones, 0.25),
            keras.random.uniform((2, 3), 1.0, 3.0),
            tf.random.uniform((2, 3), minval=-2, maxval=10, dtype=tf.int32),
            keras.random.normal((2, 3), mean=1.0, stddev=2.0),
            keras.random.truncated_normal((500,)),
        ]
    assert shapes == [(2, 3)] * 5 + [(500,)]
    rng = np.random.default_rng(1)
    drawn = [rng.random(shape, np.float32) for shape in shapes]
    for place in (0, 1):
        assert found[place].dtype == tf.bfloat16
        wanted = (drawn[place] >= 0.25) * np.float32(1.3359375)  # 1 / 0.75 in bfloat16
        np.testing.assert_array_equal(np.asarray(found[place]).astype("f4"), wanted)
    np.testing.assert_allclose(found[2], 1 + 2 * drawn[2], rtol=1e-6)
    np.testing.assert_array_equal(found[3], np.floor(drawn[3].astype("f8") * 12).astype("i4") - 2)
    below = 0.5 * (1 + np.asarray(tf.math.erf((found[4] - 1) / 2 / np.sqrt(2))))
    np.testing.assert_allclose(below, drawn[4], atol=1e-6)
    assert 1.5 < np.abs(found[5]).max() <= 2
    assert np.array_equal(np.argsort(found[5]), np.argsort(drawn[5]))


def test_numbers_of_other_distributions_are_refused() -> None:
    with OBSERVER.disable_dropout(layers.Dropout(0.5), draws_from(1, [])):
        with pytest.raises(polyamp.UnsupportedError, match="stateless_random_gamma"):
            keras.random.gamma((2,), 1.0)

        @tf.function(input_signature=[tf.TensorSpec((None, 2))], autograph=False)  # type: ignore[untyped-decorator]
        def unknown(x: Any) -> Any:
            return tf.nn.dropout(x, 0.5)

        with pytest.raises(polyamp.UnsupportedError, match="shape of the random numbers of _dropout is not known"):
            unknown(tf.ones((3, 2)))
    assert keras.random.gamma((2,), 1.0).shape == (2,)


class Traced(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """Its `call` is a `tf.function`, traced before the block."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.head = layers.Dropout(0.5, name="drop"), layers.Dense(2, name="head")

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def call(self, x: Any, training: bool = False) -> Any:
        return self.head(self.drop(x, training=training))


def mean_square(model: Any, batch: Any) -> Any:
    return keras.ops.mean(model(batch) ** 2)


def test_it_acts_in_a_traced_step_and_in_functions_that_were_traced_before() -> None:
    keras.utils.set_random_seed(0)
    model = Traced()
    model(X, training=True)
    plain = float(mean_square(model, X))
    state = polyamp.init(model, polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.0)))
    step = polyamp.train_step(mean_square, state.recipe)
    with OBSERVER.disable_dropout(model, None):
        np.testing.assert_allclose(step(state, X)[1].loss, plain, rtol=1e-2)
    dropped = X * (np.random.default_rng(1).random(X.shape, np.float32) >= 0.5) * 2
    shapes: list[tuple[int, ...]] = []
    with OBSERVER.disable_dropout(model, draws_from(1, shapes)):
        again = polyamp.train_step(mean_square, state.recipe)
        losses = [float(again(state, X)[1].loss) for _ in range(2)]
    np.testing.assert_allclose(losses, [float(mean_square(model, dropped))] * 2, rtol=1e-2)
    assert shapes == [(4, 3, 6)]
    assert float(np.mean(model(X, training=True) ** 2)) != plain
