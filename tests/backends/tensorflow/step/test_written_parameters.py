"""A parameter that the forward pass writes is running state (S12): the step updates what was written, and a skipped
step takes it back. Here: Keras layers that constrain their weights in `call`, a `tf.Module`, and `loss_fn` itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import UnsupportedError
from polyamp_tensorflow import LossScaleOptimizer, apply_policy
from polyamp_tensorflow import compile as compile_model

X = np.ones((4, 3), np.float32)
BAD = np.where(np.arange(4)[:, None] == 3, np.inf, X).astype(np.float32)  # in the last micro-batch
START = np.linspace(-1, 1, 12).reshape(3, 4).astype(np.float32)
GRADIENT = np.float32(0.25)  # of the mean over 4 features, where every input is 1
RATE = 0.125
AFTER = np.clip(START, -0.5, 0.5) - np.float32(RATE) * GRADIENT
SCALER = polyamp.LossScaler(init_scale=16.0)
CAST = polyamp.Policy("mixed_bfloat16", mode="cast")


class MaxNorm(keras.layers.Layer):
    """Clips its weights before it uses them."""

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(shape[-1], 4), initializer="ones", name="w", aggregation="mean")

    def call(self, x: Any) -> Any:
        self.constrain()
        return keras.ops.matmul(x, self.w)

    def constrain(self) -> None:
        self.w.assign(keras.ops.clip(self.w, -0.5, 0.5))


class UnderACondition(MaxNorm):
    def constrain(self) -> None:
        def assigned() -> Any:
            self.w.assign(keras.ops.clip(self.w, -0.5, 0.5))
            return tf.constant(1)

        tf.cond(tf.reduce_max(tf.abs(self.w)) > 0.5, assigned, lambda: tf.constant(0))


class InAFunction(MaxNorm):
    def constrain(self) -> None:
        tf.function(super().constrain)()


class Net(keras.Model):  # type: ignore[misc]  # Keras is untyped
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def call(self, x: Any) -> Any:
        return self.layer(x)


def make_model(kind: type = MaxNorm) -> Any:
    model = Net(kind(name="max_norm"))
    model(X)
    model.layer.w.assign(START)
    return model


def recipe(policy: Any = "float32", *, count: int = 1) -> polyamp.Recipe:
    return polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(RATE), scaler=SCALER, accumulate_steps=count)


def loss_fn(model: Any, x: Any) -> Any:
    return keras.ops.mean(keras.ops.cast(model(x), "float32"))


def check(run: Callable[[Any], Any], weight: Any) -> None:
    run(BAD)
    np.testing.assert_array_equal(weight.numpy(), START)
    run(X)
    np.testing.assert_array_equal(weight.numpy(), AFTER)


@pytest.mark.parametrize(
    ("policy", "compiled", "count"),
    [
        ("float32", True, 1),
        ("float32", False, 2),
        ("mixed_bfloat16", True, 2),
        ("mixed_bfloat16", False, 1),
        (CAST, True, 1),
        (CAST, False, 2),
    ],
    ids=lambda value: "cast" if value is CAST else None,
)
def test_s12_a_write_in_the_step(policy: Any, compiled: bool, count: int) -> None:
    model = make_model()
    state = polyamp.init(model, recipe(policy, count=count))
    step = polyamp.train_step(loss_fn, state.recipe, compile=compiled)
    check(lambda x: step(state, x), model.layer.w)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", [UnderACondition, InAFunction])
def test_s12_a_write_under_a_condition_or_in_a_function(kind: type, policy: str) -> None:
    model = make_model(kind)
    state = polyamp.init(model, recipe(policy, count=2))
    step = polyamp.train_step(loss_fn, state.recipe)
    check(lambda x: step(state, x), model.layer.w)


def test_s12_a_write_in_the_halves() -> None:
    model = make_model()
    state = polyamp.init(model, recipe("mixed_bfloat16"))
    graded = polyamp.value_and_grad(loss_fn)

    def run(x: Any) -> None:
        before = model.layer.w.numpy()
        _, gradients = graded(state, x)
        np.testing.assert_array_equal(model.layer.w.numpy(), before)
        np.testing.assert_array_equal(gradients.running["written/max_norm/w"], np.clip(before, -0.5, 0.5))
        polyamp.apply_gradients(state, gradients)

    check(run, model.layer.w)


def test_s12_the_next_micro_batch_sees_the_write() -> None:
    """Each halves the weights; without a gradient from anything else they end at a quarter."""

    class Halving(MaxNorm):
        def constrain(self) -> None:
            self.w.assign(self.w * 0.5)

    model = make_model(Halving)
    state = polyamp.init(model, recipe(count=2))
    step = polyamp.train_step(lambda model, x: (loss_fn(model, x), model.layer.w + 0.0), state.recipe)
    _, result = step(state, X)
    np.testing.assert_array_equal(result.aux, [START / 2, START / 4])
    np.testing.assert_array_equal(model.layer.w.numpy(), START / 4 - np.float32(RATE) * GRADIENT)


@pytest.mark.parametrize(("eager", "count"), [(True, 1), (False, 2)])
def test_s12_a_write_in_fit_and_in_a_loop(eager: bool, count: int) -> None:
    fitted = make_model()
    compile_model(
        fitted, recipe("mixed_bfloat16", count=count), loss=lambda y, p: keras.ops.mean(p, -1), run_eagerly=eager
    )
    kept = make_model()
    apply_policy(kept, "mixed_bfloat16")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(RATE), SCALER, accumulate_steps=count)
    optimizer.build(kept.trainable_variables)

    def loop(x: Any) -> None:
        with optimizer.keep_statistics(kept):
            with tf.GradientTape() as tape:
                scaled = optimizer.scale_loss(loss_fn(kept, x))
            optimizer.apply(tape.gradient(scaled, kept.trainable_variables), kept.trainable_variables)

    traced = loop if eager else tf.function(loop, autograph=False)

    def batches(run: Callable[[Any], Any]) -> Callable[[Any], None]:
        return lambda x: [run(tf.constant(X if n < count else x)) for n in range(1, count + 1)] and None

    check(batches(lambda x: fitted.train_on_batch(x, np.zeros((4, 4)))), fitted.layer.w)
    check(batches(traced), kept.layer.w)
    assert (fitted.optimizer.skipped_steps, optimizer.skipped_steps) == (1, 1)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_s12_a_write_on_several_replicas(two_cpus: Any, policy: str) -> None:
    with two_cpus.scope():
        model = make_model()
        state = polyamp.init(model, recipe(policy))
    step = polyamp.train_step(loss_fn, state.recipe)
    check(lambda x: step(state, x), model.layer.w)
    for weight in two_cpus.experimental_local_results(model.layer.w.value):
        np.testing.assert_array_equal(weight, AFTER)


def test_s12_a_write_that_replicas_cannot_take_back_is_refused(two_cpus: Any) -> None:
    with two_cpus.scope():
        model = make_model()
        state = polyamp.init(model, recipe(count=2))
        with pytest.raises(UnsupportedError, match=r"a parameter that the forward pass assigns to. Received"):
            polyamp.train_step(loss_fn, state.recipe)(state, X)


class Module(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(START)

    def __call__(self, x: Any) -> Any:
        self.w.assign(tf.clip_by_value(self.w, -0.5, 0.5))
        return x @ self.w


def test_s12_a_write_of_a_module_and_of_loss_fn() -> None:
    module = Module()
    state = polyamp.init(module, recipe())
    step = polyamp.train_step(loss_fn, state.recipe)
    check(lambda x: step(state, x), module.w)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, use_bias=False)])
    kernel = model.layers[0].kernel
    kernel.assign(START)

    def constrained(bound: Any, x: Any) -> Any:
        kernel.assign(keras.ops.clip(kernel, -0.5, 0.5))
        return loss_fn(bound, x)

    state = polyamp.init(model, recipe())
    step = polyamp.train_step(constrained, state.recipe)
    check(lambda x: step(state, x), kernel)


def test_s12_a_write_to_a_cast_is_refused_and_changes_nothing() -> None:
    module = Module()
    state = polyamp.init(module, recipe(CAST))
    step = polyamp.train_step(loss_fn, state.recipe)
    with pytest.raises(UnsupportedError, match=r"assign\(\) on a cast would be lost. Received: Module, whose forward"):
        step(state, X)
    np.testing.assert_array_equal(module.w.numpy(), START)


@pytest.mark.parametrize("compiled", [True, False])
def test_s20_an_error_behind_a_write_takes_it_back(compiled: bool) -> None:
    model = make_model()
    state = polyamp.init(model, recipe())

    def failing(model: Any, x: Any) -> Any:
        raise RuntimeError(str(model(x).shape))

    with pytest.raises(RuntimeError):
        polyamp.train_step(failing, state.recipe, compile=compiled)(state, X)
    np.testing.assert_array_equal(model.layer.w.numpy(), START)
