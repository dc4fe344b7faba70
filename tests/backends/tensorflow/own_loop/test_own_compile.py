"""`polyamp_tensorflow.compile` on models with a `compile` of their own, layers of two dtypes in `fit`, and losses that
are vectors: programs of keras.io as they stand."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import polyamp
import polyamp_tensorflow
from polyamp.errors import LossError, ModelError, RecipeError, UnsupportedError
from polyamp_tensorflow import LossScaleOptimizer

X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 16)


class Distiller(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """keras.io, "Knowledge Distillation"."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.teacher = teacher
        self.student = student
        self.seen: list[Any] = []

    def compile(
        self,
        optimizer: Any,
        metrics: Any,
        student_loss_fn: Any,
        distillation_loss_fn: Any,
        alpha: float = 0.1,
        temperature: float = 3,
    ) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, allow_empty: bool = False
    ) -> Any:
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        loss = self.alpha * student_loss + (1 - self.alpha) * distillation_loss
        self.seen += [teacher_pred.dtype, y_pred.dtype, loss.dtype]
        return loss

    def call(self, x: Any) -> Any:
        return self.student(x)


def distiller() -> Any:
    keras.utils.set_random_seed(0)
    parts = [
        keras.Sequential([keras.Input((6,)), layers.Dense(width, "relu"), layers.Dense(3)], name=name)
        for name, width in (("student", 8), ("teacher", 16))
    ]
    model = Distiller(*parts)
    model(X[:1])
    return model


def recipe(policy: str = "mixed_bfloat16", **settings: Any) -> polyamp.Recipe:
    scaler = polyamp.LossScaler.static(8.0) if policy == "mixed_float16" else None
    return polyamp.Recipe(policy=polyamp.Policy(policy, **settings), optimizer=polyamp.sgd(0.1), scaler=scaler)


def losses() -> dict[str, Any]:
    return {
        "student_loss_fn": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "distillation_loss_fn": keras.losses.KLDivergence(),
    }


def metrics() -> list[Any]:
    return [keras.metrics.SparseCategoricalAccuracy()]


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_a_models_own_compile_gets_its_arguments(policy: str) -> None:
    plain = distiller()
    plain.compile(keras.optimizers.SGD(0.1), metrics(), **losses(), alpha=0.25, temperature=10)
    plain.run_eagerly = True
    want = plain.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]
    model = distiller()
    polyamp_tensorflow.compile(
        model, recipe(policy), metrics=metrics(), run_eagerly=True, alpha=0.25, temperature=10, **losses()
    )
    assert (model.alpha, model.temperature) == (0.25, 10)
    told = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
    assert set(model.seen) == {tf.float32}, "S4: what its losses are made of"
    assert model.student.layers[0].compute_dtype == policy.removeprefix("mixed_")
    assert told["loss"] == pytest.approx(want, rel=1e-6 if policy == "float32" else 1e-2)
    assert "sparse_categorical_accuracy" in told
    assert type(model.optimizer) is LossScaleOptimizer


