"""`loss_fn` is the loss (S25): what a Keras model adds by itself is asked for, and said where it is left out."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, regularizers

import polyamp
import polyamp_tensorflow

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 2)).astype(np.float32)


class Penalty(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Adds a loss in its call."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.5 * keras.ops.mean(keras.ops.square(keras.ops.cast(x, "float32"))))
        return x


def model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, name="first", kernel_regularizer=regularizers.L2(0.1), bias_regularizer="l1"),
            Penalty(name="penalty"),
            layers.Dense(3, name="middle", activity_regularizer=regularizers.L2(0.2)),
            layers.Dense(2, name="last"),
        ]
    )


def recipe(policy: str = "float32", **settings: Any) -> polyamp.Recipe:
    return polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1), **settings)


def whole(model: Any, batch: Any) -> Any:
    fit = polyamp.losses.mean_squared_error(model(batch[0]), batch[1])
    added = polyamp.losses.regularization(model)
    return fit + added, added


def part(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def by_hand(net: Any) -> float:
    """The terms in NumPy."""
    first, middle = net.get_layer("first"), net.get_layer("middle")
    hidden = X @ first.kernel.numpy() + first.bias.numpy()
    weights = 0.1 * np.square(first.kernel.numpy()).sum() + 0.01 * np.abs(first.bias.numpy()).sum()
    out = hidden @ middle.kernel.numpy() + middle.bias.numpy()
    return float(weights + 0.5 * np.square(hidden).mean() + 0.2 * np.square(out).sum() / 8)


def test_s25_a_step_with_it_is_one_of_fit() -> None:
    ours, theirs, plain = model(), model(), model()
    want = by_hand(ours)
    state = polyamp.init(ours, recipe())
    _, result = polyamp.train_step(whole, recipe())(state, (X, Y))
    assert result.aux.dtype == tf.float32
    assert float(result.aux) == pytest.approx(want, rel=1e-6)
    polyamp_tensorflow.compile(theirs, recipe(), loss="mse", jit_compile=False)
    plain.compile(keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)
    for other in (theirs, plain):
        found = other.fit(X, Y, batch_size=8, verbose=0).history["loss"][0]
        assert found == pytest.approx(float(result.loss), rel=1e-6)
        for mine, its in zip(ours.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_s25_under_a_policy_and_over_micro_batches_it_is_a_float32_sum_once(policy: str) -> None:
    """The squares of 256 weights of 40 add up to 409600, above what float16 holds."""
    made = recipe(policy, accumulate_steps=4, scaler=polyamp.LossScaler.static(8.0))
    net = keras.Sequential(
        [keras.Input((4,)), layers.Dense(64, kernel_regularizer=regularizers.L2(1.0)), layers.Dense(2)]
    )
    net.layers[0].kernel.assign(np.full((4, 64), 40.0, np.float32))
    _, result = polyamp.train_step(whole, made, jit_compile=False)(polyamp.init(net, made), (0.01 * X, Y))
    assert not bool(result.skipped)
    assert result.aux.numpy().tolist() == [256 * 1600.0] * 4
    moved = 40.0 - net.layers[0].kernel.numpy()
    assert moved.mean() == pytest.approx(0.1 * 2 * 40.0, rel=0.05), "once a window, not once a micro-batch"


def test_s25_weights_of_16_bits_are_summed_in_float32() -> None:
    layer = layers.Dense(300, dtype="bfloat16", kernel_regularizer=regularizers.L1(1.0), kernel_initializer="ones")
    layer.build((None, 1))
    added = polyamp.losses.regularization(layer)
    assert (added.dtype, float(added)) == (tf.float32, 300.0), "256 in bfloat16's steps of 2"


def test_s25_what_is_left_out_is_said_once_with_the_layers_names() -> None:
    state = polyamp.init(model(), recipe())
    step = polyamp.train_step(part, recipe())
    with pytest.warns(
        UserWarning, match=r"add_loss of first, penalty, middle\. .*losses\.regularization\(model\)"
    ) as seen:
        step(state, (X, Y))
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state, (X, Y))
        step(state, (X[:4], Y[:4]))  # traced anew
        polyamp.value_and_grad(part)(state, (X, Y))
    other = polyamp.init(model(), recipe())
    with pytest.warns(UserWarning, match="loss_fn leaves out"):
        polyamp.value_and_grad(part)(other, (X, Y))


@pytest.mark.parametrize("compiled", [True, False])
def test_s25_nothing_is_said_to_who_asks(compiled: bool) -> None:
    net = model()

    def own_sum(bound: Any, batch: Any) -> Any:
        return part(bound, batch) + tf.add_n([tf.cast(loss, tf.float32) for loss in bound.losses])

    def of_a_part(bound: Any, batch: Any) -> Any:
        return part(bound, batch) + polyamp.losses.regularization(bound.layers[0])

    def of_the_native_one(bound: Any, batch: Any) -> Any:
        return part(bound, batch) + polyamp.losses.regularization(net)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {}
        for loss_fn in (whole, own_sum, of_a_part, of_the_native_one):
            state = polyamp.init(net, recipe())
            value, _ = polyamp.value_and_grad(loss_fn, compile=compiled)(state, (X, Y))
            found[loss_fn.__name__] = float(value[0] if isinstance(value, tuple) else value)
        plain = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
        polyamp.train_step(part, recipe())(polyamp.init(plain, recipe()), (X, Y))
    assert found["own_sum"] == pytest.approx(found["whole"], rel=1e-6)
    assert found["of_the_native_one"] == pytest.approx(found["whole"], rel=1e-6)
    assert found["of_a_part"] < found["whole"]


def test_s25_frozen_layers_add_no_regularizer_and_of_two_models_one_is_named() -> None:
    net = model()
    net.get_layer("first").trainable = False
    net.layers[2].activity_regularizer = None
    state, other = polyamp.init(net, recipe()), polyamp.init(model(), recipe())

    def loss_fn(models: Any, batch: Any) -> Any:
        return part(models[0], batch) + part(models[1], batch) + polyamp.losses.regularization(models[1])

    with pytest.warns(UserWarning, match=r"add_loss of penalty\. ") as seen:
        polyamp.value_and_grad(loss_fn)([state, other], (X, Y))
    assert len(seen) == 1


def test_s25_a_model_that_is_not_built_and_a_loop_of_ones_own() -> None:
    net = keras.Sequential([layers.Dense(2, kernel_regularizer="l2", kernel_initializer="ones")])
    state = polyamp.init(net, recipe())
    _, result = polyamp.train_step(whole, recipe())(state, (X, Y))
    assert float(result.aux) == pytest.approx(0.01 * 8.0)
    with tf.GradientTape() as tape:
        loss = part(net, (X, Y)) + polyamp.losses.regularization(net)
    assert all(gradient is not None for gradient in tape.gradient(loss, net.trainable_variables))
    assert float(polyamp.losses.regularization(tf.Module())) == 0.0
