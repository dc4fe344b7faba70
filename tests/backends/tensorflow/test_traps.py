"""Keras's own behaviour beside polyamp's, where no other file of this folder shows both."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 4)).astype(np.float32), RNG.normal(size=(8, 2)).astype(np.float32)


def model(dtype: str | None = None) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, dtype=dtype), keras.layers.Dense(2, dtype=dtype)])


@pytest.mark.parametrize("dtype", ["mixed_float16", "float16"])
def test_keras_scales_by_itself_only_under_a_model_policy_of_the_right_name(dtype: str) -> None:
    plain = model(dtype)
    plain.compile("sgd", loss="mse")
    assert not isinstance(plain.optimizer, keras.optimizers.LossScaleOptimizer), "layers in float16, and no scaling"
    ours = model()
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))
    polyamp_tensorflow.compile(ours, recipe, loss="mse", jit_compile=False)
    assert isinstance(ours.optimizer, polyamp_tensorflow.LossScaleOptimizer)
    assert ours.layers[0].compute_dtype == "float16"


def gradients(made: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(made(X) - Y))
    return tape.gradient(loss, made.trainable_variables)


def moved(made: Any, optimizer: Any, *, scale: bool) -> float:
    """The norm of all updates after one step of SGD with rate 1."""
    before = made.get_weights()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(made(X) - Y))
        loss = optimizer.scale_loss(loss) if scale else loss
    optimizer.apply(tape.gradient(loss, made.trainable_variables), made.trainable_variables)
    return float(np.sqrt(sum(np.square(a - b).sum() for a, b in zip(before, made.get_weights(), strict=True))))


def test_clipnorm_is_by_variable_and_clip_norm_by_all() -> None:
    norm = float(tf.linalg.global_norm(gradients(model())))
    assert moved(model(), keras.optimizers.SGD(1.0, clipnorm=0.1), scale=False) > 0.15
    optimizer = polyamp_tensorflow.LossScaleOptimizer(keras.optimizers.SGD(1.0), clip_norm=0.1)
    assert norm > 0.1
    assert moved(model(), optimizer, scale=True) == pytest.approx(0.1, rel=1e-4)


def test_a_schedule_counts_micro_steps_in_keras_and_updates_here() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.0])  # the first two updates have rate 1
    plain = keras.optimizers.SGD(schedule, gradient_accumulation_steps=2)
    ours = polyamp_tensorflow.LossScaleOptimizer(keras.optimizers.SGD(schedule), accumulate_steps=2)
    ends = []
    for optimizer, scale in ((plain, False), (ours, True)):
        variable = keras.Variable(np.zeros(1, np.float32))
        for _ in range(4):
            if scale:
                optimizer.scale_loss(tf.constant(0.0))
            factor = optimizer.dynamic_scale.value if scale else 1.0
            optimizer.apply([tf.ones(1) * factor], [variable])
        ends.append(float(variable.numpy()[0]))
    assert ends == [-1.0, -2.0]


def test_a_global_policy_does_not_reach_a_clone_and_apply_policy_reaches_every_layer() -> None:
    built = model()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        clone = keras.models.clone_model(built)
    finally:
        keras.config.set_dtype_policy("float32")
    assert {layer.compute_dtype for layer in clone.layers} == {"float32"}
    with polyamp_tensorflow.apply_policy(built, polyamp.Policy("mixed_bfloat16"), heads=False):
        assert {layer.compute_dtype for layer in built.layers} == {"bfloat16"}


def test_a_dtype_policy_map_on_a_built_model_does_not_reach_its_layers() -> None:
    built = model()
    policy = polyamp.Policy("mixed_bfloat16", overrides={built.layers[1].name: "float32"})
    built.dtype_policy = polyamp_tensorflow.dtype_policy(policy)
    assert {layer.compute_dtype for layer in built.layers} == {"float32"}
    fresh = model()
    policy = polyamp.Policy("mixed_bfloat16", overrides={fresh.layers[1].name: "float32"})
    with polyamp_tensorflow.apply_policy(fresh, policy):
        assert [layer.compute_dtype for layer in fresh.layers] == ["bfloat16", "float32"]


def test_keras_goes_on_in_the_old_precision_after_a_layers_policy_is_set() -> None:
    plain, ours = model(), model()
    for each in (plain, ours):
        each.compile(loss="mse", jit_compile=False)
        each.predict(X, verbose=0)
    exact = plain.predict(X, verbose=0)
    for layer in plain.layers:
        layer.dtype_policy = "mixed_bfloat16"
    assert np.array_equal(plain.predict(X, verbose=0), exact), "the cached function is float32 still"
    polyamp_tensorflow.apply_policy(ours, polyamp.Policy("mixed_bfloat16"), heads=False)
    assert not np.array_equal(ours.predict(X, verbose=0), exact)


class Gain(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Multiplies by a float32 constant that it keeps."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.gain = tf.constant(2.0)

    def call(self, x: Any) -> Any:
        return x * self.gain


def test_a_custom_layer_with_a_float32_constant() -> None:
    with pytest.raises((tf.errors.InvalidArgumentError, TypeError)):
        Gain(dtype="mixed_bfloat16")(X)
    layer = Gain()
    ours = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), layer, keras.layers.Dense(2)])
    with polyamp_tensorflow.apply_policy(ours, polyamp.Policy("mixed_bfloat16")):
        assert ours(X).shape == (8, 2)


def test_weight_decay_of_keras_adam_is_decoupled_and_of_the_spec_l2() -> None:
    """At a gradient of 0: decoupled decay shrinks the weight by rate * decay, L2 gives Adam something to normalise."""
    ends = []
    for optimizer in (
        keras.optimizers.Adam(0.1, weight_decay=0.01),
        polyamp_tensorflow.SpecOptimizer(polyamp.adam(0.1, weight_decay=0.01)),
    ):
        variable = keras.Variable(np.ones(1, np.float32))
        optimizer.apply([tf.zeros(1)], [variable])
        ends.append(float(variable.numpy()[0]))
    assert ends == pytest.approx([1.0 - 0.1 * 0.01, 0.9], abs=1e-6)
