"""`clipnorm`, `clipvalue` and `global_clipnorm` of a Keras optimizer in a recipe have Keras's meaning, on gradients
that are unscaled and those of the whole window and all replicas (S9, S11); and its `use_ema` with a window."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp_tensorflow import compile as compile_model

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 8, 4)).astype(np.float32)
Y = RNG.normal(size=(5, 8, 3)).astype(np.float32)
CLIPS = [{"clipnorm": 0.1}, {"clipvalue": 0.02}, {"global_clipnorm": 0.1}]
IDS = ["clipnorm", "clipvalue", "global_clipnorm"]


def make_model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])


def loss_fn(model: Any, batch: Any) -> Any:
    return tf.reduce_mean(tf.square(model(batch["x"]) - batch["y"]))


def by_hand(optimizer: Any, *, clip_norm: float | None = None) -> list[Any]:
    """The weights after five steps of Keras's own in float32."""
    model = make_model()

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_fn(model, {"x": x, "y": y})
        gradients = tape.gradient(loss, model.trainable_variables)
        if clip_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, clip_norm)
        optimizer.apply(gradients, model.trainable_variables)

    for x, y in zip(X, Y, strict=True):
        step(x, y)
    return list(model.get_weights())


def trained(recipe: polyamp.Recipe, *, way: str = "step") -> list[Any]:
    """The weights after five of polyamp's."""
    model = make_model()
    if way == "fit":
        compile_model(model, recipe, loss="mse")
        x, y = (value.reshape(-1, value.shape[-1]) for value in (X, Y))
        model.fit(x, y, batch_size=8 // recipe.accumulate_steps, shuffle=False, verbose=0)
        return list(model.get_weights())
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for x, y in zip(X, Y, strict=True):
        step(state, {"x": x, "y": y})
    return list(model.get_weights())


@functools.cache
def not_clipped() -> list[Any]:
    return by_hand(keras.optimizers.SGD(0.5))


def assert_close(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-7)
    assert max(np.abs(one - other).max() for one, other in zip(found, not_clipped(), strict=True)) > 1e-3


@pytest.mark.parametrize("clip", CLIPS, ids=IDS)
def test_s11_a_keras_optimizers_own_clip(clip: dict[str, float]) -> None:
    def recipe(**more: Any) -> polyamp.Recipe:
        optimizer = keras.optimizers.SGD(0.5, momentum=0.5, **clip)
        return polyamp.Recipe(optimizer=optimizer, scaler=polyamp.LossScaler(init_scale=1024.0), **more)

    wanted = by_hand(keras.optimizers.SGD(0.5, momentum=0.5, **clip))
    assert_close(trained(recipe()), wanted)
    assert_close(trained(recipe(accumulate_steps=2)), wanted)
    if "clipnorm" in clip:
        assert_close(trained(recipe(accumulate_steps=2), way="fit"), wanted)


@pytest.mark.parametrize("clip", CLIPS[:2], ids=IDS[:2])
def test_s11_the_recipes_clip_comes_first(clip: dict[str, float]) -> None:
    recipe = polyamp.Recipe(optimizer=keras.optimizers.SGD(0.5, **clip), clip_norm=0.12)
    wanted = by_hand(keras.optimizers.SGD(0.5, **clip), clip_norm=0.12)
    assert_close(trained(recipe), wanted)
    alone = by_hand(keras.optimizers.SGD(0.5, **clip))
    assert max(np.abs(one - other).max() for one, other in zip(wanted, alone, strict=True)) > 1e-4


@pytest.mark.parametrize("clip", CLIPS, ids=IDS)
def test_s09_it_clips_what_is_reduced_over_replicas(clip: dict[str, float], two_cpus: Any) -> None:
    with two_cpus.scope():
        optimizer = keras.optimizers.SGD(0.5, **clip)
        found = trained(polyamp.Recipe(optimizer=optimizer, scaler=polyamp.LossScaler(init_scale=64.0)))
    assert_close(found, by_hand(keras.optimizers.SGD(0.5, **clip)))


@pytest.mark.parametrize("way", ["step", "fit"])
def test_use_ema_with_a_window_says_how_the_average_moves(way: str) -> None:
    def recipe(momentum: float, count: int) -> polyamp.Recipe:
        optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=momentum)
        return polyamp.Recipe(optimizer=optimizer, accumulate_steps=count)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trained(recipe(0.9, 1), way=way)
    told = recipe(0.9, 4)
    message = (
        r"use_ema with accumulate_steps: the moving average of SGD\(use_ema=True, ema_momentum=0.9\) moves once an "
        r"update, of accumulate_steps=4 micro-batches, .* ema_momentum=0.6561, which is 0.9\*\*4."
    )
    with pytest.warns(UserWarning, match=message) as found:
        trained(told, way=way)
    assert len([each for each in found if "use_ema" in str(each.message)]) == 1


def test_the_momentum_that_is_named_averages_over_as_many_batches_as_keras() -> None:
    """Keras moves its average at each of the four micro-batches of a window, after the update at the last of them; so
    three micro-batches later it has moved by the whole window, as here with momentum 0.9**4 at once."""
    weights = [tf.constant([float(n)]) for n in range(5)]
    keras_variable, ours = keras.Variable([0.0]), keras.Variable([0.0])
    theirs = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=4)
    single = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.9**4)
    for optimizer, variable in ((theirs, keras_variable), (single, ours)):
        optimizer.build([variable])
    for update in range(4):
        for micro_batch in range(4):
            theirs.apply([-weights[update + 1]], [keras_variable])
            if update and micro_batch == 2:
                np.testing.assert_allclose(average(theirs), average(single), rtol=1e-6)
        single.apply([-weights[update + 1]], [ours])


def average(optimizer: Any) -> Any:
    return optimizer._model_variables_moving_average[0].numpy()
