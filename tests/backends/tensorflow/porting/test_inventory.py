"""What an inventory lists: paths, names, kinds, what is tied, what is left, and what is refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import polyamp
from polyamp import porting
from polyamp.errors import ModelError, PortError
from polyamp.porting.layouts.inventory import Inventory
from polyamp_keras.models.variables import model_variables
from polyamp_keras.porting.converter import CONVERTER
from polyamp_tensorflow.precision.policy_module import PolicyModule


def rows(model: Any) -> list[tuple[str, str, list[str]]]:
    """(path, kind, names of its leaves) of every layer."""
    found = CONVERTER.inventory(model).layers
    return [(layer.path, layer.forms[0].kind, [leaf.name for leaf in layer.leaves.values()]) for layer in found]


def is_whole(model: Any) -> None:
    """Every variable is in exactly one layer, tied leaves aside, or in `left`."""
    inventory = CONVERTER.inventory(model)
    names = [leaf.name for layer in inventory.layers for leaf in layer.leaves.values() if leaf.tied is None]
    known = [name for role in model_variables(model) for name in role]
    assert sorted([*names, *inventory.left]) == sorted(known)
    parameters = polyamp.parameters(model)
    assert parameters.keys() <= set(names)


def functional(*stack: Any, shape: tuple[int, ...] = (6, 4), dtype: str = "float32") -> Any:
    given = outputs = keras.Input(shape, dtype=dtype)
    for layer in stack:
        outputs = layer(outputs)
    return keras.Model(given, outputs)


def test_automatic_names_are_counted_within_the_model() -> None:
    layers.Dense(1), layers.Dense(1)
    inner = functional(layers.Dense(3), layers.Dense(3, name="last"))
    inner.name = "encoder"
    model = functional(layers.Dense(4), inner, layers.Dense(2))
    assert rows(model) == [
        ("dense", "dense", ["dense/kernel", "dense/bias"]),
        ("encoder/dense", "dense", ["encoder/dense/kernel", "encoder/dense/bias"]),
        ("encoder/last", "dense", ["encoder/last/kernel", "encoder/last/bias"]),
        ("dense_1", "dense", ["dense_1/kernel", "dense_1/bias"]),
    ]
    is_whole(model)


def test_a_subclassed_model_holds_layers_in_attributes_lists_and_dicts_and_shares_them() -> None:
    class Model(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [layers.Dense(4), layers.Dense(4)]
            self.heads = {"a": layers.Dense(2, name="a"), "b": layers.Dense(3, name="b")}
            self.again = self.blocks[0]
            self.scale = self.add_weight(shape=(4,), name="scale")
            self.steps = self.add_weight(shape=(), dtype="int32", name="steps", trainable=False)
            self.average = self.add_weight(shape=(4,), name="average", trainable=False)

        def call(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return [head(self.again(x) * self.scale) for head in self.heads.values()]

    model = Model()
    model(np.ones((1, 4)))
    assert [(path, kind) for path, kind, _ in rows(model)] == [
        *(("scale", "parameter"), ("average", "parameter")),
        *(("dense", "dense"), ("dense_1", "dense"), ("a", "dense"), ("b", "dense")),
    ]
    inventory = CONVERTER.inventory(model)
    assert inventory.left == {"steps": "a counter, no floating number"}
    assert [layer.leaves["value"].trainable for layer in inventory.layers[:2]] == [True, False]
    is_whole(model)


def test_one_variable_in_two_layers_is_listed_twice_the_second_tied() -> None:
    class Model(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers.Dense(4, name="first"), layers.Dense(4, use_bias=False, name="second")
            self.first.build((None, 4))
            self.second.build((None, 4))
            self.second._tracker.unlock()
            self.second._trainable_variables[:] = [self.first.kernel]
            self.second._kernel = self.first.kernel

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

    model = Model()
    model(np.ones((1, 4)))
    first, second = CONVERTER.inventory(model).layers
    assert first.leaves["kernel"].tied is None
    assert (second.leaves["kernel"].name, second.leaves["kernel"].tied) == ("second/kernel", "first/kernel")
    is_whole(model)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reversible_embedding_is_a_table_and_a_head(tied: bool) -> None:
    class Model(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.tokens = layers.ReversibleEmbedding(7, 4, tie_weights=tied, logit_soft_cap=30.0)

        def call(self, x: Any) -> Any:
            return self.tokens(self.tokens(x), reverse=True)

    model = Model()
    model(np.zeros((1, 3), np.int32))
    table, head = CONVERTER.inventory(model).layers
    path = "reversible_embedding"
    assert (table.path, head.path) == (path, f"{path}/reverse")
    assert head.forms[0].shapes(head.arrays) == {"kernel": (4, 7)}
    assert head.forms[0].attributes["activation"] == "soft_cap(30)"
    (leaf,) = head.leaves.values()
    assert leaf.tied == (f"{path}/embeddings" if tied else None)
    is_whole(model)


def test_recurrent_layers_are_cells() -> None:
    cells = [layers.LSTMCell(3), layers.GRUCell(4), layers.SimpleRNNCell(2)]
    layers.LSTM(2)  # one more for Keras's counters
    model = functional(
        layers.Bidirectional(layers.LSTM(3, return_sequences=True, dropout=0.1, recurrent_dropout=0.2)),
        layers.Bidirectional(layers.GRU(3, return_sequences=True), merge_mode="sum"),
        layers.RNN(cells, return_sequences=True),
        layers.Bidirectional(layers.RNN(layers.SimpleRNNCell(2))),
    )
    assert [(path, kind) for path, kind, _ in rows(model)] == [
        ("bidirectional/forward", "lstm"),
        ("bidirectional/backward", "lstm"),
        ("bidirectional_1/forward", "gru"),
        ("bidirectional_1/backward", "gru"),
        ("rnn/layer_0", "lstm"),
        ("rnn/layer_1", "gru"),
        ("rnn/layer_2", "simple_rnn"),
        ("bidirectional_2/forward", "simple_rnn"),
        ("bidirectional_2/backward", "simple_rnn"),
    ]
    is_whole(model)
    forward, backward, gru, *_ = CONVERTER.inventory(model).layers
    said = forward.forms[0].attributes
    assert (said["dropout"], said["recurrent_dropout"], said["recurrent_activation"]) == (0.1, 0.2, "sigmoid")
    assert (said["reverse"], backward.forms[0].attributes["reverse"]) == (False, True)
    assert gru.forms[0].attributes["reset"] == "after"
    assert gru.forms[0].shapes(gru.arrays)["recurrent_bias"] == (9,)
    left = CONVERTER.inventory(model).left
    assert len(left) == 9  # the streams of the cells' dropout
    assert set(left.values()) == {"the state of a random stream"}


def test_attention_is_one_layer_and_its_dropout_is_left() -> None:
    given = keras.Input((5, 6))
    attention = layers.MultiHeadAttention(2, 3, value_dim=4, dropout=0.1, output_shape=7)
    model = keras.Model(given, attention(given, given))
    (layer,) = CONVERTER.inventory(model).layers
    assert (layer.path, layer.module) == ("multi_head_attention", "keras.MultiHeadAttention")
    shapes = layer.forms[0].shapes(layer.arrays)
    assert (shapes["value_kernel"], shapes["output_kernel"]) == ((6, 2, 4), (2, 4, 7))
    assert layer.leaves["query/kernel"].name == "multi_head_attention/query/kernel"
    assert layer.forms[0].attributes == {"scale": pytest.approx(3**-0.5), "dropout": 0.1, "mask": "keep"}
    is_whole(model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"output_shape": (2, 3)}, "output_shape=(2, 3)"),
        ({"attention_axes": (1, 2)}, "attention_axes=(1, 2)"),
        ({"use_gate": True}, "use_gate: its output is gated"),
    ],
)
def test_an_attention_that_the_canonical_kind_cannot_say_has_a_kind_of_its_own(options: Any, reason: str) -> None:
    given = keras.Input((5, 4, 6) if "attention_axes" in options else (5, 6))
    model = keras.Model(given, layers.MultiHeadAttention(2, 3, **options)(given, given))
    (layer,) = CONVERTER.inventory(model).layers
    assert layer.forms[0].kind == f"keras.MultiHeadAttention ({reason})"
    is_whole(model)


def test_quantized_and_lora_layers_are_refused_by_name() -> None:
    model = functional(layers.Dense(4, name="first"), layers.Dense(2, name="second"))
    model.get_layer("second").enable_lora(2)
    with pytest.raises(PortError, match=r"layer 'second' \(keras.Dense\) has LoRA matrices of rank 2"):
        CONVERTER.inventory(model)
    model = functional(layers.Dense(4, name="first", dtype="int8_from_float32"))
    with pytest.raises(PortError, match=r"layer 'first' \(keras.Dense\) is quantized \(int8\)"):
        CONVERTER.inventory(model)


def test_what_is_no_model_or_not_built_is_refused() -> None:
    with pytest.raises(ModelError, match=r"is not built, so it has no variables yet. Layer 'wait' waits for its input"):
        CONVERTER.inventory(keras.Sequential([layers.Dense(2, name="wait")]))
    with pytest.raises(ModelError, match=r"must be a keras.Model or layer.* Received: builtins.dict"):
        CONVERTER.inventory({})


def test_models_of_other_shapes_are_seen_through() -> None:
    """Bound, mixed, compiled with a loss scale, trained with metrics, and in 16 bits."""
    model = functional(layers.Dense(4), layers.Dropout(0.5), layers.BatchNormalization())
    expected = rows(model)
    assert rows(PolicyModule(model, polyamp.Policy("float32").plan())) == expected
    scaler = polyamp.LossScaler()
    model.compile(scaler.native("tensorflow", optimizer=keras.optimizers.Adam()), "mse", metrics=["mae"])
    model.fit(np.ones((4, 6, 4)), np.ones((4, 6, 4)), verbose=0)
    assert rows(model) == expected
    assert list(CONVERTER.inventory(model).left.values()) == ["the state of a random stream"]
    mixed = functional(layers.Dense(4, dtype="mixed_bfloat16"), layers.Dense(4, dtype="bfloat16"))
    arrays = [leaf.array.dtype.name for layer in CONVERTER.inventory(mixed).layers for leaf in layer.leaves.values()]
    assert arrays == ["float32", "float32", "bfloat16", "bfloat16"]


def test_statistics_that_a_layer_computes_with_follow_a_fill() -> None:
    model = functional(layers.Rescaling(2.0), layers.Normalization())
    assert [(path, kind) for path, kind, _ in rows(model)] == [
        ("normalization/mean", "parameter"),
        ("normalization/variance", "parameter"),
    ]
    assert list(CONVERTER.inventory(model).left) == ["normalization/count"]
    values = {"normalization/mean": np.full(4, 3.0, np.float32), "normalization/variance": np.full(4, 4.0, np.float32)}
    CONVERTER.fill(model, {name: porting.Lazy.of(array) for name, array in values.items()})
    np.testing.assert_allclose(model(np.ones((1, 6, 4))), np.full((1, 6, 4), -0.5))


def test_wrappers_and_layers_without_arrays() -> None:
    model = functional(
        layers.TimeDistributed(layers.Dense(3)),
        layers.Lambda(lambda x: x),
        layers.SpectralNormalization(layers.Dense(2)),
        layers.Activation("gelu"),
    )
    assert [(path, kind) for path, kind, _ in rows(model)] == [
        ("time_distributed/dense", "dense"),
        ("spectral_normalization/vector_u", "parameter"),
        ("spectral_normalization/dense", "dense"),
        ("activation", "activation"),
    ]


class Scaled(layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """A dense layer whose outputs are scaled: a third party's."""

    def __init__(self) -> None:
        super().__init__(name="scaled")
        self.inner = layers.Dense(2, use_bias=False)

    def build(self, shape: Any) -> None:
        self.inner.build(shape)
        self.factor = self.add_weight(shape=(2,), name="factor")

    def call(self, x: Any) -> Any:
        return self.inner(x) * self.factor


