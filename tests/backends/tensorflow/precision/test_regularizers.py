"""Regularization losses under a policy: float32 sums (S4) on every way in, which `fit` can add to its own loss (S6)."""

from __future__ import annotations

import copy
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from polyamp import Policy
from polyamp_tensorflow import apply_policy
from polyamp_tensorflow.precision.autocast import apply_layer_policies, resolve_policy

layers, regularizers = keras.layers, keras.regularizers
BFLOAT16, FLOAT16, FLOAT32 = Policy("mixed_bfloat16"), Policy("mixed_float16"), Policy("float32")
X = np.full((4, 8), 30.0, np.float32)
Y = np.zeros((4, 2), np.float32)
KERNEL = keras.initializers.Constant(0.13)  # so a row of 64 outputs has a sum of squares of 62300, and four of 249200
SAVING = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # Keras, in save() and quantize()


@keras.saving.register_keras_serializable(package="tests")
class Own(regularizers.Regularizer):  # type: ignore[misc]  # Keras is untyped
    """One of the user's, which notes what it gets."""

    def __init__(self, factor: float = 0.01) -> None:
        self.factor = factor
        self.seen: list[str] = []

    def __call__(self, x: Any) -> Any:
        self.seen.append(x.dtype.name)
        return self.factor * keras.ops.sum(keras.ops.square(x))

    def get_config(self) -> dict[str, Any]:
        return {"factor": self.factor}


@keras.saving.register_keras_serializable(package="tests")
def half_sum(x: Any) -> Any:
    return 0.5 * keras.ops.sum(keras.ops.absolute(x))


class Calling(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """A layer with its own call, around another."""

    def __init__(self, inner: Any) -> None:
        super().__init__(name="calling")
        self.inner = inner

    def call(self, x: Any) -> Any:
        return self.inner(x) + x


def model(activity: Any = None, **settings: Any) -> Any:
    first = layers.Dense(64, kernel_initializer=KERNEL, activity_regularizer=activity, name="first", **settings)
    last = layers.Dense(2, kernel_initializer=keras.initializers.Constant(1e-3), name="last")
    return keras.Sequential([keras.Input((8,)), first, last])


def through(*parts: Any, shape: tuple[int, ...] = (8,), dtype: str | None = None) -> Any:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *parts, layers.Dense(2, name="last")])


def expected(policy: Policy, factor: float = 0.01) -> float:
    """The float32 sum over the first layer's 16-bit result."""
    narrow = tf.matmul(tf.cast(X, policy.compute), tf.fill((8, 64), tf.constant(0.13, policy.compute)))
    return float(factor * np.square(narrow.numpy().astype(np.float32)).sum() / len(X))


def losses(net: Any, x: Any = X) -> list[Any]:
    net(x)
    found: list[Any] = net.losses
    return found


def recipe(policy: Policy, **settings: Any) -> polyamp.Recipe:
    return polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(1e-6), **settings)


@pytest.mark.parametrize(
    "policy", [BFLOAT16, FLOAT16, BFLOAT16.replace(mode="cast"), BFLOAT16.replace(op_list="native")]
)
@pytest.mark.parametrize("way", ["apply_policy", "compile", "autocast"])
def test_the_activity_is_summed_in_float32(way: str, policy: Policy) -> None:
    """A sum of 249200 is infinite in float16, and the sum of a row is a multiple of 256 in bfloat16."""
    net = model(regularizers.L2(0.01))
    if way == "apply_policy":
        apply_policy(net, policy)
        (loss,) = losses(net)
    elif way == "compile":
        polyamp_tensorflow.compile(net, recipe(policy), loss="mse", jit_compile=False)
        (loss,) = losses(net)
    else:
        policy.autocast(net)(X)
        (loss,) = net.losses
    assert loss.dtype == tf.float32
    assert float(loss) == pytest.approx(expected(policy), rel=1e-6)


