"""S2: integers of a batch that a float `Input` turns into floating numbers stay exact, or are refused by name."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import polyamp
import polyamp_tensorflow
from polyamp.errors import ModelError
from polyamp_tensorflow import apply_policy

VOCABULARY, LENGTH = 20_000, 8
IDS = np.random.default_rng(0).integers(1, VOCABULARY, (16, LENGTH)).astype(np.int32)
LABELS = np.random.default_rng(1).integers(0, 2, 16)
POLICIES = ["mixed_float16", "mixed_bfloat16", "bfloat16"]


class TokenAndPositionEmbedding(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """keras.io, "Text classification with Transformer"."""

    def __init__(self, maxlen: int, vocab_size: int, embed_dim: int) -> None:
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x: Any) -> Any:
        maxlen = ops.shape(x)[-1]
        positions = ops.arange(start=0, stop=maxlen, step=1)
        positions = self.pos_emb(positions)
        x = self.token_emb(x)
        return x + positions


def classifier(dtype: str | None = None, policy: str = "float32") -> Any:
    """As keras.io has it, the Input's dtype included."""
    keras.utils.set_random_seed(0)
    inputs = layers.Input(shape=(LENGTH,), dtype=dtype)
    if policy == "bfloat16":  # stored in 16 bits: a user sets it before the layers are made
        keras.config.set_dtype_policy("bfloat16")
    try:
        x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, 4)(inputs)
        x = layers.GlobalAveragePooling1D()(x)
        outputs = layers.Dense(2, activation="softmax")(x)
    finally:
        keras.config.set_dtype_policy("float32")
    return keras.Model(inputs=inputs, outputs=outputs)


def table(model: Any) -> Any:
    return model.layers[1].token_emb.embeddings


def recipe(policy: str) -> polyamp.Recipe:
    scaler = polyamp.LossScaler.static(8.0) if policy == "mixed_float16" else None
    return polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(1.0), scaler=scaler)


def loss_fn(model: Any, batch: Any) -> Any:
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(batch[1], model(batch[0])))


def by_fit(model: Any, policy: str) -> None:
    polyamp_tensorflow.compile(model, recipe(policy), loss="sparse_categorical_crossentropy", jit_compile=False)
    model.fit(IDS, LABELS, batch_size=16, verbose=0)


def by_step(model: Any, policy: str) -> None:
    state = polyamp.init(model, recipe(policy))
    polyamp.train_step(loss_fn, recipe(policy), jit_compile=False)(state, (IDS, LABELS))


def by_halves(model: Any, policy: str) -> None:
    state = polyamp.init(model, recipe(policy))
    _, gradients = polyamp.value_and_grad(loss_fn, compile=False)(state, (IDS, LABELS))
    polyamp.apply_gradients(state, gradients)


@pytest.mark.parametrize(
    ("train", "policy"), list(zip([by_fit, by_step, by_halves, by_step], [*POLICIES, "mixed_float16"], strict=True))
)
def test_s02_every_token_of_a_float_input_trains_its_own_row(train: Any, policy: str) -> None:
    model = classifier(policy=policy)
    before = table(model).numpy().astype(np.float32)
    train(model, policy)
    moved = np.flatnonzero((table(model).numpy().astype(np.float32) != before).any(axis=1))
    np.testing.assert_array_equal(moved, np.unique(IDS))


@pytest.mark.parametrize("policy", POLICIES)
def test_s02_a_float_input_gives_what_an_integer_input_gives(policy: str) -> None:
    floating, integer = classifier(policy=policy), classifier("int32", policy)
    integer.set_weights(floating.get_weights())
    want = polyamp.Policy(policy).autocast(integer)(IDS).numpy()
    np.testing.assert_array_equal(polyamp.Policy(policy).autocast(floating)(IDS).numpy(), want)
    with apply_policy(floating, policy), apply_policy(integer, policy):
        np.testing.assert_array_equal(floating.predict(IDS, verbose=0), integer.predict(IDS, verbose=0))
    for model in (floating, integer):
        polyamp_tensorflow.compile(model, recipe(policy), loss="sparse_categorical_crossentropy", jit_compile=False)
    assert floating.evaluate(IDS, LABELS, verbose=0) == integer.evaluate(IDS, LABELS, verbose=0)


