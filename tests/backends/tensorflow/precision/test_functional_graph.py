"""S4 in detail, as far as the graph of a functional model tells: what feeds a logarithm or `1 - x`, products that are
sums or multiplications, gathers whose gradients are sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp_keras.engines.tensorflow import to_dense
from polyamp_tensorflow import apply_policy

layers, ops = keras.layers, keras.ops
POLICY = polyamp.Policy("mixed_bfloat16")
X = np.linspace(-7.0, 7.0, 4 * 8, dtype=np.float32).reshape(4, 8)
NARROW = tf.cast(X, tf.bfloat16)


def functional(operation: Callable[[Any], Any], shape: tuple[int, ...] = (8,)) -> Any:
    """The operation in the middle of a model, between layers that compute in 16 bits."""
    inputs = keras.Input(shape)
    middle = operation(layers.Identity(name="before")(inputs))
    return keras.Model(inputs, layers.Dense(2, kernel_initializer="ones", name="after")(middle))


def reasons(applied: Any) -> dict[str, tuple[str | None, str]]:
    """By name without Keras's numbers."""
    return {name.rstrip("0123456789_"): choice for name, choice in applied.choices.items()}


FEEDING: dict[str, Callable[[Any], Any]] = {
    "log(p + eps)": lambda x: ops.log(ops.sigmoid(x) + 1e-6),
    "log(1 - p)": lambda x: ops.log(1.0 - ops.sigmoid(x)),
    "log1p(-p)": lambda x: ops.log1p(-ops.sigmoid(x)),
    "log(1 - tanh^2)": lambda x: ops.log(1 - ops.square(ops.tanh(x)) + 1e-3),
    "log(erfc)": lambda x: ops.log(ops.erfc(x / 4)),
    "1 - p": lambda x: 1 - ops.sigmoid(x),
    "through layers": lambda x: ops.log(layers.Reshape((8,))(layers.Activation("sigmoid")(x))),
    "through a clip": lambda x: ops.log10(ops.clip(ops.reshape(ops.sigmoid(x), (-1, 8)), 1e-6, 1.0)),
    "a logarithm as a layer": lambda x: layers.Lambda(ops.log)(layers.Activation("sigmoid")(x)),
    "a sequential model inside": lambda x: ops.log(
        keras.Sequential([keras.Input((8,)), layers.Activation("sigmoid")])(x)
    ),
}


@pytest.mark.parametrize("name", FEEDING)
def test_s04_what_feeds_a_logarithm_is_float32(name: str) -> None:
    model = functional(FEEDING[name])
    wanted = model(tf.cast(NARROW, tf.float32)).numpy()
    with apply_policy(model, POLICY):
        found = model(NARROW).numpy()
    assert np.array_equal(found, wanted)


def test_s04_only_what_lies_between_is() -> None:
    """Neither what comes before the saturating function, nor a saturating function that nothing sensitive follows."""
    hidden = layers.Dense(8, name="dense")
    gate = layers.Dense(8, activation="sigmoid", name="gate")
    model = functional(lambda x: ops.log(1.0 - gate(hidden(x))) * layers.Activation("tanh", name="free")(x))
    with apply_policy(model, POLICY) as applied:
        found = reasons(applied)
    assert found["gate"] == ("float32", "sensitive")
    assert found["subtract"] == found["log"] == ("float32", "sensitive")
    assert found["dense"] == found["free"] == ("bfloat16", "compute")
    with apply_policy(model, POLICY.replace(op_list="native")) as applied:
        assert "subtract" not in reasons(applied)
        assert reasons(applied)["gate"] == ("bfloat16", "compute")


INNER: dict[str, Callable[[Any], Any]] = {
    "einsum": lambda x: ops.einsum("bi,bi->b", x, x),
    "einsum with dots": lambda x: ops.einsum("...i,...i->...", x, x),
    "Dot": lambda x: layers.Dot(axes=1)([x, x])[:, 0],
    "tensordot": lambda x: ops.tensordot(x, x, axes=[[0, 1], [0, 1]]),
    "vdot": lambda x: ops.vdot(x, x),
}


@pytest.mark.parametrize("name", INNER)
def test_s04_inner_products_are_sums(name: str) -> None:
    inputs = keras.Input((8,))
    model = keras.Model(inputs, INNER[name](layers.Identity()(inputs)))
    wide = np.square(NARROW.numpy().astype(np.float64))
    wanted = wide.sum(-1) if model.output.shape else wide.sum()
    with apply_policy(model, POLICY, heads=False) as applied:
        assert ("float32", "sensitive") in applied.choices.values()
        np.testing.assert_allclose(model(NARROW).numpy(), wanted, rtol=1e-6)