@pytest.mark.parametrize("policy", [BFLOAT16, FLOAT16])
def test_a_step_adds_them_and_differentiates_them_in_float32(policy: Policy) -> None:
    net = model(regularizers.L2(1e-6), kernel_regularizer="l2")
    net.layers[1].trainable = False  # the losses do not depend on it
    seen: list[list[str]] = []

    def loss_fn(bound: Any, x: Any) -> tuple[Any, Any]:
        bound(x)
        seen.append([loss.dtype.name for loss in bound.losses])
        return sum(bound.losses), list(bound.losses)

    state = polyamp.init(net, recipe(policy, clip_norm=None))
    kernel = net.layers[0].kernel.numpy()
    state, result = polyamp.train_step(loss_fn, recipe(policy), jit_compile=False)(state, X)
    activity, weights = (float(part) for part in result.aux)
    assert seen[-1] == ["float32", "float32"]
    assert activity == pytest.approx(expected(policy, 1e-6), rel=1e-6)
    assert weights == pytest.approx(0.01 * np.square(kernel).sum(), rel=1e-6)
    assert float(result.loss) == pytest.approx(activity + weights, rel=1e-6)
    assert not bool(result.skipped)
    by_activity = 2e-6 * np.einsum("bi,bo->io", X, X @ kernel) / len(X)
    by_bias = 2e-6 * (X @ kernel).sum(0) / len(X)
    norm = np.sqrt(np.square(by_activity + 0.02 * kernel).sum() + np.square(by_bias).sum())
    assert float(result.grad_norm) == pytest.approx(norm, rel=0.02), "no more than the products are rounded"
    assert np.isinf(float(tf.reduce_sum(tf.square(tf.cast(X @ kernel, tf.float16)))))


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("policy", [BFLOAT16, FLOAT16])
def test_fit_adds_them_to_its_loss(policy: Policy, run_eagerly: bool) -> None:
    """Keras's own mixed policies end in an error here: it stacks 16-bit losses with float32 ones."""
    net = model(regularizers.L2(1e-3), kernel_regularizer="l1")
    polyamp_tensorflow.compile(net, recipe(policy), loss="mse", jit_compile=False, run_eagerly=run_eagerly)
    want = expected(policy, 1e-3) + 0.01 * 0.13 * 8 * 64 + np.square(1e-3 * 64 * 31.2)
    logs = [net.evaluate(X, Y, verbose=0), net.fit(X, Y, verbose=0).history["loss"][0]]
    assert logs == pytest.approx([want, want], rel=0.01)
    assert int(net.optimizer.iterations) == 1


def test_kerass_own_policy_still_fails_so_this_is_needed() -> None:
    net = model("l2", dtype="mixed_bfloat16")
    net.compile("sgd", loss="mse", jit_compile=False)
    with pytest.raises(TypeError, match="Cannot convert a list containing a tensor of dtype"):
        net.fit(X, Y, verbose=0)


def attention(kind: Any, *sizes: int) -> Any:
    inputs = keras.Input((3, 8))
    return keras.Model(inputs, layers.Dense(2)(kind(*sizes, activity_regularizer="l2")(inputs, inputs)))


