"""Which layers compute in float32 (S4), to the bit, and what they hand on inside layers with their own call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from polyamp import Policy
from polyamp.errors import ModelError
from polyamp_tensorflow import apply_policy
from polyamp_tensorflow.precision.autocast import apply_layer_policies, resolve_policy

layers = keras.layers
POLICY = Policy("mixed_bfloat16")
X = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32) * 7.0
NARROW = tf.cast(X, tf.bfloat16)

FLOAT32: dict[str, Callable[[], Any]] = {
    "BatchNormalization": lambda: layers.BatchNormalization(),
    "LayerNormalization": lambda: layers.LayerNormalization(),
    "GroupNormalization": lambda: layers.GroupNormalization(2),
    "RMSNormalization": lambda: layers.RMSNormalization(),
    "UnitNormalization": lambda: layers.UnitNormalization(),
    "Softmax": lambda: layers.Softmax(),
    "GlobalAveragePooling1D": lambda: layers.GlobalAveragePooling1D(),
    "Normalization": lambda: layers.Normalization(mean=3.0, variance=2.0),
    "Rescaling": lambda: layers.Rescaling(1.0 / 255),
    "Activation(softmax)": lambda: layers.Activation("softmax"),
    "Activation(exponential)": lambda: layers.Activation("exponential"),
    "Activation(softplus)": lambda: layers.Activation("softplus"),
    "Activation(keras.ops.logsumexp)": lambda: layers.Activation(keras.ops.logsumexp),
    "Lambda(tf.reduce_sum)": lambda: layers.Lambda(tf.reduce_sum),
    "Lambda(tf.exp)": lambda: layers.Lambda(tf.exp),
    "Dense(softmax)": lambda: layers.Dense(4, activation="softmax"),
    "EinsumDense(log_softmax)": lambda: layers.EinsumDense("abc,cd->abd", (3, 4), activation="log_softmax"),
    "TimeDistributed(LayerNormalization)": lambda: layers.TimeDistributed(layers.LayerNormalization()),
}
COMPUTE: dict[str, Callable[[], Any]] = {
    "Dense": lambda: layers.Dense(4, activation="gelu"),
    "Dense(sigmoid)": lambda: layers.Dense(4, activation="sigmoid"),
    "Conv1D": lambda: layers.Conv1D(4, 2),
    "Activation(sigmoid)": lambda: layers.Activation("sigmoid"),
    "ReLU": lambda: layers.ReLU(),
    "Lambda": lambda: layers.Lambda(lambda x: x * 2),
    "MaxPooling1D": lambda: layers.MaxPooling1D(),
    "LSTM": lambda: layers.LSTM(4),
}


@pytest.mark.parametrize("name", FLOAT32)
def test_s04_a_sensitive_layer_gives_what_it_gives_on_a_float32_copy_of_its_input(name: str) -> None:
    """Inside a functional model, after a layer that computes in 16 bits, and followed by another."""
    layer = FLOAT32[name]()
    inputs = keras.Input(X.shape[1:])
    model = keras.Model(inputs, layer(layers.Identity()(inputs)))
    want = layer(tf.cast(NARROW, tf.float32))
    with apply_policy(model, POLICY, heads=False) as applied:
        got = model(X)
        assert layer.compute_dtype == "float32", applied.choices
        assert model.layers[1].compute_dtype == "bfloat16"
    assert got.dtype == tf.float32
    assert np.array_equal(got, want)


@pytest.mark.parametrize("name", COMPUTE)
def test_s04_other_layers_compute_in_16_bits(name: str) -> None:
    layer = COMPUTE[name]()
    inputs = keras.Input(X.shape[1:])
    model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(layer(inputs))))
    with apply_layer_policies(model, resolve_policy(model, POLICY)):
        assert layer.compute_dtype == "bfloat16"
        assert layer(NARROW).dtype == tf.bfloat16


@pytest.mark.parametrize("settings", [{"mode": "cast"}, {"op_list": "native"}])
@pytest.mark.parametrize(
    "name", ["LayerNormalization", "BatchNormalization", "GlobalAveragePooling1D", "Activation(exponential)"]
)
def test_s04_cast_mode_and_the_native_list_have_no_islands(name: str, settings: Any) -> None:
    layer = FLOAT32[name]()
    inputs = keras.Input(X.shape[1:])
    model = keras.Model(inputs, layers.Dense(2)(keras.ops.exp(layer(inputs))))
    with apply_layer_policies(model, resolve_policy(model, POLICY.replace(**settings))):
        assert layer.compute_dtype == "bfloat16"
        assert model.operations[2].call(NARROW).dtype == tf.bfloat16
    assert model.operations[2].call(NARROW).dtype == tf.bfloat16


def test_s04_a_policy_that_stores_16_bits_has_no_islands_but_runs() -> None:
    keras.config.set_dtype_policy("bfloat16")
    try:
        model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.LayerNormalization(), layers.Softmax()])
    finally:
        keras.config.set_dtype_policy("float32")
    with apply_policy(model, Policy("params=bf16,compute=bf16,output=bf16")):
        assert {layer.compute_dtype for layer in model.layers} == {"bfloat16"}
        assert model(X[0]).dtype == tf.bfloat16


class Custom(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Records what its sublayers return."""

    def __init__(self, *inner: Any, constant: bool = False) -> None:
        super().__init__()
        self.inner = list(inner)
        self.returned: list[str] = []
        if constant:
            self.gain = tf.constant(2.0)

    def call(self, x: Any) -> Any:
        for layer in self.inner:
            x = layer(x) + tf.cast(0.0, x.dtype)  # refused by TensorFlow if the layer returned another dtype
            self.returned.append(x.dtype.name)
        return x * self.gain if hasattr(self, "gain") else x