def test_s04_a_dot_layer_is_known_inside_a_model_with_its_own_call_too() -> None:
    class Similarity(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.dot, self.pairs = layers.Dot(1, name="dot"), layers.Dot((2, 2), name="pairs")

        def call(self, x: Any) -> Any:
            self.pairs([x[:, None], x[:, None]])
            return self.dot([x, x])

    model = Similarity()
    model(X)
    with apply_policy(model, POLICY) as applied:
        assert applied.choices["dot"] == ("float32", "sensitive")
        assert applied.choices["pairs"] == ("bfloat16", "compute"), "its rows are free axes"


PRODUCTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "matmul": ("product", lambda x: ops.matmul(x, ops.transpose(x))),
    "batched": ("product", lambda x: ops.einsum("bi,bj->ij", x, x)),
    "one free axis": ("product", lambda x: ops.einsum("bi,ci->b", x, x)),
    "inner": ("product", lambda x: ops.inner(x, x)),
    "outer": ("", lambda x: ops.outer(x, x)),
    "einsum of nothing": ("", lambda x: ops.einsum("bi,bj->bij", x, x)),
    "elementwise einsum": ("", lambda x: ops.einsum("bi,bi->bi", x, x)),
    "length 1": ("", lambda x: ops.matmul(x[:, :, None], x[:, None, :])),
    "tensordot of nothing": ("", lambda x: ops.tensordot(x, x, axes=0)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_s04_what_contracts_nothing_follows_its_operands(name: str) -> None:
    kind, operation = PRODUCTS[name]
    inputs = keras.Input((8,))
    model = keras.Model(inputs, operation(layers.Identity(dtype="float32")(inputs)))
    with apply_policy(model, POLICY) as applied:
        kinds = {why for _, why in applied.choices.values()} & {"product", "sensitive"}
        assert kinds == ({kind} if kind else set())
        if not kind:
            assert np.array_equal(model(X).numpy(), operation(tf.constant(X)).numpy()), "float32 operands"


GATHERS: dict[str, Callable[[Any], Any]] = {
    "take": lambda x: ops.take(x, np.zeros(8192, np.int32), axis=1),
    "take of rows": lambda x: ops.reshape(
        ops.take(x, np.repeat(np.arange(4, dtype=np.int32), 1024), axis=0), (4, 8192)
    ),
    "take_along_axis": lambda x: ops.take_along_axis(x, ops.zeros_like(ops.repeat(x, 1024, axis=1), "int32"), axis=1),
    "repeat": lambda x: ops.repeat(x, 1024, axis=1),
    "RepeatVector": lambda x: ops.reshape(layers.RepeatVector(1024)(x), (-1, 8192)),
    "UpSampling1D": lambda x: layers.UpSampling1D(1024)(x[..., None])[..., 0],
}


@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.parametrize("graph", [False, True])
def test_s04_the_gradient_of_a_gather_is_added_up_in_float32(name: str, graph: bool) -> None:
    """Against a sum in float64, where bfloat16 stops growing at 256 of a number; the result is rounded once."""
    inputs = keras.Input((8,))
    model = keras.Model(inputs, GATHERS[name](layers.Identity()(inputs)))
    upstream = np.random.default_rng(0).uniform(0.5, 1.0, (4, 8192)).astype(np.float32)

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x)
        return tf.convert_to_tensor(tape.gradient(y, x, output_gradients=tf.cast(upstream, y.dtype)))

    run = tf.function(gradient) if graph else gradient
    wanted = run(tf.constant(X)).numpy()
    with apply_policy(model, POLICY, heads=False):
        run = tf.function(gradient) if graph else gradient
        found = run(NARROW)
    assert found.dtype == tf.bfloat16
    assert np.abs(tf.cast(found, tf.float32).numpy() - wanted).max() < 0.004 * np.abs(wanted).max()


@pytest.mark.parametrize("reads", [1024, 8192])
def test_s04_an_embedding_that_is_read_often(reads: int) -> None:
    model = keras.Sequential([keras.Input((reads,), dtype="int32"), layers.Embedding(4, 3), layers.Flatten()])
    upstream = np.random.default_rng(0).uniform(0.5, 1.0, (1, reads * 3)).astype(np.float32)

    def loss_fn(model: Any, batch: Any) -> Any:
        return tf.reduce_sum(tf.cast(model(batch), tf.float32) * upstream)

    made = polyamp.Recipe(policy=POLICY, optimizer=polyamp.sgd(0.1))
    state = polyamp.init(model, made)
    _, gradients = polyamp.value_and_grad(loss_fn)(state, np.ones((1, reads), np.int32))
    (found,) = gradients.values.values()
    np.testing.assert_allclose(found.numpy()[1], upstream.reshape(reads, 3).sum(0), rtol=3e-3)


def test_s04_slices_in_16_bits_are_added_up_in_float32() -> None:
    """As of a `tf.Module` in cast mode that reads rows of its table."""
    values = tf.cast(np.random.default_rng(0).uniform(0.5, 1.0, (1024, 1)), tf.bfloat16)
    slices = tf.IndexedSlices(values, tf.zeros(1024, tf.int32), tf.constant([2, 1]))
    total = to_dense(slices, tf.zeros((2, 1)))
    assert total.dtype == tf.float32
    np.testing.assert_allclose(total.numpy()[0], tf.cast(values, tf.float64).numpy().sum(), rtol=1e-6)
