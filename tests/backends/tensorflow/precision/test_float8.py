"""Products in 8 bits in TensorFlow (S36): under XLA, saved codes, loops, explain, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_keras
from polyamp import Float8, Policy, UnsupportedError
from polyamp.reference import float8 as reference
from polyamp_keras.precision.float8_products import multiply, quantizer
from tests.fixtures import float8_values

POLICY = Policy("mixed_float8", float8=Float8(emulate=True))
X = np.sin(3 * np.linspace(-1.0, 1.0, 8 * 16)).reshape(8, 16).astype("float32")


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("form", float8_values.FORMATS)
def test_s36_codes_in_graphs_have_the_references_bits(form: str, jit_compile: bool) -> None:
    function = tf.function(lambda x: quantizer.quantize(x, form), jit_compile=jit_compile)
    for kind in float8_values.KINDS:
        x = float8_values.values(kind)
        want, got = reference.quantize(x, form), function(tf.constant(x, tf.bfloat16))
        assert int(got.exponent) == want.exponent
        np.testing.assert_array_equal(float8_values.bits(got.numbers.numpy()), float8_values.bits(want.numbers))


def small_network() -> Any:
    """Two layers and a head, with Keras's automatic names for the layers."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((16,)), dense(32, "relu"), dense(32, "relu"), dense(16, name="head")])


def loss_fn(model: Any, batch: Any) -> Any:
    return tf.reduce_mean((model(batch["x"]) - batch["y"]) ** 2)


def train(model: Any, policy: Policy = POLICY, **options: Any) -> list[np.ndarray[Any, Any]]:
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.5))
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe, **options)
    for _ in range(2):
        state, _ = step(state, {"x": X, "y": np.cos(X)})
    return [np.asarray(each) for each in model.get_weights()]


@pytest.mark.parametrize("options", [{"compile": False}, {"jit_compile": True}], ids=["eager", "XLA"])
def test_s36_a_step_has_the_same_numbers_eager_and_under_xla(options: Any) -> None:
    for got, want in zip(train(small_network(), **options), train(small_network()), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-8)


def test_s36_what_is_kept_of_an_activation_is_its_codes() -> None:
    w = tf.constant(float8_values.products()[1], tf.bfloat16)
    with tf.GradientTape() as tape:
        x = tf.cast(tf.constant(float8_values.products()[0]), tf.bfloat16)
        tape.watch(w)
        kept = weakref.ref(x)
        out = multiply(x, w, Float8(emulate=True))
        del x
        gc.collect()
        assert kept() is None
    assert tape.gradient(out, w).shape == w.shape


def float8_rules(model: Any, policy: Policy = POLICY) -> list[str]:
    rows = polyamp.explain(loss_fn, policy, model, {"x": X, "y": np.cos(X)}).operations
    return [row.rule for row in rows if row.name == "MatMul" and row.direction == "forward"]


def test_s36_explain_names_the_reason_of_each_product() -> None:
    assert float8_rules(small_network()) == ["float8", "float8", "compute (head)"]
    chosen = POLICY.replace(overrides={"head": "float8", "dense": "bfloat16"})
    assert float8_rules(small_network(), chosen) == ["override", "float8", "float8"]


def test_s36_products_in_loops_over_time() -> None:
    """A wrapper maps a layer over more than 16 steps at once, and a layer of one's own runs another in a loop."""

    class Loop(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(16)

        def build(self, shape: Any) -> None:
            self.dense.build((shape[0], shape[-1]))

        def call(self, x: Any) -> Any:
            steps = tf.range(tf.shape(x)[1])
            return tf.foldl(lambda h, number: tf.nn.relu(self.dense(h)) + x[:, number], steps, tf.zeros_like(x[:, 0]))

        def compute_output_shape(self, shape: Any) -> Any:
            return shape[0], shape[-1]

    x = np.resize(X, (4, 20, 16)).astype("float32")
    for layer in (keras.layers.TimeDistributed(keras.layers.Dense(32)), Loop()):
        model = keras.Sequential([keras.Input((20, 16)), layer])
        recipe = polyamp.Recipe(policy=POLICY, optimizer=polyamp.sgd(0.1))
        state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe)
        before = [np.asarray(each) for each in model.get_weights()]
        y = np.zeros(model.output_shape[1:], "float32")[None].repeat(4, 0)
        step(state, {"x": x, "y": y})
        moved = [np.abs(new - old).max() for old, new in zip(before, model.get_weights(), strict=True)]
        assert all(0 < each < np.inf for each in moved)
        with polyamp_keras.apply_policy(model, POLICY, heads=False) as applied:
            assert [why for _, why in applied.choices.values()].count("float8") == 1


def test_s36_a_sparse_input_is_multiplied_in_16_bits() -> None:
    layer, half = keras.layers.Dense(16), Policy("mixed_bfloat16")
    layer.build((8, 16))
    sparse = tf.sparse.from_dense(np.where(X > 0, X, 0).astype("float32"))
    got, want = (np.asarray(policy.autocast(layer)(sparse)) for policy in (POLICY, half))
    np.testing.assert_array_equal(got, want)


def test_s36_a_function_and_a_module_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="float8 covers products of Keras's Dense and EinsumDense layers"):
        POLICY.autocast(lambda x: tf.matmul(x, x))(tf.constant(X))

    class Linear(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(tf.ones((16, 16)))

        def __call__(self, x: Any) -> Any:
            return x @ self.w

    with pytest.raises(UnsupportedError, match="float8 covers products of Keras's Dense and EinsumDense layers"):
        polyamp.init(Linear(), polyamp.Recipe(policy=POLICY, optimizer=polyamp.sgd(0.1)))


def test_s36_products_that_are_not_emulated_are_refused_before_the_first_step() -> None:
    with pytest.raises(UnsupportedError, match=r"multiplies no 8-bit floats.*Float8\(emulate=True\)"):
        polyamp.init(small_network(), polyamp.Recipe(policy="mixed_float8", optimizer=polyamp.sgd(0.5)))
