"""One pass in float32 and as in inference: outputs, gradients and layers' outputs; the model is as before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import polyamp_tensorflow
from polyamp_keras.models.variables import model_variables
from polyamp_keras.porting.converter import CONVERTER
from polyamp_tensorflow.arrays import to_numpy

Array = np.ndarray[Any, Any]
X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


def ones(outputs: Sequence[Array]) -> list[Array]:
    return [np.ones_like(output) for output in outputs]


def network(dtype: Any = None) -> Any:
    keras.utils.set_random_seed(0)
    given = keras.Input((6,))
    hidden = layers.Dense(5, name="first", dtype=dtype)(given)
    hidden = layers.BatchNormalization(name="norm", dtype=dtype)(hidden)
    hidden = layers.Dropout(0.5, name="drop", dtype=dtype)(layers.ReLU(name="act", dtype=dtype)(hidden))
    return keras.Model(given, layers.Dense(3, name="head", dtype=dtype)(hidden))


def test_outputs_gradients_and_the_outputs_of_layers() -> None:
    model = network()
    model.get_layer("first").trainable = False
    found = CONVERTER.evaluate(model, X, lambda outputs: [np.full_like(outputs[0], 2.0)])
    np.testing.assert_array_equal(found.outputs[0], model(X, training=False))
    assert list(found.modules) == ["first", "norm", "act", "drop", "head"]
    np.testing.assert_array_equal(found.modules["act"], found.modules["drop"])
    assert list(found.gradients) == [f"{name}" for name in leaves(model)]
    np.testing.assert_allclose(found.gradients["head/bias"], [8.0, 8.0, 8.0])
    assert np.abs(found.gradients["first/kernel"]).max() > 0  # frozen in training, but a weight
    assert {gradient.dtype.name for gradient in found.gradients.values()} == {"float32"}


def leaves(model: Any) -> list[str]:
    inventory = CONVERTER.inventory(model)
    return [leaf.name for layer in inventory.layers for leaf in layer.leaves.values() if leaf.trainable]


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_a_mixed_model_computes_in_float32_and_keeps_its_policy(dtype: str) -> None:
    wide, mixed = network(), network(dtype)
    expected = CONVERTER.evaluate(wide, X, ones)
    given = CONVERTER.evaluate(mixed, X, ones)
    np.testing.assert_array_equal(given.outputs[0], expected.outputs[0])
    np.testing.assert_array_equal(given.gradients["first/kernel"], expected.gradients["first/kernel"])
    assert given.modules["act"].dtype == np.float32
    assert {layer.dtype_policy.name for layer in mixed.layers[1:]} == {dtype}
    assert mixed(X).dtype == dtype.removeprefix("mixed_")
    assert all("call" not in vars(layer) for layer in mixed.layers)


def test_a_model_in_16_bits_computes_in_float32() -> None:
    model = network("bfloat16")
    variables = [weight.value for weight in model.weights]
    found = CONVERTER.evaluate(model, X, ones)
    assert all(weight.value is variable for weight, variable in zip(model.weights, variables, strict=True))
    assert {weight.dtype for weight in model.weights} == {"bfloat16"}
    assert found.outputs[0].dtype == np.float32
    assert found.gradients["first/kernel"].dtype == np.float32
    inner = {name: np.asarray(array).astype("bfloat16") for name, array in found.modules.items()}
    assert any((inner[name] != found.modules[name]).any() for name in inner)  # digits that bfloat16 has not


def test_layers_that_do_not_cast_their_variables_compute_in_float32_too() -> None:
    options = {"dtype": "bfloat16", "recurrent_initializer": "glorot_uniform"}  # Keras has no orthogonal bfloat16
    model = keras.Sequential([keras.Input((3, 6), dtype="bfloat16"), layers.GRU(4, **options)])
    found = CONVERTER.evaluate(model, X[:, None].repeat(3, 1), ones)
    assert found.outputs[0].dtype == np.float32
    assert {array.dtype.name for array in found.gradients.values()} == {"float32"}
    assert model(X[:, None]).dtype == "bfloat16"


def test_a_policy_that_is_on_the_model_is_on_it_afterwards() -> None:
    model = network()
    expected = CONVERTER.evaluate(model, X, ones).outputs[0]
    with polyamp_tensorflow.apply_policy(model, "mixed_bfloat16"):
        np.testing.assert_array_equal(CONVERTER.evaluate(model, X, ones).outputs[0], expected)
        assert model.get_layer("first").compute_dtype == "bfloat16"
    assert model.get_layer("first").compute_dtype == "float32"


def test_what_a_forward_pass_writes_is_as_before() -> None:
    model = keras.Sequential([keras.Input((3, 2), batch_size=4), layers.LSTM(3, stateful=True), layers.Dropout(0.5)])
    model(np.ones((4, 3, 2), np.float32), training=True)
    variables = model_variables(model)
    before = {name: to_numpy(item) for name, item in variables.running.items()}
    assert any(values.any() for values in before.values())
    CONVERTER.evaluate(model, np.ones((4, 3, 2), np.float32), ones)
    for name, values in before.items():
        np.testing.assert_array_equal(to_numpy(variables.running[name]), values)


def test_batches_by_position_and_by_name_and_trees_of_outputs() -> None:
    class Two(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = layers.Embedding(9, 4, name="tokens"), layers.Dense(2, name="head")

        def call(self, ids: Any, scale: Any, training: bool = False) -> Any:
            hidden = self.tokens(ids)
            return {"b": self.head(hidden) * scale, "a": hidden, "ids": ids}

    model = Two()
    ids, scale = np.array([[1, 1, 5]], np.int32), np.float32(2.0)
    model(ids, scale)
    by_position = CONVERTER.evaluate(model, (ids, scale), ones)
    by_name = CONVERTER.evaluate(model, {"ids": ids, "scale": scale}, ones)
    assert [output.shape for output in by_position.outputs] == [(1, 3, 4), (1, 3, 2), (1, 3)]
    for name, gradient in by_position.gradients.items():
        np.testing.assert_array_equal(by_name.gradients[name], gradient)
    assert by_position.gradients["tokens/embeddings"].shape == (9, 4)
    assert not by_position.gradients["tokens/embeddings"][2].any()


GIVEN = {"float32": np.float32, "float64": np.float64, "a tensor": lambda x: tf.constant(x, tf.float64)}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_model_that_is_no_layer_is_called_with_float32(given: Any) -> None:
    class Linear(tf.Module):  # type: ignore[misc]  # TensorFlow is untyped
        def __init__(self) -> None:
            super().__init__()
            self.kernel = tf.Variable(np.eye(6, 2, dtype=np.float32), name="kernel")

        def __call__(self, x: Any) -> Any:
            return tf.matmul(x, self.kernel)

    found = CONVERTER.evaluate(Linear(), given(X), ones)
    np.testing.assert_array_equal(found.outputs[0], X[:, :2])
    np.testing.assert_allclose(found.gradients["kernel"], np.repeat(X.sum(0)[:, None], 2, 1), rtol=1e-6)