class Wrong(Scaled):
    """One whose form names what it does not have."""


@porting.register(Scaled)
def _scaled(layer: Any) -> porting.Form:
    rules = (porting.Rule(("dense/kernel",), ("kernel",)), porting.Rule(("factor",), ("bias",)))
    return porting.Form("dense", rules)


@porting.register(Wrong)
def _wrong(layer: Any) -> porting.Form:
    return porting.Form("dense", porting.same("weight"))


def test_a_weight_that_a_subclass_of_a_layer_adds_is_a_parameter() -> None:
    class Scaled(layers.Dense):  # type: ignore[misc]  # Keras is untyped
        def build(self, shape: Any) -> None:
            super().build(shape)
            self.factor = self.add_weight(shape=(4,), name="factor")

        def call(self, x: Any) -> Any:
            return super().call(x) * self.factor

    model = functional(Scaled(4, name="head"))
    assert [(path, kind) for path, kind, _ in rows(model)] == [("head", "dense"), ("head/factor", "parameter")]
    is_whole(model)


def test_a_third_party_s_form_comes_before_the_table() -> None:
    model = functional(Scaled())
    assert rows(model) == [("scaled", "dense", ["scaled/dense/kernel", "scaled/factor"])]
    is_whole(model)
    message = r"names 'weight', which layer 'scaled' does not have. Its variables: factor, dense/kernel"
    with pytest.raises(PortError, match=message):
        CONVERTER.inventory(functional(Wrong()))


def test_a_model_that_is_no_layer_has_parameters() -> None:
    class Linear(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
        def __init__(self) -> None:
            super().__init__()
            self.kernel = tf.Variable(np.eye(2, dtype=np.float32), name="kernel")
            self.count = tf.Variable(1, name="count", trainable=False)

    inventory = CONVERTER.inventory(Linear())
    assert [(layer.path, layer.forms[0].kind) for layer in inventory.layers] == [("kernel", "parameter")]
    assert isinstance(inventory, Inventory)
    assert inventory.framework == "tensorflow"
