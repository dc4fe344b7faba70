"""S34 in TensorFlow: Keras's own averages, two replicas, blocks, models that cannot be copied."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import ModelError, StateError, UnsupportedError

ROWS = np.random.default_rng(0).standard_normal((6, 8, 4)).astype(np.float32)


def network() -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((4,)), *layers])


def loss_fn(model: Any, batch: Any) -> Any:
    return tf.reduce_mean(tf.square(model(batch)))


def recipe(ema: polyamp.Ema, **settings: Any) -> polyamp.Recipe:
    scaler = polyamp.LossScaler(init_scale=16.0)
    return polyamp.Recipe(**{"optimizer": polyamp.adam(0.1), "ema": ema, "scaler": scaler, **settings})


def test_s34_averages_are_those_of_keras() -> None:
    """`use_ema`, beside the recipe's, in one training without a skipped step."""
    native = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.9)
    state = polyamp.init(network(), made := recipe(polyamp.Ema(0.9), optimizer=native))
    step = polyamp.train_step(loss_fn, made)
    for rows in ROWS:
        state, _ = step(state, rows)
    theirs = [np.asarray(value) for value in native._model_variables_moving_average]
    for own, other in zip(state.averages["model"].values(), theirs, strict=True):
        np.testing.assert_allclose(own.numpy(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [True, False])
def test_s34_two_replicas_have_the_averages_of_one(two_cpus: Any, compiled: bool) -> None:
    made = recipe(polyamp.Ema(0.9, warmup=True, statistics="average"), optimizer=polyamp.sgd(0.1))

    def dense() -> Any:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_initializer="ones")])

    with two_cpus.scope():
        two = polyamp.init(dense(), made)
    one = polyamp.init(dense(), made)
    step = polyamp.train_step(loss_fn, made, compile=compiled)
    for number, rows in enumerate(ROWS):
        rows = np.where(number == 2, np.inf, rows).astype(np.float32)
        for state in (one, two):
            step(state, rows)
    assert int(two.step) == 5
    for own, other in zip(two.averages["model"].values(), one.averages["model"].values(), strict=True):
        copies = [value.numpy() for value in two_cpus.experimental_local_results(own)]
        assert np.array_equal(*copies)
        np.testing.assert_allclose(copies[0], other.numpy(), rtol=1e-6, atol=1e-6)
    before = two.model.get_weights()
    with polyamp.averaged(two) as model:
        for value, own in zip(model.get_weights(), two.averages["model"].values(), strict=True):
            np.testing.assert_array_equal(value, own.numpy())
    assert all(np.array_equal(a, b) for a, b in zip(before, two.model.get_weights(), strict=True))


def test_s34_in_the_block_the_state_is_refused(tmp_path: Path) -> None:
    state = polyamp.init(network(), made := recipe(polyamp.Ema(0.9)))
    step, half = polyamp.train_step(loss_fn, made), polyamp.value_and_grad(loss_fn)
    state, _ = step(state, ROWS[0])
    polyamp.save(state, tmp_path / "state")
    _, gradients = half(state, ROWS[1])
    before = state.model.get_weights()
    with contextlib.suppress(ZeroDivisionError), polyamp.averaged(state):
        for call in (
            lambda: step(state, ROWS[1]),
            lambda: half(state, ROWS[1]),
            lambda: polyamp.apply_gradients(state, gradients),
            lambda: polyamp.save(state, tmp_path / "other"),
            lambda: polyamp.restore(state, tmp_path / "state"),
            lambda: polyamp.refresh(state),
            lambda: polyamp.averaged_model(state),
            lambda: polyamp.averaged(state).__enter__(),
        ):
            with pytest.raises(StateError, match=r"inside `with polyamp\.averaged\(state\)`"):
                call()
        raise ZeroDivisionError
    assert all(np.array_equal(a, b) for a, b in zip(before, state.model.get_weights(), strict=True))
    assert int(step(state, ROWS[1])[1].step) == 2


class Own(keras.Model):  # type: ignore[misc]  # Keras is untyped
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(width)

    def call(self, x: Any) -> Any:
        return self.layer(x)


def test_s34_models_that_are_not_built_or_cannot_be_copied() -> None:
    state = polyamp.init(Own(2), made := recipe(polyamp.Ema(0.5)))
    with pytest.raises(ModelError, match="not built"), polyamp.averaged(state):
        pass
    state, _ = polyamp.train_step(loss_fn, made)(state, ROWS[0])
    with pytest.raises(UnsupportedError, match=r"cannot copy this Own .*Use `with polyamp\.averaged\(state\)"):
        polyamp.averaged_model(state)
    with polyamp.averaged(state) as model:
        assert model is state.model
