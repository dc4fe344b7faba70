"""A policy on Keras layers: inner dtypes, masters, restoring what was there, what is refused."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from polyamp import Policy
from polyamp.conformance.problems import batch, layers, loss_fn, recipe
from polyamp.errors import PolicyError, UnsupportedError
from polyamp_tensorflow.precision.autocast import apply_layer_policies, resolve_policy

pytestmark = pytest.mark.filterwarnings("ignore:float16 on TensorFlow's CPU")
HARNESS = polyamp_tensorflow.BACKEND.testing()


class Seen(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Records the dtype and the values of its input."""

    def call(self, x: Any) -> Any:
        self.seen = (x.dtype.name if hasattr(x.dtype, "name") else x.dtype, x)
        return x


def attention_model() -> Any:
    inputs = keras.Input((3, 4))
    hidden = keras.layers.MultiHeadAttention(2, 2, name="attention")(inputs, inputs)
    hidden = keras.layers.LayerNormalization(name="norm")(hidden)
    inner = keras.Sequential([keras.Input((3, 4)), keras.layers.Dense(2, name="head")], name="inner")
    return keras.Model(inputs, inner(hidden))


def compute_dtypes(model: Any) -> list[str]:
    return [layer.compute_dtype for layer in model._flatten_layers()]


def test_layers_compute_in_16_bits_and_variables_stay_float32() -> None:
    model = attention_model()
    before = [layer.dtype_policy for layer in model._flatten_layers()]
    names = ("query", "key", "value", "attention_output", "head")
    softmax = model.get_layer("attention")._softmax
    with apply_layer_policies(model, resolve_policy(model, Policy("mixed_bfloat16"))):
        inside = {layer.name: layer.compute_dtype for layer in model._flatten_layers()}
        output = model(np.ones((2, 3, 4), np.float32))
        assert model.layers[-1](np.ones((2, 3, 4), np.float32)).dtype == tf.bfloat16
    assert {inside[name] for name in names} == {"bfloat16"}
    assert {inside[name] for name in (softmax.name, "norm")} == {"float32"}
    assert output.dtype == tf.float32, "the policy's output dtype"
    assert {variable.dtype for variable in model.variables} <= {"float32", "int64"}
    assert [layer.dtype_policy for layer in model._flatten_layers()] == before
    assert model(np.ones((2, 3, 4), np.float32)).dtype == tf.float32


def test_policies_are_restored_when_the_block_raises() -> None:
    model = attention_model()
    with pytest.raises(KeyError), apply_layer_policies(model, resolve_policy(model, Policy("mixed_float16"))):
        raise KeyError
    assert set(compute_dtypes(model)) == {"float32"}


def test_training_leaves_the_users_policies_as_they_were() -> None:
    model = HARNESS.mlp(layers())
    made = recipe("mixed_bfloat16")
    state = polyamp.init(model, made)
    polyamp.train_step(loss_fn, made)(state, batch())
    assert set(compute_dtypes(model)) == {"float32"}
    assert {variable.dtype for variable in model.variables} == {"float32"}


def test_a_float32_recipe_overrides_the_models_own_mixed_policy() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, dtype="mixed_float16", name="dense0")])
    seen: list[Any] = []

    def looked_at(model: Any, item: Any) -> Any:
        seen.append(model.get_layer("dense0")(item["x"]).dtype)
        return loss_fn(model, item)

    polyamp.train_step(looked_at, recipe())(polyamp.init(model, recipe()), batch())
    assert seen == [tf.float32]
    assert model.layers[0].dtype_policy.name == "mixed_float16"


def test_an_override_of_the_first_layer_gets_its_input_unrounded() -> None:
    first, second = Seen(name="first"), Seen(name="second")
    model = keras.Sequential([keras.Input((1,)), first, second, keras.layers.Dense(1)])
    x = np.array([[1.001]], np.float32)
    Policy("mixed_bfloat16", overrides={"first": "float32"}).autocast(model)(x)
    assert (first.seen[0], float(first.seen[1][0, 0])) == ("float32", float(x[0, 0]))
    assert (second.seen[0], float(second.seen[1][0, 0])) == ("bfloat16", 1.0)


def test_overrides_follow_the_nesting_of_layers() -> None:
    model = attention_model()
    policy = Policy("mixed_bfloat16", overrides={"attention": "float32", "inner/*": "float32"})
    with apply_layer_policies(model, resolve_policy(model, policy)):
        inside = {layer.name: layer.compute_dtype for layer in model._flatten_layers()}
    assert {inside[name] for name in ("query", "attention_output", "head")} == {"float32"}
    assert inside["norm"] == "float32"
    native = policy.replace(op_list="native", overrides={"attention": "float32", "attention/key": "bfloat16"})
    with apply_layer_policies(model, resolve_policy(model, native)):
        inside = {layer.name: layer.compute_dtype for layer in model._flatten_layers()}
    assert (inside["norm"], inside["query"], inside["key"]) == ("bfloat16", "float32", "bfloat16")
    with pytest.raises(PolicyError, match=r"'inner/haed' matches no module path. Nearest: 'inner/head'"):
        policy.replace(overrides={"inner/haed": "float32"}).autocast(model)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, in quantize()
def test_layers_that_are_quantized_or_not_floating_are_left_alone() -> None:
    quantized = keras.layers.Dense(4, name="quantized")
    model = keras.Sequential([keras.Input((4,)), quantized, keras.layers.Dense(2)])
    quantized.quantize("int8")
    own = quantized.dtype_policy
    with apply_layer_policies(model, resolve_policy(model, Policy("mixed_bfloat16"))):
        assert quantized.dtype_policy is own
        assert model.layers[1].compute_dtype == "bfloat16"