ROW, ROWS = (8,), (3, 8)
LAYERS: dict[str, Callable[[], Any]] = {
    "ActivityRegularization": lambda: through(layers.Identity(), layers.ActivityRegularization(l2=0.01)),
    "ActivityRegularization in a call": lambda: through(
        layers.Dense(8), Calling(layers.ActivityRegularization(l2=0.01))
    ),
    "a layer in a call": lambda: through(Calling(layers.Dense(8, activity_regularizer="l2"))),
    "a norm in a call": lambda: through(Calling(layers.LayerNormalization(activity_regularizer="l2")), layers.Dense(2)),
    "TimeDistributed": lambda: through(layers.TimeDistributed(layers.Dense(4), activity_regularizer="l2"), shape=ROWS),
    "Bidirectional": lambda: through(layers.Bidirectional(layers.LSTM(3, activity_regularizer="l1")), shape=ROWS),
    "LSTM": lambda: through(layers.LSTM(3, activity_regularizer="l1", recurrent_regularizer="l2"), shape=ROWS),
    "Conv1D": lambda: through(layers.Conv1D(3, 2, activity_regularizer="l1", bias_regularizer="l1"), shape=ROWS),
    "Embedding": lambda: through(layers.Embedding(50, 4, activity_regularizer="l2"), dtype="int32"),
    "BatchNormalization": lambda: through(
        layers.Dense(8), layers.BatchNormalization(activity_regularizer="l1", gamma_regularizer="l1")
    ),
    "MultiHeadAttention": lambda: attention(layers.MultiHeadAttention, 2, 4),
    "GroupQueryAttention": lambda: attention(layers.GroupQueryAttention, 4, 2, 1),
    "a function": lambda: through(layers.Dense(8, activity_regularizer=half_sum)),
    "a lambda": lambda: through(layers.Dense(8, activity_regularizer=lambda x: tf.reduce_sum(x * x))),
    "orthogonal": lambda: through(layers.Dense(8, activity_regularizer="orthogonal_regularizer")),
}


