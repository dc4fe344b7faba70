"""Policies on layers that are unusual, or that change while a policy is on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from polyamp import Policy
from polyamp.errors import PolicyError, UnsupportedError
from polyamp_tensorflow import apply_policy

layers = keras.layers
BFLOAT16, FLOAT16 = Policy("mixed_bfloat16"), Policy("mixed_float16")
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
# Keras, in quantize() and export()
ARRAYS = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def dense() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((8,)), layers.Dense(4, name="first"), layers.Dense(3, name="last")])


def quantize(net: Any) -> None:
    for layer in net.layers:
        layer.quantize("int8")


# Not built.


class Lazy(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Creates its sublayers when it is built."""

    def build(self, shape: Any) -> None:
        self.dense, self.norm = layers.Dense(8, name="dense"), layers.LayerNormalization(name="norm")
        self.dense.build(shape)
        self.norm.build(shape)

    def call(self, x: Any) -> Any:
        return x + self.norm(self.dense(x))


def test_autocast_builds_a_layer_before_its_policy_is_chosen() -> None:
    """The first call used to give another result than the second: its new sublayers were not seen."""
    layer = Lazy()
    function = BFLOAT16.autocast(layer)
    first, second = function(X), function(X)
    assert np.array_equal(first, second)
    assert layer.norm.compute_dtype == layer.dense.compute_dtype == "float32"
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(BFLOAT16.autocast(Lazy())(X))
    assert len(tape.watched_variables()) == 4
    assert loss.dtype == tf.float32


def test_overrides_of_a_layer_that_is_not_built_are_checked_when_it_is() -> None:
    layer = Lazy()
    function = BFLOAT16.replace(overrides={"dense": "float32"}).autocast(layer)
    assert np.array_equal(function(X), function(X))
    with pytest.raises(PolicyError, match=r"'dnese' matches no module path. Nearest: 'dense'"):
        BFLOAT16.replace(overrides={"dnese": "float32"}).autocast(Lazy())(X)
    with pytest.raises(UnsupportedError, match="Received: param='float32', compute='float64'"):
        BFLOAT16.replace(overrides={"dense": "float64"}).autocast(Lazy())


def test_a_model_that_vectorizes_text_is_built() -> None:
    """Keras calls the lookup inside `TextVectorization` past its `__call__`, and never marks it as built."""
    vectorize = layers.TextVectorization(max_tokens=20, output_sequence_length=3)
    vectorize.adapt(["a b c", "d e"])
    parts = [vectorize, layers.Embedding(20, 4), layers.GlobalAveragePooling1D(), layers.Dense(2)]
    net = keras.Sequential([keras.Input((1,), dtype="string"), *parts])
    x = tf.constant([["a b"], ["d"]])
    whole = net(x)
    with apply_policy(net, BFLOAT16):
        np.testing.assert_allclose(net(x), whole, atol=1e-3)
        assert parts[1].compute_dtype == "bfloat16"
    recipe = polyamp.Recipe(policy=BFLOAT16, optimizer=polyamp.sgd(0.1))
    polyamp_tensorflow.compile(net, recipe, loss="mse", jit_compile=False)
    history = net.fit(x, np.ones((2, 2), np.float32), epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]


# Layers that float32 was made for.


def test_what_is_masked_is_decided_in_float32() -> None:
    """1001 and 1000 are one number in bfloat16, and 1e-9 and 0 in float16."""
    for value, policy in ((1000.0, BFLOAT16), (0.0, FLOAT16)):
        masking = layers.Masking(mask_value=value)
        net = keras.Sequential([keras.Input((4, 1)), masking, layers.LSTM(2), layers.Dense(2)])
        x = np.array([[[value], [1001.0], [1e-9], [3.0]]], np.float32)
        with apply_policy(net, policy) as applied:
            assert applied.choices[masking.name] == ("float32", "sensitive")
            assert masking(x)._keras_mask.numpy().tolist() == [[False, True, True, True]]
            net(x)


@ARRAYS
def test_an_exported_model_as_a_layer_keeps_the_dtypes_that_it_was_traced_with(tmp_path: Path) -> None:
    exported = keras.Sequential([keras.Input((8,)), layers.Dense(8)])
    exported.export(tmp_path / "exported", verbose=False)
    inside = layers.TFSMLayer(tmp_path / "exported", call_endpoint="serve", name="inside")
    net = keras.Sequential([keras.Input((8,)), layers.Dense(8), inside, layers.Dense(8), layers.Dense(2)])
    whole = net(X)
    with apply_policy(net, BFLOAT16) as applied:
        assert applied.choices["inside"] == ("float32", "constants")
        np.testing.assert_allclose(net(X), whole, atol=0.05)


# Layers that change under a policy.


@ARRAYS
def test_a_model_that_is_quantized_under_a_policy_stays_so() -> None:
    """Its kernels are integers from then on; taken for float32 ones they give results in the ten thousands."""
    net = dense()
    whole = net(X)
    with apply_policy(net, BFLOAT16):
        quantize(net)
        assert net.layers[0].dtype_policy.name == "int8_from_mixed_bfloat16"
        np.testing.assert_allclose(net(X), whole, atol=0.1)
    assert [layer.dtype_policy.name for layer in net.layers] == ["int8_from_float32"] * 2
    np.testing.assert_allclose(net(X), whole, atol=0.1)
    outer = apply_policy(net, FLOAT16)
    assert outer.choices["first"] == (None, "quantized")
    np.testing.assert_allclose(net(X), whole, atol=0.1)


@ARRAYS
def test_a_policy_on_top_of_one_that_a_model_was_quantized_under() -> None:
    net = dense()
    whole = net(X)
    below = apply_policy(net, BFLOAT16)
    quantize(net)
    with apply_policy(net, FLOAT16) as above:
        assert above.choices["first"] == (None, "quantized")
        np.testing.assert_allclose(net(X), whole, atol=0.1)
    below.restore()
    assert net.layers[0].dtype_policy.name == "int8_from_float32"
    np.testing.assert_allclose(net(X), whole, atol=0.1)


def test_a_method_that_was_put_on_a_layer_stays() -> None:
    """As in `layer.call = tf.function(layer.call)`."""
    net = dense()
    first, seen = net.layers[0], []
    own = first.call

    def call(x: Any) -> Any:
        seen.append(x.dtype)
        return 2 * own(x)

    first.call = call
    doubled = net(X)
    with apply_policy(net, BFLOAT16):
        seen.clear()
        np.testing.assert_allclose(net(X), doubled, atol=0.1)
        assert seen == [tf.bfloat16]
    assert first.call is call
    assert np.array_equal(net(X), doubled)