def test_a_dtype_policy_map_is_put_back_whole() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")])
    own = keras.dtype_policies.DTypePolicyMap()
    own["dense"] = keras.DTypePolicy("float32")
    model.layers[0]._dtype_policy = own
    with apply_layer_policies(model, resolve_policy(model, Policy("mixed_bfloat16"))):
        assert model.layers[0].compute_dtype == "bfloat16"
    assert model.layers[0].dtype_policy is own
    assert list(own) == ["dense"]


def test_apply_policy_reaches_predict_and_gives_it_back() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    x = np.ones((2, 4), np.float32)
    assert model.predict(x, verbose=0).dtype == np.float32
    narrow = Policy(compute="bfloat16", output="bfloat16")
    with polyamp_tensorflow.apply_policy(model, narrow):
        assert model.predict(x, verbose=0).dtype.name == "bfloat16"
    assert model.predict(x, verbose=0).dtype == np.float32
    with (
        pytest.raises(UnsupportedError, match=r"takes a keras\.Model or layer"),
        polyamp_tensorflow.apply_policy(lambda x: x, Policy("float32")),
    ):
        pass


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ("mixed_float16", "mixed_float16"),
        ("mixed_bfloat16", "mixed_bfloat16"),
        ("float32", "float32"),
        ("params=bf16,compute=bf16,output=bf16", "bfloat16"),
    ],
)
def test_native_policy(policy: str, name: str) -> None:
    native = Policy(policy).native("tensorflow")
    assert (type(native), native.name) == (keras.DTypePolicy, name)


def test_native_policy_with_overrides_is_a_map_for_keras_to_build_with() -> None:
    policy = Policy(
        "mixed_bfloat16", overrides={"block/*": "float32", "block/inner": "bfloat16", "**/norm?": "float32"}
    )
    native = policy.native("tensorflow")
    assert isinstance(native, keras.dtype_policies.DTypePolicyMap)
    paths = {
        "block/dense": "float32",
        "model/block/dense/deep": "float32",
        "block/inner": "bfloat16",
        "model/block/inner/deep": "bfloat16",
        "block": "bfloat16",
        "blocks/dense": "bfloat16",
        "norm1": "float32",
        "a/b/norm2": "float32",
        "a/b/norm12": "bfloat16",
    }
    assert {path: native[path].compute_dtype for path in paths} == paths
    assert {native[path].variable_dtype for path in paths} == {"float32"}
    assert keras.dtype_policies.deserialize(keras.dtype_policies.serialize(native))["block/dense"].name == "float32"


def test_a_model_built_under_the_map_has_its_overrides() -> None:
    class Model(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__(name="net")
            self.stages = [keras.layers.Dense(4, name="dense"), keras.layers.Dense(2, name="top")]

        def call(self, x: Any) -> Any:
            return self.stages[1](self.stages[0](x))

    native = Policy("mixed_bfloat16", overrides={"top": "float32"}).native("tensorflow")
    keras.config.set_dtype_policy(native)
    try:
        model = Model()
        output = model(np.ones((1, 3), np.float32))
    finally:
        keras.config.set_dtype_policy("float32")
    assert [layer.compute_dtype for layer in model.stages] == ["bfloat16", "float32"]
    assert output.dtype == tf.float32
    assert {variable.dtype for variable in model.variables} == {"float32"}


def test_dtypes_without_a_keras_policy_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="Received: param='float64', compute='float16'"):
        Policy(param="float64", compute="float16").native("tensorflow")


def test_a_function_runs_in_cast_mode() -> None:
    @Policy(compute="bfloat16", output="bfloat16").autocast
    def product(a: Any, b: Any, count: Any) -> Any:
        return a @ b, count

    ones = tf.fill((2, 2), 1.001)
    result, count = product(ones, ones, tf.constant(3))
    assert (result.dtype, float(result[0, 0]), count.dtype) == (tf.bfloat16, 2.0, tf.int32)
    with pytest.raises(UnsupportedError, match="the layer is the finest grain of mode='autocast'"):
        Policy("mixed_bfloat16", mode="autocast").autocast(tf.exp, backend="tensorflow")


def test_float32_matmul_sets_tensorflows_switch_for_the_call_only() -> None:
    enabled = tf.config.experimental.tensor_float_32_execution_enabled
    before = enabled()
    seen: list[bool] = []
    for word in ("highest", "high"):
        Policy("float32", float32_matmul=word).autocast(lambda x: seen.append(enabled()), backend="tensorflow")(1)
    assert seen == [False, True]
    assert enabled() is before


def test_float32_matmul_of_two_threads_at_once() -> None:
    """Saved and restored by each thread for itself, it stayed changed when two calls overlapped."""
    enabled = tf.config.experimental.tensor_float_32_execution_enabled
    before = enabled()
    policy = Policy("float32", float32_matmul="highest" if before else "high")
    entered, leave, seen = threading.Event(), threading.Event(), []

    def slow(x: Any) -> Any:
        entered.set()
        assert leave.wait(20)
        seen.append(enabled())
        return x

    thread = threading.Thread(target=lambda: policy.autocast(slow, backend="tensorflow")(1))

    def outer(x: Any) -> Any:
        thread.start()
        assert entered.wait(20)
        return x

    policy.autocast(outer, backend="tensorflow")(1)
    other = policy.replace(float32_matmul="high" if before else "highest")
    with pytest.raises(UnsupportedError, match="one setting of the whole process"):
        other.autocast(lambda x: x, backend="tensorflow")(1)
    leave.set()
    thread.join(20)
    assert seen == [not before]
    assert enabled() == before