@pytest.mark.parametrize("policy", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer(name: str, policy: Policy) -> None:
    keras.utils.set_random_seed(0)
    net = LAYERS[name]()
    x = np.random.default_rng(0).uniform(1.0, 40.0, (4, *net.input_shape[1:])).astype(net.inputs[0].dtype)
    whole = [float(loss) for loss in losses(net, x)]
    assert whole
    with apply_policy(net, policy, heads=False):
        found = losses(net, x)
        assert [loss.dtype.name for loss in found] == ["float32"] * len(whole)
        assert [float(loss) for loss in found] == pytest.approx(whole, rel=0.05)
        assert any(layer.compute_dtype == policy.compute for layer in net._flatten_layers())
    assert [float(loss) for loss in losses(net, x)] == pytest.approx(whole, rel=1e-6)


def test_the_sum_is_that_of_the_layers_unrounded_result() -> None:
    """In a layer with its own call a norm's float32 result is rounded for what follows, not for its regularizer."""
    norm = layers.LayerNormalization(activity_regularizer=regularizers.L1(1.0))
    net = through(Calling(norm))
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    with apply_policy(net, BFLOAT16):
        (loss,) = losses(net, x)
    wide = np.asarray(norm(tf.cast(tf.cast(x, tf.bfloat16), tf.float32)))
    assert float(loss) == pytest.approx(np.abs(wide).sum() / 4, rel=1e-6)
    assert float(loss) != pytest.approx(np.abs(tf.cast(wide, tf.bfloat16).numpy().astype("f4")).sum() / 4, rel=1e-6)


def test_float64_stays() -> None:
    regularizer = Own()
    net = through(layers.Dense(4, dtype="float64", activity_regularizer=regularizer))
    with apply_policy(net, BFLOAT16):
        regularizer.seen.clear()
        (loss,) = losses(net)
    assert (regularizer.seen, loss.dtype) == (["float64"], tf.float64)


@SAVING
def test_a_policy_with_16_bit_parameters_and_a_quantized_layer_sum_in_float32_too() -> None:
    pure = Policy(param="bfloat16", compute="bfloat16", output="bfloat16")
    net = model(regularizers.L2(0.01), dtype="bfloat16")
    with apply_policy(net, pure):
        (loss,) = losses(net)
        assert (loss.dtype, float(loss)) == (tf.float32, pytest.approx(expected(BFLOAT16), rel=1e-6))
    quantized = model(regularizers.L2(0.01), dtype="mixed_bfloat16")
    quantized.layers[0].quantize("int8")
    with apply_policy(quantized, BFLOAT16) as applied:
        assert applied.choices["first"] == (None, "quantized")
        (loss,) = losses(quantized)
        assert (loss.dtype, float(loss)) == (tf.float32, pytest.approx(expected(BFLOAT16), rel=0.02))


def test_a_model_may_have_one_itself() -> None:
    net = model()
    net.activity_regularizer = regularizers.L1(1.0)
    with apply_policy(net, BFLOAT16.replace(output="bfloat16")):
        (loss,) = losses(net)
        assert (loss.dtype, float(loss)) == (tf.float32, pytest.approx(2 * 2.0, rel=0.01))


class Adding(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Adds losses of its own, one of them to a sublayer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Identity()

    def call(self, x: Any) -> Any:
        self.add_loss([keras.ops.mean(x), tf.constant(2.0, tf.float64)])
        self.inner.add_loss(loss=x[0, 0])
        return x


@pytest.mark.parametrize("policy", [BFLOAT16, FLOAT16])
def test_what_add_loss_gets_is_widened(policy: Policy) -> None:
    """A user's own sum stays in the dtype of its operands; Keras stacks it with float32 losses."""
    net = through(layers.Dense(4, kernel_initializer=KERNEL, kernel_regularizer="l2"), Adding())
    polyamp_tensorflow.compile(net, recipe(policy), loss=None, jit_compile=False)
    assert [loss.dtype.name for loss in losses(net)] == ["float32", "float64", "float32", "float32"]
    single = through(Adding().inner, Calling(layers.Dense(8, activity_regularizer="l2")), Adding())
    polyamp_tensorflow.compile(single, recipe(policy), loss="mse", jit_compile=False)
    with pytest.raises((TypeError, ValueError), match="float64"):  # as in Keras without a policy
        single.fit(X, Y, verbose=0)


def test_add_loss_trains_in_fit() -> None:
    class Mean(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def call(self, x: Any) -> Any:
            self.add_loss(keras.ops.mean(x))
            return x

    net = through(layers.Dense(4, kernel_initializer=KERNEL), Mean())
    polyamp_tensorflow.compile(net, recipe(BFLOAT16), loss="mse", jit_compile=False)
    full = through(layers.Dense(4, kernel_initializer=KERNEL), Mean())
    full.set_weights(net.get_weights())
    full.compile("sgd", loss="mse")
    assert net.evaluate(X, Y, verbose=0) == pytest.approx(full.evaluate(X, Y, verbose=0), rel=0.02)
    assert np.isfinite(net.fit(X, Y, verbose=0).history["loss"][0])


# What is left behind, and what is seen meanwhile.


def test_a_block_gives_the_regularizers_back_in_any_order_and_after_an_error() -> None:
    regularizer = Own()
    net = model(regularizer)
    first = net.layers[0]
    outer = apply_policy(net, BFLOAT16)
    inner = apply_policy(net, FLOAT16)
    outer.restore()
    assert losses(net)[0].dtype == tf.float32
    assert regularizer.seen[-1] == "float32"
    inner.restore()
    assert first.activity_regularizer is regularizer
    assert "add_loss" not in vars(first)
    with pytest.raises(KeyError), apply_policy(net, BFLOAT16):
        raise KeyError
    assert first.activity_regularizer is regularizer
    state = polyamp.init(net, recipe(BFLOAT16))
    polyamp.train_step(lambda bound, x: tf.reduce_mean(bound(x)) + sum(bound.losses), recipe(BFLOAT16))(state, X)
    assert regularizer.seen[-1] == "float32"
    assert first.activity_regularizer is regularizer


def test_a_regularizer_that_is_set_meanwhile_stays() -> None:
    net = model(Own())
    other = regularizers.L1(1.0)
    with apply_policy(net, BFLOAT16):
        net.layers[0].activity_regularizer = other
        (loss,) = losses(net)
        assert loss.dtype == tf.float32
    assert net.layers[0].activity_regularizer is other
    with apply_policy(net, BFLOAT16):
        net.layers[0].activity_regularizer = None
        assert losses(net) == []
    assert net.layers[0].activity_regularizer is None


def test_meanwhile_it_looks_as_it_is() -> None:
    own = regularizers.L2(0.25)
    net = model(own)
    with apply_policy(net, BFLOAT16):
        shown = net.layers[0].activity_regularizer
        assert isinstance(shown, regularizers.L2)
        assert shown == own
        assert own == shown
        assert shown != regularizers.L2(0.25)
        assert (hash(shown), repr(shown), shown.l2, shown.get_config()) == (hash(own), repr(own), 0.25, {"l2": 0.25})
        shown.l2 = 0.5
        assert own.l2 == 0.5
        for copied in (copy.copy(shown), copy.deepcopy(shown), pickle.loads(pickle.dumps(shown))):
            assert type(copied) is regularizers.L2
            assert copied.l2 == 0.5
        with apply_policy(net, FLOAT16):
            assert net.layers[0].activity_regularizer is shown, "not wrapped twice"


@pytest.mark.parametrize("activity", [regularizers.L1L2(0.1, 0.2), Own(0.3), half_sum, "orthogonal_regularizer"])
def test_configurations_are_those_of_the_model_itself(activity: Any) -> None:
    net = model(activity)
    before = [regularizer_config(layer) for layer in net.layers]
    with apply_policy(net, BFLOAT16):
        assert [regularizer_config(layer) for layer in net.layers] == before
        copied = keras.models.clone_model(net)
        assert type(copied.layers[0].activity_regularizer) is net.layers[0].activity_regularizer.__class__
    assert [regularizer_config(layer) for layer in copied.layers] == before


def regularizer_config(layer: Any) -> Any:
    return layer.get_config().get("activity_regularizer")


@SAVING
@pytest.mark.parametrize("activity", [regularizers.L2(0.25), Own(0.3), half_sum])
def test_regularizers_in_files_are_those_of_a_model_without_it(activity: Any, tmp_path: Path) -> None:
    """One regularizer that two layers share is shared in the file too."""
    parts = [layers.Dense(8, name=name, activity_regularizer=activity) for name in ("one", "two")]
    net = through(*parts)

    def saved(name: str) -> Any:
        net.save(tmp_path / name)
        with zipfile.ZipFile(tmp_path / name) as archive:
            text = archive.read("config.json").decode()
        found = [part["config"].get("activity_regularizer") for part in json.loads(text)["config"]["layers"]]
        shared = {part.pop("shared_object_id") for part in found if part and "shared_object_id" in part}
        assert len(shared) == 1
        return found

    before = saved("before.keras")
    with zipfile.ZipFile(tmp_path / "before.keras") as archive:
        assert "polyamp" not in archive.read("config.json").decode()
    apply_policy(net, BFLOAT16)
    assert saved("under.keras") == before
    loaded = keras.saving.load_model(tmp_path / "under.keras")
    assert loaded.layers[0].activity_regularizer.__class__ is activity.__class__
    with apply_policy(loaded, BFLOAT16):
        assert [loss.dtype.name for loss in losses(loaded)] == ["float32"] * 2


@SAVING
def test_copies_of_a_model_under_a_policy(tmp_path: Path) -> None:
    net = model(regularizers.L2(0.25))
    apply_policy(net, BFLOAT16)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.copy(net)):
        assert isinstance(copied.layers[0].activity_regularizer, regularizers.L2)
        assert copied.layers[0].compute_dtype == "bfloat16"  # a copy goes through Keras's file, which holds the policy
        assert np.array_equal(copied(X), net(X))
    net.export(tmp_path / "exported", verbose=False)
    assert np.array_equal(tf.saved_model.load(tmp_path / "exported").serve(X), net(X))


def test_layers_built_inside_a_block_keep_their_regularizer() -> None:
    attend = layers.GroupQueryAttention(4, 2, 1, activity_regularizer="l2")
    own = attend.activity_regularizer
    with apply_layer_policies(attend, resolve_policy(attend, BFLOAT16)):
        attend(X[None], X[None])
    for layer in attend._flatten_layers():
        assert type(layer.activity_regularizer) in (regularizers.L2, type(None))
    assert attend.activity_regularizer is own
