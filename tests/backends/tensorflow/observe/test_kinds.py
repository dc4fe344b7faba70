"""Models of other shapes: shared layers, several outputs, losses with gradients in them, modules, float64, replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import polyamp
from polyamp_keras.models.variables import model_variables
from polyamp_tensorflow.arrays import to_numpy
from polyamp_tensorflow.observe.observer import OBSERVER

Array = np.ndarray[Any, Any]
X = np.random.default_rng(0).standard_normal((8, 6)).astype("f4")
FLOAT64 = polyamp.Policy(param="float64", compute="float64", output="float64")


class Seen(dict[tuple[str, str], Array]):
    """What `see` got, and the dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def __call__(self, path: str, what: str, array: Array, dtype: str) -> None:
        assert (path, what) not in self
        self[path, what] = np.array(array)
        self.dtypes.add(dtype)


def watched(model: Any, loss_fn: Any, batch: Any = X, policy: Any = "float32", draws: Any = None) -> tuple[Any, Seen]:
    seen = Seen()
    state = polyamp.init(model, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)))
    with OBSERVER.disable_dropout(model, draws):
        return OBSERVER.capture_pass(state, loss_fn, batch, seen), seen


def mean_square(model: Any, batch: Any) -> Any:
    return keras.ops.mean(model(batch) ** 2)


def two_layers(**options: Any) -> Any:
    keras.utils.set_random_seed(0)
    given = keras.Input((6,))
    hidden = layers.Dropout(0.5, name="drop")(layers.Dense(5, activation="tanh", name="hidden", **options)(given))
    return keras.Model(given, layers.Dense(3, name="head", **options)(hidden))


def test_each_call_of_a_shared_layer_is_shown() -> None:
    shared = layers.Dense(6, name="shared", activation="tanh")
    given = keras.Input((6,))
    _, seen = watched(keras.Model(given, shared(shared(given))), mean_square)
    names = ["shared", "shared#2", ""]
    forward = [("shared", "input"), ("shared", "output"), ("shared#2", "input"), ("shared#2", "output"), ("", "output")]
    assert list(seen) == forward + [(name, "cotangent") for name in names[::-1]]
    np.testing.assert_array_equal(seen["shared#2", "input"], seen["shared", "output"])
    np.testing.assert_allclose(seen["shared#2", "output"], np.tanh(seen["shared", "output"] @ shared.kernel), rtol=1e-5)


def test_the_sequence_of_a_recurrent_layer_and_dense_gradients_of_an_embedding() -> None:
    given = keras.Input((4,), dtype="int32")
    vectors = layers.Embedding(7, 5, name="words")(given)
    sequence, last = layers.GRU(3, return_state=True, return_sequences=True, name="memory")(vectors)
    unused = layers.Dense(2, name="unused")(sequence)
    model = keras.Model(given, {"b": sequence, "z": last, "c": unused})
    tokens = np.arange(32).reshape(8, 4) % 6
    found, seen = watched(model, lambda model, batch: tf.reduce_mean(model(batch)["b"] ** 2), tokens)
    assert seen["memory", "output"].shape == (8, 4, 3)
    assert [path for path, what in seen if what == "output"] == ["words", "memory", "unused", ""]
    assert ("unused", "cotangent") not in seen
    assert found.gradients["unused/kernel"] is None
    assert found.gradients["words/embeddings"].shape == (7, 5)
    assert not found.gradients["words/embeddings"][6].any()
    assert np.abs(found.gradients["words/embeddings"][:6]).sum(1).all()


def test_a_cotangent_of_rows_is_dense_and_a_scalar_output_is_shown() -> None:
    given = keras.Input((6,))
    rows = layers.Dense(4, name="rows")(given)
    picked = layers.Lambda(lambda x: tf.gather(x, [1, 1, 3]), name="picked")(rows)
    mean = layers.Lambda(lambda x: tf.reduce_mean(x), name="mean")(rows)
    model = keras.Model(given, [picked, mean])
    policy = polyamp.Policy("mixed_bfloat16", overrides={"mean": "bfloat16"})
    _, seen = watched(model, lambda model, batch: tf.reduce_sum(model(batch)[0]), policy=policy)
    np.testing.assert_array_equal(seen["rows", "cotangent"], np.array([0, 2, 0, 1, 0, 0, 0, 0])[:, None] * np.ones(4))
    assert seen["mean", "output"].shape == ()