def test_s04_inside_a_custom_layer_results_are_rounded_to_the_layers_dtype() -> None:
    inner = keras.Sequential([keras.Input((3, 8)), layers.Dense(8), layers.LayerNormalization()])
    block = Custom(layers.LayerNormalization(), layers.Dense(8, activation="softmax"), inner, layers.Dense(8))
    wide = [layer(tf.cast(NARROW, tf.float32)) for layer in block.inner[:1]]
    block(X)
    model = keras.Sequential([keras.Input((3, 8)), block, layers.Dense(2)])
    block.returned.clear()
    with apply_policy(model, POLICY):
        model(X)
        assert set(block.returned) == {"bfloat16"}
        first = block.inner[0](NARROW)
    assert np.array_equal(first, tf.cast(wide[0], tf.bfloat16)), "computed in float32, rounded once"


def test_s04_the_models_output_is_not_rounded_on_its_way_through_custom_layers() -> None:
    norm = layers.LayerNormalization()

    class Outer(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def call(self, x: Any) -> Any:
            return {"y": self.norm(x), "count": tf.shape(x)[0]}

    model = Outer()
    want = model(tf.cast(NARROW, tf.float32))["y"]
    with apply_policy(model, POLICY):
        assert norm(NARROW).dtype == tf.bfloat16
        found = tf.function(lambda x: model(x))(X)
    assert found["y"].dtype == tf.float32
    assert np.array_equal(found["y"], want)
    assert found["count"].dtype == tf.int32


def test_s04_a_lambda_over_a_float32_tensor_runs_in_float32() -> None:
    gain = tf.constant(2.0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.Lambda(lambda x: x * gain), layers.Dense(2)])
    with apply_policy(model, POLICY) as applied:
        assert model(X[0]).dtype == tf.float32
        assert applied.choices[model.layers[1].name] == ("float32", "constants")


def test_s04_a_layer_with_constants_runs_in_float32_and_its_sublayers_do_not() -> None:
    inner = keras.Sequential([keras.Input((3, 8)), layers.Dense(8)])
    plain, held = Custom(layers.Dense(8)), Custom(layers.Dense(8), inner, constant=True)
    model = keras.Sequential([keras.Input((3, 8)), plain, held])
    for layer in (plain, held):
        layer.returned.clear()
    with apply_policy(model, POLICY, heads=False) as applied:
        model(X)
        assert applied.choices[held.name] == ("float32", "constants")
        assert held.inner[0].compute_dtype == "bfloat16"
    assert (plain.returned, held.returned) == (["bfloat16"], ["float32"] * 2)
    with (
        apply_policy(model, POLICY.replace(overrides={held.name: "bfloat16"})),
        pytest.raises(
            ModelError, match=rf"layer '{held.name}' \(Custom\) computes with operands of bfloat16 and float32"
        ),
    ):
        model(X)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["dot", "concat", "additive"])
def test_s04_attention_layers_have_their_softmax_in_float32(kind: str, masked: bool) -> None:
    made = layers.AdditiveAttention() if kind == "additive" else layers.Attention(score_mode=kind, dropout=0.2)
    inputs = [tf.cast(NARROW, tf.float32)] * 2
    mask = [tf.ones((2, 3), tf.bool), tf.constant([[True, True, False], [True, False, False]])] if masked else None
    want, shares = made(inputs, mask=mask, return_attention_scores=True)
    with apply_layer_policies(made, resolve_policy(made, POLICY)):
        traced = tf.function(lambda: made(inputs, mask=mask, return_attention_scores=True))
        got, narrow = traced()
        nodes = traced.get_concrete_function().graph.get_operations()
        inside = {
            (node.type, node.inputs[0].dtype.name) for node in nodes if node.type in ("Softmax", "BatchMatMulV2", "Sum")
        }
    assert ("Softmax", "float32") in inside
    assert ("BatchMatMulV2", "bfloat16") in inside
    assert not inside & {("Softmax", "bfloat16"), ("BatchMatMulV2", "float32"), ("Sum", "bfloat16")}
    np.testing.assert_allclose(tf.cast(narrow, tf.float32), shares, atol=0.02)
    np.testing.assert_allclose(got, want, atol=0.05 * float(np.abs(X).max()))
    if masked:
        assert float(tf.cast(narrow, tf.float32)[0, 0, 2]) == 0.0


