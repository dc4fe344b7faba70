"""Models without Keras: `tf.Module` and any callable with `trainable_variables`, under every policy."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from polyamp.conformance.problems import batch, loss_fn, recipe
from polyamp.errors import ModelError, UnsupportedError

RNG = np.random.default_rng(0)
FIRST, SECOND = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 5), (5, 3)))
SEEN: list[str] = []


class Linear(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
    """A product, which notes the dtype it computes in."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.kernel = tf.Variable(kernel, name="kernel")
        self.calls = tf.Variable(0.0, trainable=False, name="calls")

    def __call__(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        y = tf.matmul(x, self.kernel)
        SEEN.append(y.dtype.name)
        return y


class Nested(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
    """Modules in a list, variables in a dict, and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [Linear(FIRST), Linear(SECOND)]
        self.biases = {"last": tf.Variable(np.zeros(3, np.float32), name="bias")}

    def hidden(self, x: Any) -> Any:
        return tf.nn.relu(self.parts[0](x))

    def __call__(self, x: Any) -> Any:
        return self.parts[1](self.hidden(x)) + self.biases["last"]


class Weights(NamedTuple):
    """A module's variables by name."""

    first: Any
    second: Any


class Named(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
    """Variables in a NamedTuple."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = Weights(tf.Variable(FIRST), tf.Variable(SECOND))

    def __call__(self, x: Any) -> Any:
        y = tf.nn.relu(x @ self.kernels.first) @ self.kernels.second
        SEEN.append(y.dtype.name)
        return y


class WithLayer(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
    """A Keras layer inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(FIRST)
        self.layer = keras.layers.Dense(3, kernel_initializer=keras.initializers.Constant(SECOND), dtype=None)
        self.layer.build((None, 5))

    @property
    def trainable_variables(self) -> list[Any]:
        return [self.first.kernel, *self.layer.trainable_variables]

    def __call__(self, x: Any) -> Any:
        y = self.layer(tf.nn.relu(self.first(x)))
        SEEN.append(y.dtype.name)
        return y


class Plain:
    """No `tf.Module` at all."""

    def __init__(self) -> None:
        self.kernels = (tf.Variable(FIRST), tf.Variable(SECOND))

    @property
    def trainable_variables(self) -> list[Any]:
        return list(self.kernels)

    def __call__(self, x: Any) -> Any:
        for kernel in self.kernels:
            x = x @ kernel
            SEEN.append(x.dtype.name)
        return x


MODELS: dict[str, Any] = {"Nested": Nested, "Named": Named, "WithLayer": WithLayer, "Plain": Plain}


@pytest.mark.parametrize(
    ("name", "policy", "accumulate_steps"),
    [
        ("Nested", "mixed_bfloat16", 2),
        ("Nested", polyamp.Policy("mixed_bfloat16", mode="cast"), 1),
        ("Named", polyamp.Policy("mixed_bfloat16", mode="cast"), 2),
        ("WithLayer", "mixed_float16", 1),
        ("WithLayer", "mixed_bfloat16", 1),
        ("WithLayer", polyamp.Policy("mixed_bfloat16", mode="cast"), 2),
        ("Plain", "mixed_float16", 2),
    ],
    ids=lambda value: "cast" if isinstance(value, polyamp.Policy) else None,
)
@pytest.mark.filterwarnings("ignore:float16 on TensorFlow's CPU")
def test_a_model_computes_in_16_bits_and_keeps_its_masters(name: str, policy: Any, accumulate_steps: int) -> None:
    scaler = polyamp.LossScaler(init_scale=16.0)
    made = recipe(policy, accumulate_steps=accumulate_steps, optimizer=polyamp.sgd(0.1), scaler=scaler)
    model, exact = MODELS[name](), MODELS[name]()
    state = polyamp.init(model, made, backend="tensorflow")
    SEEN.clear()
    _, result = polyamp.train_step(loss_fn, made)(state, batch(0))
    assert set(SEEN) == {made.policy.compute}
    plain = recipe(accumulate_steps=accumulate_steps, optimizer=polyamp.sgd(0.1))
    _, wanted = polyamp.train_step(loss_fn, plain)(polyamp.init(exact, plain, backend="tensorflow"), batch(0))
    assert float(result.loss) == pytest.approx(float(wanted.loss), rel=0.03)
    assert float(result.loss) != float(wanted.loss)
    for mine, other, start in zip(
        model.trainable_variables, exact.trainable_variables, MODELS[name]().trainable_variables, strict=True
    ):
        assert isinstance(mine, tf.Variable | keras.Variable)
        assert tf.as_dtype(mine.dtype) == tf.float32
        moved, reference = np.asarray(mine) - np.asarray(start), np.asarray(other) - np.asarray(start)
        assert np.abs(reference).max() > 0.0
        np.testing.assert_allclose(moved, reference, atol=0.06 * np.abs(reference).max())


def test_gradients_are_float32_and_methods_compute_in_16_bits() -> None:
    made = recipe("mixed_bfloat16")
    state = polyamp.init(Nested(), made)
    SEEN.clear()

    def through_a_method(model: Any, data: Any) -> Any:
        return tf.reduce_mean(tf.square(model.hidden(data["x"]))) + loss_fn(model, data)

    _, grads = polyamp.value_and_grad(through_a_method)(state, batch(0))
    assert set(SEEN) == {"bfloat16"}
    assert {value.dtype for value in grads.values.values()} == {tf.float32}


def test_a_skipped_step_leaves_everything_as_it_was() -> None:
    made = recipe("mixed_bfloat16", scaler=polyamp.LossScaler(init_scale=16.0))
    state = polyamp.init(Nested(), made)
    step = polyamp.train_step(loss_fn, made)
    before = polyamp_tensorflow.BACKEND.export_state(state)
    _, result = step(state, batch(0, gain=np.inf))
    assert bool(result.skipped)
    after = polyamp_tensorflow.BACKEND.export_state(state)
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert {name for name in before if not name.startswith("loss_scale/")} <= same
    step(state, batch(0))
    assert float(state.model.parts[0].calls) == 1.0


def test_autocast_of_a_module_and_what_comes_back() -> None:
    model = Nested()
    x = tf.constant(batch(0)["x"])
    kept = [dict(vars(part)) for part in (model, *model.parts)]
    SEEN.clear()
    result = polyamp.Policy("mixed_bfloat16").autocast(model)(x)
    assert (set(SEEN), result.dtype) == ({"bfloat16"}, tf.float32)
    assert [dict(vars(part)) for part in (model, *model.parts)] == kept
    with pytest.raises(ValueError, match="boom"):
        polyamp.Policy("mixed_bfloat16").autocast(model, backend="tensorflow")(Boom())
    assert [dict(vars(part)) for part in (model, *model.parts)] == kept


class Boom:
    """An argument that no product takes."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("boom")


class Classifier(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
    """A softmax layer of Keras's, whose logits are 30 apart."""

    def __init__(self) -> None:
        super().__init__()
        kernel = keras.initializers.Constant([[30.0, 0.0]])
        self.head = keras.layers.Dense(2, activation="softmax", kernel_initializer=kernel)
        self.head.build((None, 1))

    @property
    def trainable_variables(self) -> list[Any]:
        return list(self.head.trainable_variables)

    def __call__(self, x: Any) -> Any:
        return self.head(x)


def test_probabilities_of_a_keras_layer_inside_stay_in_float32() -> None:
    def cross_entropy(model: Any, batch: Any) -> Any:
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(batch["y"], model(batch["x"])))

    made = recipe("mixed_bfloat16")
    data = {"x": np.ones((1, 1), np.float32), "y": np.ones(1, np.int32)}
    _, result = polyamp.train_step(cross_entropy, made)(polyamp.init(Classifier(), made), data)
    assert float(result.loss) == pytest.approx(float(keras.ops.log(1.0 + np.exp(30.0))), rel=1e-6)


def test_a_keras_layer_that_a_module_does_not_see_is_refused() -> None:
    class Unseen(Linear):
        def __init__(self) -> None:
            super().__init__(FIRST)
            self.layer = keras.layers.Dense(3)
            self.layer.build((None, 5))

    model = Unseen()
    assert len(model.trainable_variables) == 1, "tf.Module sees its own variable alone"
    for policy in ("float32", "mixed_bfloat16"):
        with pytest.raises(
            ModelError, match=r"'dense\w*/kernel' of a Keras layer is not in the model's trainable_variables"
        ):
            polyamp.init(model, recipe(policy))


def test_what_cannot_be_cast_is_refused() -> None:
    outside = tf.Variable(FIRST, name="outside")

    class Closure(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
        trainable_variables = (outside,)

        def __call__(self, x: Any) -> Any:
            return x @ outside

    with pytest.raises(UnsupportedError, match=r"Closure, which keeps 'outside:0' elsewhere\. Make it an attribute"):
        polyamp.init(Closure(), recipe("mixed_bfloat16"))
    polyamp.init(Closure(), recipe())
    for policy in (
        polyamp.Policy("mixed_bfloat16", mode="autocast"),
        polyamp.Policy("mixed_bfloat16", overrides={"parts/*": "float32"}),
    ):
        with pytest.raises(
            UnsupportedError, match=r"finest grain of mode='autocast' and of overrides.*Received: Nested"
        ):
            polyamp.init(Nested(), recipe(policy))


def test_names_of_variables_in_checkpoints() -> None:
    made = recipe()
    state = polyamp.init(Linear(np.ones((4, 3), np.float32)), made)
    before = float(polyamp.train_step(loss_fn, made)(state, batch())[1].loss)
    assert float(polyamp.train_step(loss_fn, made)(state, batch())[1].loss) < before
    assert "model/kernel" in polyamp_tensorflow.BACKEND.export_state(state)
