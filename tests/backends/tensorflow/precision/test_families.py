"""A policy on every kind of model: the dtypes inside the traced graph, values, gradients, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp import Policy
from polyamp_tensorflow import apply_policy

layers = keras.layers
PRODUCTS = {"MatMul", "BatchMatMulV2", "Conv1D", "Conv2D", "Conv2DBackpropInput", "DepthwiseConv2dNative", "Einsum"}
SENSITIVE = {"Softmax", "Exp", "Log", "Rsqrt", "Mean", "FusedBatchNormV3", "Cumsum"}
RNG = np.random.default_rng(0)


class Family(NamedTuple):
    """A model and its input.

    Attributes:
        make: the model, built.
        shape: of its input.
        wide: number of products that stay in float32.
    """

    make: Callable[[], Any]
    shape: tuple[int, ...]
    wide: int = 0


def functional(shape: tuple[int, ...], *parts: Any) -> Any:
    inputs = hidden = keras.Input(shape[1:])
    for part in parts:
        hidden = part(hidden)
    return keras.Model(inputs, hidden)


class Scaled(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Weights of its own, used by plain TensorFlow."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.bias = self.add_weight(shape=(4,), name="bias")

    def call(self, x: Any) -> Any:
        return tf.matmul(x, self.kernel) + self.bias


class WithConstants(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Stored float32 tensors, which TensorFlow refuses to combine with 16 bits."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.dense = layers.Dense(4)
        self.gain = tf.constant([1.0, 2.0, 3.0, 4.0])
        self.more = {"shift": [tf.Variable(0.5, trainable=False)]}

    def call(self, x: Any) -> Any:
        return self.dense(x) * self.gain + self.more["shift"][0]


class Block(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Residuals written with `+`, after and before norms: a float32 norm would not fit a 16-bit residual."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.attend = layers.MultiHeadAttention(2, 4, dropout=0.1)
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.inner = keras.Sequential(
            [layers.Dense(8, activation="gelu"), layers.Dense(4), layers.BatchNormalization()]
        )
        self.gate = layers.Dense(4, activation="softmax")

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.norms[0](x + self.attend(x, x, training=training))
        return x * self.gate(x) + self.inner(self.norms[1](x), training=training)


class Subclassed(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """A model with its own call, with a block inside."""

    def __init__(self, out: Any = None) -> None:
        super().__init__()
        self.embed = layers.Dense(4)
        self.block = Block()
        self.out = out or layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.block(self.embed(x), training=training))


def subclassed() -> Any:
    model = Subclassed()
    model(np.zeros((2, 3, 4), np.float32))
    return model


def attention() -> Any:
    inputs = keras.Input((3, 4))
    hidden = layers.MultiHeadAttention(2, 4, dropout=0.2)(inputs, inputs)
    hidden = layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
    hidden = layers.GroupQueryAttention(4, 4, 2)(hidden, hidden)
    hidden = layers.Attention(dropout=0.1, use_scale=True)([hidden, hidden], use_causal_mask=True)
    return keras.Model(inputs, layers.AdditiveAttention()([hidden, hidden]))


def raw_operations() -> Any:
    inputs = keras.Input((3, 4))
    kernel = RNG.normal(size=(4, 4)).astype(np.float32)
    hidden = keras.ops.matmul(inputs, kernel)
    shares = keras.ops.softmax(keras.ops.einsum("bij,bkj->bik", hidden, hidden))
    hidden = keras.ops.matmul(shares, hidden) + keras.ops.exp(-keras.ops.square(hidden))
    scale = keras.ops.rsqrt(keras.ops.mean(keras.ops.square(hidden), axis=-1, keepdims=True) + 1.0)
    return keras.Model(inputs, layers.Dense(3)(hidden * scale))


def nested() -> Any:
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.LayerNormalization()])
    inputs = keras.Input((4,))
    twice = keras.Model(inputs, inner(inner(inputs)))
    outer = keras.Input((4,))
    return keras.Model(outer, layers.Add()([twice(outer), layers.Dense(4)(twice(outer))]))


IMAGE, SEQUENCE, ROWS = (2, 6, 6, 3), (2, 3, 4), (4, 4)
FAMILIES = {
    "cnn": Family(
        lambda: functional(
            IMAGE,
            layers.Conv2D(4, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ),
        IMAGE,
    ),
    "separable and transposed": Family(
        lambda: functional(
            IMAGE,
            layers.SeparableConv2D(4, 3),
            layers.GroupNormalization(2),
            layers.DepthwiseConv2D(2),
            layers.Conv2DTranspose(2, 3),
        ),
        IMAGE,
    ),
    "convolution in one dimension": Family(
        lambda: functional(SEQUENCE, layers.Conv1D(4, 2), layers.GlobalAveragePooling1D(), layers.Dense(2)), SEQUENCE
    ),
    "lstm": Family(lambda: functional(SEQUENCE, layers.LSTM(4, return_sequences=True), layers.LSTM(3)), SEQUENCE),
    "gru": Family(lambda: functional(SEQUENCE, layers.GRU(4), layers.Dense(2)), SEQUENCE),
    "cells": Family(
        lambda: functional(SEQUENCE, layers.RNN([layers.LSTMCell(4), layers.GRUCell(4), layers.SimpleRNNCell(3)])),
        SEQUENCE,
    ),
    "bidirectional": Family(
        lambda: functional(
            SEQUENCE,
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.TimeDistributed(layers.Dense(2)),
        ),
        SEQUENCE,
    ),
    "attention": Family(attention, SEQUENCE),
    "normalization": Family(
        lambda: functional(
            ROWS,
            layers.Normalization(mean=[1.0, 2.0, 3.0, 4.0], variance=[1.0, 4.0, 1.0, 4.0]),
            layers.Dense(4),
            layers.UnitNormalization(),
            layers.RMSNormalization(),
        ),
        ROWS,
    ),
    "spectral normalization": Family(
        lambda: functional(ROWS, layers.SpectralNormalization(layers.Dense(4)), layers.Dense(2)),
        ROWS,
        wide=4,  # its power iteration
    ),
    "own weights": Family(lambda: functional(ROWS, Scaled(), layers.Dense(2)), ROWS),
    "constants": Family(lambda: functional(ROWS, WithConstants(), layers.Dense(2)), ROWS),
    "subclassed": Family(subclassed, SEQUENCE, wide=1),  # the softmax gate is sensitive, its product included
    "raw operations": Family(raw_operations, SEQUENCE),
    "nested": Family(nested, ROWS),
    "sequential": Family(
        lambda: keras.Sequential([keras.Input((4,)), layers.Dense(4, activation="tanh"), layers.Dropout(0.5)]), ROWS
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    keras.utils.set_random_seed(1)
    return FAMILIES[request.param]


def batch(family: Family) -> Any:
    return np.random.default_rng(1).normal(size=family.shape).astype(np.float32)


def nodes(model: Any, x: Any, **settings: Any) -> list[tuple[str, str]]:
    """(operation, dtype) of everything in the graph of a call, the bodies of loops and branches included."""
    traced = tf.function(lambda x: model(x, **settings), autograph=False).get_concrete_function(tf.constant(x))
    definition = traced.graph.as_graph_def()
    every = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return [(node.op, tf.as_dtype(node.attr["T"].type).name) for node in every if node.attr["T"].type]


def test_products_run_in_16_bits_and_sensitive_operations_in_float32(family: Family) -> None:
    model, x = family.make(), batch(family)
    assert {dtype for op, dtype in nodes(model, x, training=True) if op in PRODUCTS} == {"float32"}
    with apply_policy(model, Policy("mixed_bfloat16"), heads=False):
        inside = nodes(model, x, training=True)
    products = [dtype for op, dtype in inside if op in PRODUCTS]
    assert products.count("float32") == family.wide, inside
    assert products.count("bfloat16") == len(products) - family.wide > 0
    assert {dtype for op, dtype in inside if op in SENSITIVE} <= {"float32", "int32"}, inside


def test_values_gradients_and_variables(family: Family) -> None:
    model, x = family.make(), batch(family)
    reference = model(x).numpy()
    with apply_policy(model, Policy("mixed_bfloat16")):
        with tf.GradientTape() as tape:
            output = model(x)
            loss = tf.reduce_sum(tf.square(output))
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    assert output.dtype == tf.float32
    np.testing.assert_allclose(output, reference, atol=0.05 * np.abs(reference).max())
    assert {gradient.dtype for gradient in gradients} <= {tf.float32}
    assert {variable.dtype for variable in model.variables} <= {"float32", "int64", "int32"}


def test_the_step_gives_the_gradients_of_float32(family: Family) -> None:
    model, x = family.make(), batch(family)

    def loss_fn(model: Any, x: Any) -> Any:
        return keras.ops.mean(keras.ops.square(model(x, training=False)))

    found = []
    for policy, in_graph in (("float32", False), ("mixed_bfloat16", True)):
        state = polyamp.init(model, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)))
        loss, gradients = polyamp.value_and_grad(loss_fn, compile=in_graph)(state, x)
        flat = np.concatenate([value.numpy().ravel() for value in gradients.values.values()])
        found.append((float(loss), flat.astype(np.float64)))
        assert {value.dtype for value in gradients.values.values()} == {tf.float32}
    (want, full), (got, narrow) = found
    assert abs(got - want) < 0.05 * want
    assert full @ narrow > 0.99 * np.linalg.norm(full) * np.linalg.norm(narrow)
    assert {layer.compute_dtype for layer in model._flatten_layers()} == {"float32"}


def test_nothing_is_left_behind(family: Family) -> None:
    model, x = family.make(), batch(family)
    before = [(layer, layer.dtype_policy) for layer in model._flatten_layers()]
    reference = model(x).numpy()
    with apply_policy(model, Policy("mixed_bfloat16")):
        model(x)
    for layer, policy in before:
        assert layer.dtype_policy is policy
        assert not {"call", "_apply_scores", "_calculate_scores", "_polyamp_policies"} & set(vars(layer))
    assert np.array_equal(model(x), reference)