class Nested(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Hands ids on to a layer of its own, some of them."""

    def __init__(self, rows: int = VOCABULARY, *, some: bool = False) -> None:
        super().__init__(name="nested")
        self.inner = TokenAndPositionEmbedding(LENGTH, rows, 2)
        self.some = some

    def call(self, x: Any) -> Any:
        return self.inner(x[:, :4] if self.some else x)


class Table(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """A table of its own, which it reads by integers that it makes of its input."""

    def __init__(self, way: Any = lambda x: x) -> None:
        super().__init__(name="table")
        self.way = way

    def build(self, shape: Any) -> None:
        self.rows = self.add_weight(shape=(VOCABULARY, 2), name="rows")

    def call(self, x: Any) -> Any:
        return ops.take(self.rows, ops.cast(self.way(x), "int32"), axis=0)


def through(*own: Any, shape: tuple[int, ...] = (LENGTH,)) -> Any:
    inputs = keras.Input(shape)
    x = inputs
    for layer in own:
        x = layer(x)
    return keras.Model(inputs, x)


@pytest.mark.parametrize("nesting", ["functional", "sequential", "twice", "rank"])
def test_s02_integers_stay_exact_through_models_and_layers_that_hand_them_on(nesting: str) -> None:
    layer = Nested()
    if nesting == "sequential":
        model = keras.Sequential([keras.Input((LENGTH,)), layer])
    elif nesting == "twice":
        model = through(through(layer))
    else:
        model = through(layer, shape=(LENGTH,))
    ids = IDS[:, :, None] if nesting == "rank" else IDS  # Keras takes the last axis out again
    want = model(ids).numpy()
    with apply_policy(model, "mixed_bfloat16"):
        np.testing.assert_allclose(model(ids).numpy(), want, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_s02_an_embedding_refuses_ids_in_16_bits_that_its_table_outgrows(policy: str) -> None:
    largest = 2048 if policy == "mixed_float16" else 256
    message = rf"'nested/.*embedding.*' \(Embedding\) gets its ids in {policy[6:]}.*above {largest} .*20000 rows.*int32"
    with pytest.raises(ModelError, match=message):
        polyamp.Policy(policy).autocast(through(Nested(some=True)))(IDS)
    with pytest.raises(ModelError, match="gets its ids"):
        by_fit(through(layers.Reshape((2, 4)), layers.Embedding(VOCABULARY, 2), layers.Dense(2)), policy)
    with pytest.raises(ModelError, match="gets its ids"):  # ids that were floating before polyamp saw them
        polyamp.Policy(policy).autocast(through(Nested()))(IDS.astype(np.float32))
    small = Nested(largest + 1, some=True)
    want = through(small)(IDS % largest).numpy()
    found = polyamp.Policy(policy).autocast(through(small))(IDS % largest).numpy()
    np.testing.assert_allclose(found, want, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("way", [lambda x: x, lambda x: ops.maximum(ops.round(x[:, 1:]), 0)])
def test_s02_a_layer_that_makes_integers_of_rounded_ones_is_refused(way: Any, eager: bool) -> None:
    model = through(Table(way), layers.Flatten(), layers.Dense(2))
    message = r"layer 'table' \(Table\) makes int32 of its input.*bfloat16.*256.*Input\(shape, dtype='int32'\).*'table'"
    polyamp_tensorflow.compile(model, recipe("mixed_bfloat16"), loss="mse", run_eagerly=eager, jit_compile=False)
    with pytest.raises(ModelError, match=message):
        model.fit(IDS, np.zeros((16, 2)), verbose=0)
    state = polyamp.init(model, recipe("mixed_bfloat16"))
    with pytest.raises(ModelError, match=message):
        polyamp.train_step(lambda net, x: tf.reduce_mean(net(x)), recipe("mixed_bfloat16"), compile=not eager)(
            state, IDS
        )
    hot = layers.Lambda(lambda x: tf.one_hot(tf.cast(x, "int32"), VOCABULARY), name="hot")
    with pytest.raises(ModelError, match="'hot'"):
        polyamp.Policy("mixed_float16").autocast(through(hot, layers.Dense(2)))(IDS)


def test_s02_what_the_message_says_to_write_is_exact() -> None:
    floating = through(Table())
    kept = polyamp.Policy("mixed_bfloat16", overrides={"table": "float32"})
    np.testing.assert_array_equal(kept.autocast(floating)(IDS).numpy(), floating(IDS).numpy())
    integer = keras.Input((LENGTH,), dtype="int32")
    declared = keras.Model(integer, floating.layers[1](integer))
    np.testing.assert_allclose(
        polyamp.Policy("mixed_bfloat16").autocast(declared)(IDS).numpy(), floating(IDS).numpy(), rtol=2e-2
    )


def test_s02_integers_that_are_numbers_are_cast_as_before() -> None:
    """What multiplies them by weights computes in 16 bits, and bytes are exact in both dtypes."""
    seen = []

    class Own(layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def call(self, x: Any) -> Any:
            seen.append(x.dtype)
            return tf.cast(tf.cast(x, tf.int32), x.dtype) @ tf.ones((LENGTH, 2), x.dtype)

    model = through(Own())
    with apply_policy(model, "mixed_bfloat16", heads=False):
        model(IDS.astype(np.uint8))
    dense = through(layers.Dense(2))
    with apply_policy(dense, "mixed_bfloat16", heads=False) as applied:
        found = dense(IDS)
        assert applied.choices[dense.layers[1].path] == ("bfloat16", "compute")
    with apply_policy(dense, "mixed_bfloat16", heads=False):
        np.testing.assert_array_equal(found, dense(IDS.astype(np.float32)))
    assert seen[-1] == tf.bfloat16