def test_what_keras_takes_by_attributes_reaches_a_compile_that_does_not_name_it() -> None:
    model = distiller()
    polyamp_tensorflow.compile(
        model, recipe(), metrics=metrics(), run_eagerly=True, steps_per_execution=2, jit_compile=False, **losses()
    )
    assert (model.run_eagerly, model.steps_per_execution, model.jit_compile) == (True, 2, False)

    class Passing(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(3)

        def compile(self, gain: float, **options: Any) -> None:
            super().compile(**options)
            self.gain = gain

        def call(self, x: Any) -> Any:
            return self.dense(x) * self.gain

    passing = Passing()
    passing.gain = 1.0
    passing(X[:1])
    polyamp_tensorflow.compile(passing, recipe(), loss="mse", run_eagerly=True, gain=2.0)
    assert (passing.gain, passing.loss, passing.run_eagerly) == (2.0, "mse", True)


class Adversarial(keras.Model):  # type: ignore[misc]  # Keras is untyped
    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()

    def call(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("model", "given", "error", "message"),
    [
        (distiller, {"loss": "mse", **losses()}, UnsupportedError, r"Distiller\.compile takes optimizer.* loss="),
        (distiller, {"aplha": 1.0, **losses()}, UnsupportedError, r"Received: aplha=.*'alpha'"),
        (distiller, {"optimizer": "adam", **losses()}, UnsupportedError, r"Recipe\(optimizer="),
        (distiller, {"student_loss_fn": None}, RecipeError, r"needs distillation_loss_fn="),
        (
            distiller,
            {**losses(), "student_loss_fn": keras.losses.MeanSquaredError(dtype="bfloat16")},
            LossError,
            r"MeanSquaredError\(dtype='bfloat16'\)",
        ),
        (Adversarial, {}, UnsupportedError, r"Adversarial\.compile takes no optimizer=.*apply_policy.*d_optimizer"),
        (
            lambda: keras.Sequential([keras.Input((6,)), layers.Dense(1)]),
            {"los": "mse"},
            UnsupportedError,
            r"Sequential has none\. Received: los=.*'loss'",
        ),
        (
            lambda: keras.Sequential([keras.Input((6,)), layers.Dense(1)]),
            {"accumulate_steps": 4},
            UnsupportedError,
            r"Received: accumulate_steps=\. It is the recipe's: polyamp\.Recipe\(accumulate_steps=",
        ),
    ],
)
def test_s20_what_a_compile_does_not_take_is_named_and_nothing_is_changed(
    model: Any, given: Any, error: Any, message: str
) -> None:
    made = model()
    made.built = True
    with pytest.raises(error, match=message):
        polyamp_tensorflow.compile(made, recipe(), **given)
    assert {layer.compute_dtype for layer in made.layers} <= {"float32"}


# Layers of two dtypes.


class Sampling(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """keras.io, "Variational AutoEncoder", with TensorFlow's operators."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        z_mean, z_log_var = inputs
        epsilon = keras.random.normal(shape=tf.shape(z_mean), seed=self.seed_generator)
        return z_mean + tf.exp(0.5 * z_log_var) * epsilon


def encoder() -> Any:
    inputs = keras.Input((6,))
    z = Sampling(name="sampling")([layers.Dense(2)(inputs), layers.Dense(2)(inputs)])
    inner = keras.Model(inputs, z, name="encoder")
    return keras.Sequential([keras.Input((6,)), inner, layers.Dense(1)])


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("eager", [False, True])
def test_s20_a_layer_of_two_dtypes_is_named_in_fit_too(policy: str, eager: bool) -> None:
    model, message = encoder(), rf"layer 'encoder/sampling' \(Sampling\) computes with operands of {policy[6:]} and flo"
    polyamp_tensorflow.compile(model, recipe(policy), loss="mse", jit_compile=False, run_eagerly=eager)
    ways = [
        lambda: model.fit(X, X[:, :1], verbose=0),
        lambda: model.evaluate(X, X[:, :1], verbose=0),
        lambda: model.predict(X, verbose=0),
        lambda: polyamp.Policy(policy).autocast(encoder())(X),
        lambda: polyamp_tensorflow.apply_policy(model, policy).model(X),
    ]
    for way in ways:
        with pytest.raises(ModelError, match=message) as caught:
            way()
    said = re.search(r"overrides=(\{.*?\})", str(caught.value))
    assert said is not None
    settled = encoder()
    kept = recipe(policy, overrides=eval(said[1]))
    polyamp_tensorflow.compile(settled, kept, loss="mse", jit_compile=False, run_eagerly=eager)
    assert np.isfinite(settled.fit(X, X[:, :1], verbose=0).history["loss"][0])


# Losses that are vectors.


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_loss_per_row_is_summed_by_its_gradient_as_with_kerass_own(policy: str) -> None:
    class Rows(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(1, kernel_initializer="ones")

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *more: Any, **named: Any) -> Any:
            return keras.losses.mean_squared_error(y, y_pred)  # shape (rows,)

    ours, theirs = Rows(), Rows()
    for model in (ours, theirs):
        model(X[:1])
    polyamp_tensorflow.compile(ours, recipe(policy), run_eagerly=True)
    theirs.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0), run_eagerly=True)
    for model in (ours, theirs):
        model.fit(0.1 * X, np.zeros((16, 1)), batch_size=16, verbose=0)
    np.testing.assert_allclose(
        ours.dense.kernel.numpy(), theirs.dense.kernel.numpy(), rtol=1e-5 if policy == "float32" else 2e-3
    )
    scaled = LossScaleOptimizer(keras.optimizers.SGD(0.1), 4.0).scale_loss(tf.constant([[1.0, 2.0]], tf.float64))
    assert (scaled.dtype, scaled.numpy().tolist()) == (tf.float32, [[4.0, 8.0]])