@pytest.mark.parametrize("kind", ["dot", "additive"])
def test_s04_attention_layers_drop_shares_in_training(kind: str) -> None:
    """Half of them are 0, and the others twice what they are."""
    made = (layers.AdditiveAttention if kind == "additive" else layers.Attention)(dropout=0.5, seed=3)
    inputs = [tf.cast(np.tile(NARROW, (8, 1, 1)), tf.float32)] * 2
    with apply_layer_policies(made, resolve_policy(made, POLICY)):
        (_, whole), (_, left) = (made(inputs, return_attention_scores=True, training=how) for how in (False, True))
    whole, left = (tf.cast(shares, tf.float32).numpy() for shares in (whole, left))
    dropped = left == 0.0
    assert 0.3 < dropped[whole > 0.01].mean() < 0.7
    np.testing.assert_allclose(left[~dropped], 2.0 * whole[~dropped], rtol=0.01)


def test_s04_a_sum_that_float16_cannot_hold() -> None:
    ones = tf.ones((2, 64_000), tf.float16)
    total = layers.Lambda(tf.reduce_sum)
    assert np.isinf(tf.reduce_sum(ones)), "what 16 bits make of it"
    with apply_layer_policies(total, resolve_policy(total, Policy("mixed_float16"))):
        assert float(total(ones)) == 128_000.0


def test_s04_spectral_normalization_does_not_round_the_masters() -> None:
    """It assigns its layer's kernel in the forward pass; computed in 16 bits, that would round the master weights."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), layers.SpectralNormalization(layers.Dense(4)), layers.Dense(2)])
    kernel = model.layers[0].layer.kernel
    start = kernel.numpy()
    vector = model.layers[0].vector_u.numpy()
    with apply_policy(model, POLICY):
        model(X[0], training=True)
        inside = kernel.numpy()
        assert model.layers[0](X[0]).dtype == tf.bfloat16
    kernel.assign(start)
    model.layers[0].vector_u.assign(vector)
    model(X[0], training=True)
    assert np.array_equal(inside, kernel.numpy())
    assert not np.array_equal(inside, tf.cast(inside, tf.bfloat16)), "not representable in 16 bits"


def test_s04_normalization_does_not_round_the_data_it_standardises() -> None:
    data = np.array([[1000.5], [1001.5]], np.float32)  # 1000 and 1000 in bfloat16
    norm = layers.Normalization(mean=1000.0, variance=1.0)
    model = keras.Sequential([keras.Input((1,)), norm, layers.Dense(1, kernel_initializer="ones")])
    with apply_policy(model, POLICY, heads=False):
        assert np.allclose(model(data)[:, 0], [0.5, 1.5])
    with apply_policy(model, POLICY.replace(op_list="native"), heads=False):
        assert np.allclose(model(data)[:, 0], [0.0, 0.0])


def test_s04_masks_pass_through_the_casts() -> None:
    """Keras keeps a mask on the tensor it is for; a cast that dropped it would count padding in the loss."""
    tokens = np.array([[1, 2, 0, 0], [3, 0, 0, 0]])
    inputs = keras.Input((4,))
    hidden = layers.Embedding(4, 8, mask_zero=True)(inputs)
    tagger = keras.Model(inputs, layers.TimeDistributed(layers.Dense(2))(layers.LSTM(4, return_sequences=True)(hidden)))
    block = Custom(keras.Model(inputs, layers.LayerNormalization()(hidden)))
    outer = keras.Sequential([keras.Input((4,)), block, layers.LSTM(2)])
    for model in (tagger, outer):
        model.compile(loss="mse", jit_compile=False)
    targets = np.ones((2, 4, 2), np.float32)
    want = tagger.evaluate(tokens, targets, verbose=0)
    with apply_policy(tagger, POLICY), apply_policy(outer, POLICY):
        inner = block.inner[0](tokens)
        assert inner.dtype == tf.bfloat16
        assert np.array_equal(inner._keras_mask, tokens > 0)
        assert np.array_equal(tagger(tokens)._keras_mask, tokens > 0)
        np.testing.assert_allclose(tagger.evaluate(tokens, targets, verbose=0), want, rtol=0.01)