def test_a_gradient_that_the_loss_takes_is_no_cotangent() -> None:
    def penalty(model: Any, batch: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(batch)
            total = tf.reduce_sum(model(batch))
        return tf.reduce_mean(tape.gradient(total, batch) ** 2)

    model = two_layers()
    found, seen = watched(model, penalty)
    with tf.GradientTape() as outer:
        weights = [variable.value for variable in model.trainable_variables]
        with tf.GradientTape() as inner:
            x = tf.constant(X)
            inner.watch(x)
            total = tf.reduce_sum(model(x, training=False))
        loss = tf.reduce_mean(inner.gradient(total, x) ** 2)
    wanted = outer.gradient(loss, weights)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(found.gradients["hidden/kernel"], wanted[0], rtol=1e-5, atol=1e-7)
    assert ("hidden", "output") in seen


def test_a_layer_that_runs_again_for_the_backward_pass_is_seen_once() -> None:
    plain, seen_plain = watched(two_layers(), mean_square)
    with keras.RematScope(mode="full"):
        again, seen = watched(two_layers(), mean_square)
    assert set(seen) == set(seen_plain)
    for key, array in seen_plain.items():
        np.testing.assert_allclose(seen[key], array, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(again.gradients["hidden/kernel"], plain.gradients["hidden/kernel"], rtol=1e-5)


class Linear(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
    """A model that is no Keras layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(np.eye(6, 3, dtype="f4"), name="w")

    def __call__(self, x: Any) -> Any:
        return {"y": x @ tf.cast(self.w, x.dtype), "rate": 1.0}


def test_a_module_shows_its_own_output() -> None:
    model = Linear()
    found, seen = watched(model, lambda model, batch: tf.reduce_mean(model(batch)["y"]), policy="mixed_bfloat16")
    assert list(seen) == [("", "output"), ("", "cotangent")]
    np.testing.assert_allclose(seen["", "output"], X[:, :3], rtol=1e-2)
    np.testing.assert_allclose(found.gradients["w"], np.repeat(X.sum(0)[:, None], 3, 1) / 24, atol=1e-2)
    assert found.hidden_reason == "Linear is no Keras layer, so its parts are not seen."
    with pytest.raises(polyamp.UnsupportedError, match="in float64 where"), OBSERVER.model_copy(model, wide=True):
        pass


def test_operations_and_the_dtypes_they_ran_in() -> None:
    given = keras.Input((6,))
    hidden = layers.LayerNormalization(name="norm")(layers.Dense(5, name="hidden")(given))
    model = keras.Model(given, layers.Softmax(name="soft")(hidden))
    found, _ = watched(model, lambda model, batch: tf.reduce_sum(model(batch)), policy="mixed_bfloat16")
    rows = {(row.module, row.name): (row.dtype, row.rule, row.count) for row in found.operations}
    assert rows["hidden", "MatMul"] == ("bfloat16", "compute", 1)
    assert rows["norm", "Rsqrt"] == ("float32", "normalisation", 1)
    assert rows["soft", "Softmax"] == ("float32", "softmax", 1)
    assert rows["", "Sum"] == ("float32", "sums", 1)


def test_in_float64_everything_is_and_afterwards_as_before() -> None:
    keras.utils.set_random_seed(0)
    given = keras.Input((6,))
    inner = keras.Sequential([keras.Input((5,)), layers.Dense(4, activation="gelu", name="inner")], name="part")
    hidden = layers.BatchNormalization(name="norm")(layers.Dense(5, name="hidden")(given))
    model = keras.Model(given, layers.Dense(2, name="head")(inner(hidden) * 2.0))
    held = [(variable.value, to_numpy(variable)) for variable in model.variables]
    narrow, seen = watched(model, mean_square)
    with OBSERVER.model_copy(model, wide=True) as lent:
        wide, seen_wide = watched(lent, mean_square, policy=FLOAT64)
        state = polyamp.init(lent, polyamp.Recipe(policy=FLOAT64, optimizer=polyamp.adam(0.1)))
        polyamp.train_step(mean_square, state.recipe, compile=False)(state, X)
        assert {to_numpy(variable).dtype.name for variable in lent.variables} == {"float64"}
    assert seen_wide.dtypes == {"float64"}
    for key, array in seen.items():
        if key == ("hidden", "input"):
            continue
        distance = np.linalg.norm(seen_wide[key] - array) / np.linalg.norm(array)
        assert 1e-9 < distance < 1e-5, key
    for name, gradient in narrow.gradients.items():
        assert wide.gradients[name].dtype == np.float64
        np.testing.assert_allclose(gradient, wide.gradients[name], atol=1e-6)
    assert keras.config.floatx() == "float32"
    assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}
    assert [str(tensor.dtype) for tensor in (*model.inputs, *inner.inputs)] == ["float32", "float32"]
    for variable, (value, array) in zip(model.variables, held, strict=True):
        assert variable.value is value
        np.testing.assert_array_equal(to_numpy(variable), array)


def test_a_loss_that_float64_does_not_go_through_says_so() -> None:
    model = two_layers()
    match = "in float64 the model or loss_fn fails"
    with pytest.raises(polyamp.UnsupportedError, match=match), OBSERVER.model_copy(model, wide=True) as lent:
        watched(lent, lambda model, batch: tf.reduce_mean(model(batch) * tf.constant(2.0)), policy=FLOAT64)


def test_replicas_show_what_one_device_shows(two_cpus: Any) -> None:
    def draws() -> Any:
        rng = np.random.default_rng(3)
        return lambda shape: rng.random(shape, np.float32)

    one, seen_one = watched(two_layers(), mean_square, draws=draws())
    with two_cpus.scope():
        model = two_layers()
    before = {name: to_numpy(variable) for name, variable in model_variables(model).parameters.items()}
    with OBSERVER.model_copy(model) as lent:
        two, seen_two = watched(lent, mean_square, draws=draws())
        state = polyamp.init(lent, polyamp.Recipe(optimizer=polyamp.sgd(0.1)))
        assert state.strategy is two_cpus
        state.optimizer.learning_rate = 0.1
        state.variables.parameters["head/bias"].assign(np.ones(3))
    with OBSERVER.model_copy(model, inference=True) as lent:
        seen_again = Seen()
        OBSERVER.capture_pass(
            polyamp.init(lent, polyamp.Recipe(optimizer=polyamp.sgd(0.1))), mean_square, X, seen_again
        )
    np.testing.assert_array_equal(seen_again["drop", "output"], seen_again["drop", "input"])
    np.testing.assert_allclose(two.loss, one.loss, rtol=1e-6)
    assert list(seen_two) == list(seen_one)
    for key, array in seen_one.items():
        np.testing.assert_allclose(seen_two[key], array, rtol=1e-5, atol=1e-7)
    for name, gradient in one.gradients.items():
        np.testing.assert_allclose(two.gradients[name], gradient, rtol=1e-5, atol=1e-7)
    for name, array in before.items():
        np.testing.assert_array_equal(to_numpy(model_variables(model).parameters[name]), array)
