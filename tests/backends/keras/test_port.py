"""`polyamp.port` between Keras models, on every Keras backend."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import polyamp
from polyamp import porting
from polyamp.errors import ModelError
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_keras.arrays import dtype_name
from polyamp_keras.porting.converter import CONVERTER

IMAGES = np.random.default_rng(0).standard_normal((4, 6, 5, 2)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 9, (3, 7)).astype(np.int32)


def glorot(seed: int) -> Any:
    return keras.initializers.GlorotUniform(seed)  # keras.utils.set_random_seed imports TensorFlow


def image_network(seed: int = 0, epsilon: float = 1e-3, dtype: str = "float32") -> Any:
    settings = {"kernel_initializer": glorot(seed), "dtype": dtype}
    stack = [
        layers.Conv2D(4, 3, activation="relu", name="conv", **settings),
        layers.BatchNormalization(name="norm", epsilon=epsilon, dtype=dtype),
        layers.Flatten(dtype=dtype),
        layers.Dense(5, "gelu", name="hidden", **settings),
        layers.Dropout(0.5, seed=1, dtype=dtype),
        layers.Dense(3, name="head", **settings),
    ]
    return keras.Sequential([keras.Input((6, 5, 2)), *stack])


class Reader(keras.Model):  # type: ignore[misc]  # Keras is untyped
    """A subclassed model of tokens, with attention, recurrent layers and layers in a list."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.tokens = layers.Embedding(9, 8, embeddings_initializer=glorot(seed))
        self.attention = layers.MultiHeadAttention(2, 4, kernel_initializer=glorot(seed), name="attention")
        self.both = layers.Bidirectional(layers.LSTM(3, return_sequences=True, kernel_initializer=glorot(seed)))
        self.last = layers.GRU(4, kernel_initializer=glorot(seed), name="last")
        self.heads = [layers.Dense(count, kernel_initializer=glorot(seed), name=f"head{count}") for count in (2, 3)]

    def call(self, ids: Any, training: bool = False) -> Any:
        x = self.tokens(ids)
        x = self.last(self.both(x + self.attention(x, x)))
        return [head(x) for head in self.heads]


def reader(seed: int) -> Any:
    model = Reader(seed)
    model(TOKENS)
    return model


@pytest.mark.parametrize(("build", "batch"), [(image_network, IMAGES), (reader, TOKENS)], ids=["images", "tokens"])
def test_a_model_moves_into_another_and_computes_the_same(build: Any, batch: Any) -> None:
    source, target = build(0), build(1)
    ported, report = polyamp.port(source, target, check=batch)
    assert ported is target
    assert report.clean
    assert report.checked.outputs == 0.0
    assert set(report.checked.gradients.values()) == {0.0}
    assert len(report.checked.gradients) >= len(source.trainable_variables)
    for ours, theirs in zip(source.weights, target.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_a_port_imports_polyamps_tensorflow_only_on_tensorflow(backend: str) -> None:
    polyamp.port(image_network(0), image_network(1))
    assert ("polyamp_tensorflow" in sys.modules) is (backend == "tensorflow")


def test_a_setting_that_differs_is_named_with_the_line_that_sets_it() -> None:
    with pytest.warns(UserWarning, match="epsilon is 0.1, in the source"):
        _, report = polyamp.port(image_network(0), image_network(1, epsilon=0.1))
    assert "model.get_layer('norm').epsilon = 0.001" in str(report)


def test_a_line_for_a_layer_in_an_attribute_reaches_it() -> None:
    lines = {layer.path: layer.lines for layer in CONVERTER.inventory(reader(0)).layers}
    assert lines["head3"]["activation"]("relu") == "model.heads[1].activation = keras.activations.get('relu')"
    assert lines["last"]["dropout"](0.5) == "model.last.cell.dropout = 0.5"


def test_an_evaluation_is_in_float32_and_leaves_a_16_bit_model_as_it_was() -> None:
    model = image_network(dtype="bfloat16")
    before = [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in model.variables]
    found = CONVERTER.evaluate(model, IMAGES, lambda outputs: [np.ones_like(one) for one in outputs], {"head"})
    assert {array.dtype for array in (*found.outputs, *found.gradients.values())} == {np.dtype(np.float32)}
    assert (found.modules["hidden"].shape, found.inputs["head"].shape) == ((4, 5), (4, 5))
    np.testing.assert_array_equal(found.gradients["head/bias"], np.full(3, 4.0, np.float32))
    for variable, values in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), values)
    assert {dtype_name(variable) for variable in model.trainable_variables} == {"bfloat16"}
    assert {layer.dtype_policy.name for layer in model.layers} == {"bfloat16"}


def test_what_was_written_comes_back_where_an_array_cannot_be_read() -> None:
    def broken() -> Any:
        raise OSError("the disk is gone")

    model = image_network()
    before = [np.array(keras.ops.convert_to_numpy(variable)) for variable in model.variables]
    given = {"head/bias": Lazy.of(np.ones(3, np.float32)), "hidden/bias": Lazy((5,), np.dtype(np.float32), broken)}
    with pytest.raises(OSError, match="the disk is gone"):
        CONVERTER.fill(model, given)
    for variable, values in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), values)


def test_values_with_reversed_axes_are_copied() -> None:
    model = image_network()
    given = np.arange(15, dtype=np.float32).reshape(3, 5).T[::-1]
    expected = given.copy()
    CONVERTER.fill(model, {"head/kernel": Lazy.of(given)})
    given[...] = 0
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model.get_layer("head").kernel), expected)


def test_variables_that_hold_one_array_are_two() -> None:
    model = image_network()
    norm = model.get_layer("norm")
    norm.beta.assign(norm.gamma.value)  # in JAX both hold the same array from now on
    leaves = [leaf for layer in CONVERTER.inventory(model).layers for leaf in layer.leaves.values()]
    assert [leaf.name for leaf in leaves if leaf.tied is not None] == []
    assert {"norm/gamma", "norm/beta"} < {leaf.name for leaf in leaves}


def test_a_file_of_keras_is_source_and_target(tmp_path: Path) -> None:
    source, target = image_network(0), image_network(1)
    source.save(tmp_path / "net.keras")
    polyamp.port(tmp_path / "net.keras", target)
    np.testing.assert_array_equal(source.predict_on_batch(IMAGES), target.predict_on_batch(IMAGES))
    porting.save(source, tmp_path / "net.safetensors")
    canonical = porting.open(tmp_path / "net.safetensors")
    assert canonical.framework == "keras"
    porting.load(image_network(2), canonical)


def test_a_training_by_fit_goes_on_in_another_model() -> None:
    def compiled(seed: int) -> Any:
        model = image_network(seed)
        inner = keras.optimizers.AdamW(1e-2)
        model.compile(keras.optimizers.LossScaleOptimizer(inner, 256.0, dynamic_growth_steps=4), loss="mse")
        return model

    labels = np.zeros((4, 3), np.float32)
    source, target = compiled(0), compiled(1)
    for _ in range(3):
        source.train_on_batch(IMAGES, labels)
    moved, _ = polyamp.port(porting.training(source), porting.training(target))
    assert moved.model is target
    for ours, theirs in zip(source.optimizer.variables, target.optimizer.variables, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(ours), keras.ops.convert_to_numpy(theirs))
    assert int(target.optimizer.inner_optimizer.iterations) == 3


def test_a_model_without_variables_says_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"is not built, so it has no variables yet\..*Call it once on a batch"):
        polyamp.port(keras.Sequential([layers.Dense(3)]), image_network())
