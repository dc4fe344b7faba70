"""`apply_policy` for good and for a while: nesting, order, threads, cached functions, saved models, shared layers."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from polyamp import Policy
from polyamp.errors import ModelError, PolicyError, UnsupportedError
from polyamp_tensorflow import apply_policy
from polyamp_tensorflow.precision.autocast import apply_layer_policies, resolve_policy

layers = keras.layers
BFLOAT16, FLOAT16, FLOAT32 = Policy("mixed_bfloat16"), Policy("mixed_float16"), Policy("float32")
X = np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(2, 4)


def model() -> Any:
    keras.utils.set_random_seed(0)
    parts = [layers.Dense(4, name="dense"), layers.LayerNormalization(name="norm"), layers.Dense(2, name="last")]
    return keras.Sequential([keras.Input((4,)), *parts])


def dtypes(model: Any) -> list[str]:
    return [layer.compute_dtype for layer in model.layers]


def test_it_applies_at_once_and_stays_until_restored() -> None:
    net = model()
    reference = net.predict(X, verbose=0)
    applied = apply_policy(net, BFLOAT16)
    assert dtypes(net) == ["bfloat16", "float32", "float32"]
    inside = net.predict(X, verbose=0)
    assert inside.dtype == np.float32
    assert 0.0 < np.abs(inside - reference).max() < 0.05
    assert repr(applied).startswith("AppliedPolicy('sequential")
    applied.restore()
    applied.restore()
    assert dtypes(net) == ["float32"] * 3
    assert np.array_equal(net.predict(X, verbose=0), reference)


def test_a_block_inside_gives_back_the_policy_around_it() -> None:
    net = model()
    with apply_policy(net, BFLOAT16):
        with apply_policy(net, FLOAT16), apply_policy(net, FLOAT32):
            assert dtypes(net) == ["float32"] * 3
        assert dtypes(net) == ["bfloat16", "float32", "float32"]
        with pytest.raises(KeyError), apply_policy(net, FLOAT16):
            raise KeyError(dtypes(net)[0])
        assert dtypes(net)[0] == "bfloat16"
    assert dtypes(net) == ["float32"] * 3


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (1, 2, 0)])
def test_policies_come_off_in_any_order(order: tuple[int, ...]) -> None:
    net = model()
    own = [layer.dtype_policy for layer in net.layers]
    expected = {0: "bfloat16", 1: "float16", 2: "float64"}
    policies = [BFLOAT16, FLOAT16, Policy(param="float64", compute="float64", output="float64")]
    applied = [apply_policy(net, policy) for policy in policies]
    on = [0, 1, 2]
    for number in order:
        assert dtypes(net)[0] == expected[on[-1]]
        applied[number].restore()
        on.remove(number)
    assert [layer.dtype_policy for layer in net.layers] == own
    assert all("_polyamp_policies" not in vars(layer) for layer in [net, *net.layers])


def test_a_policy_applied_again_to_a_model_that_has_one_is_the_same() -> None:
    net = model()
    first = apply_policy(net, BFLOAT16)
    once, choices = net(X), dict(first.choices)
    second = apply_policy(net, BFLOAT16)
    assert dict(second.choices) == choices
    assert np.array_equal(net(X), once)
    with apply_policy(net, FLOAT32):
        full = net(X)
    first.restore()
    second.restore()
    assert np.array_equal(net(X), full)


def test_a_layer_that_is_left_alone_is_so_under_another_policy_too() -> None:
    dense = layers.Dense(4, name="given", dtype="mixed_float16")
    net = keras.Sequential([keras.Input((4,)), dense, layers.Dense(2)])
    with apply_policy(net, FLOAT32):
        assert dense.compute_dtype == "float32", "a float32 policy brings no loss scaling for it"
        with apply_policy(net, FLOAT16) as applied:
            assert (dense.compute_dtype, applied.choices["given"]) == ("float16", (None, "given"))
        with apply_policy(net, BFLOAT16):
            assert dense.compute_dtype == "bfloat16", "its own is float16, for which there is no loss scaling either"
        assert dense.compute_dtype == "float32"
    assert dense.compute_dtype == "float16"


def test_threads_that_come_and_go_leave_the_models_own_policies() -> None:
    net = model()
    own = [layer.dtype_policy for layer in net.layers]
    ready = threading.Barrier(4)
    errors: list[Exception] = []

    def work(policy: Policy) -> None:
        try:
            ready.wait(30)
            for _ in range(50):
                with apply_layer_policies(net, resolve_policy(net, policy)):
                    pass
        except Exception as error:  # noqa: BLE001  # shown by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(policy,)) for policy in (BFLOAT16, FLOAT16, FLOAT32, BFLOAT16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [layer.dtype_policy for layer in net.layers] == own
    assert all("_polyamp_policies" not in vars(layer) for layer in [net, *net.layers])


def test_an_open_block_is_seen_by_other_threads() -> None:
    net, seen = model(), []
    with apply_policy(net, BFLOAT16):
        thread = threading.Thread(target=lambda: seen.append(net.layers[0](tf.constant(X)).dtype))
        thread.start()
        thread.join()
    assert seen == [tf.bfloat16]


def test_fit_evaluate_and_predict_are_traced_anew() -> None:
    net = model()
    traced: list[str] = []

    class Spy(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def call(self, x: Any) -> Any:
            traced.append(x.dtype.name if hasattr(x.dtype, "name") else x.dtype)
            return x

    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4), Spy()])
    net = keras.Sequential([keras.Input((4,)), inner, layers.Dense(1)])
    for each in (net, inner):
        each.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")

    def run() -> list[set[str]]:
        """The dtypes that each of the four was traced in."""
        found = []
        actions: list[Callable[[], Any]] = [
            lambda: net.fit(X, X[:, :1], epochs=2, verbose=0),
            lambda: net.evaluate(X, X[:, :1], verbose=0),
            lambda: net.predict(X, verbose=0),
            lambda: inner.predict(X, verbose=0),
        ]
        for action in actions:
            traced.clear()
            action()
            found.append(set(traced))
        return found

    assert run() == [{"float32"}] * 4
    assert run() == [set()] * 4, "nothing is traced twice without need"
    with apply_policy(net, BFLOAT16):
        assert run() == [{"bfloat16"}] * 4
        assert run() == [set()] * 4
    assert run() == [{"float32"}] * 4


def test_fit_trains_under_a_policy() -> None:
    net = model()
    net.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
    apply_policy(net, BFLOAT16)
    losses = net.fit(X, X[:, :2], epochs=30, verbose=0).history["loss"]
    assert losses[-1] < 0.1 * losses[0]
    assert {variable.dtype for variable in net.variables} == {"float32"}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, in save()
def test_a_model_saved_under_a_permanent_policy_has_it_when_loaded(tmp_path: Path) -> None:
    net = model()
    apply_policy(net, BFLOAT16)
    net.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert dtypes(loaded) == ["bfloat16", "float32", "float32"]
    np.testing.assert_allclose(loaded(X), net(X), atol=0.02)  # the norm's result is rounded to that of its input
    again = apply_policy(loaded, BFLOAT16)
    assert np.array_equal(loaded(X), net(X))
    again.restore()
    with apply_policy(loaded, FLOAT32):
        assert dtypes(loaded) == ["float32"] * 3


def test_a_model_that_is_not_built_is_refused() -> None:
    with pytest.raises(ModelError, match=r"apply_policy takes a built model.*Received: 'net', which is not built"):
        apply_policy(keras.Sequential([layers.Dense(2)], name="net"), BFLOAT16)
    with pytest.raises(UnsupportedError, match=r"takes a keras\.Model or layer. Received: function"):
        apply_policy(lambda x: x, FLOAT32)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, in export()
def test_a_model_exported_under_a_policy_runs_as_it_did(tmp_path: Path) -> None:
    class Residual(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = layers.Dense(4), layers.LayerNormalization()

        def call(self, x: Any) -> Any:
            return x + self.norm(self.dense(x))

    net = keras.Sequential([keras.Input((4,)), Residual(), layers.Dense(2, activation="softmax")])
    apply_policy(net, BFLOAT16)
    net.export(tmp_path / "model", verbose=False)
    assert np.array_equal(tf.saved_model.load(tmp_path / "model").serve(X), net(X))


def test_importing_settles_no_global_policy(dtype_after_import: str) -> None:
    assert dtype_after_import == "float64"


def test_sublayers_that_are_built_inside_a_block_get_their_parents_own_policy() -> None:
    attend = layers.MultiHeadAttention(2, 2)
    with apply_layer_policies(attend, resolve_policy(attend, BFLOAT16)):
        attend(X[None], X[None])
        assert attend.query_dense.compute_dtype == "bfloat16"
    assert {layer.compute_dtype for layer in attend._flatten_layers()} == {"float32"}
    assert attend.query_dense.dtype_policy is attend.dtype_policy


def test_a_refused_policy_leaves_the_model_alone() -> None:
    net = model()
    with pytest.raises(PolicyError, match=r"'nrom' matches no module path. Nearest: 'norm'"):
        apply_policy(net, BFLOAT16.replace(overrides={"nrom": "float32"}))
    with pytest.raises(UnsupportedError, match="Received: param='float64', compute='float16'"):
        apply_policy(net, Policy(param="float64", compute="float16"))
    assert dtypes(net) == ["float32"] * 3


def test_a_model_with_a_policy_is_freed() -> None:
    net = model()
    apply_policy(net, BFLOAT16)
    net(X)
    gone = weakref.ref(net.layers[0])
    del net
    gc.collect()
    assert gone() is None


class Twice(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """A layer that lies in two places of it."""

    def __init__(self, shared: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.first = keras.Sequential([keras.Input((4,)), shared], name="first")
        self.second = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="own"), shared], name="second")

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


def test_a_shared_layer_is_found_by_each_of_its_paths() -> None:
    shared = layers.Dense(4, name="shared")
    net = keras.Sequential([keras.Input((4,)), Twice(shared, name="twice"), layers.Dense(2, name="last")])
    for glob in ("twice/first/shared", "twice/second/shared", "**/shared", "*/second"):
        with apply_policy(net, BFLOAT16.replace(overrides={glob: "float32"})) as applied:
            assert shared.compute_dtype == "float32", glob
            assert applied.choices["twice/first/shared"] == ("float32", "override")
    both = BFLOAT16.replace(overrides={"twice/first": "float32", "twice/second/shared": "bfloat16"})
    with apply_policy(net, both):
        assert shared.compute_dtype == "bfloat16", "the longest glob wins, whichever path it covers"
    with pytest.raises(PolicyError, match=r"matches no module path. Nearest: 'twice/second/shared'"):
        apply_policy(net, BFLOAT16.replace(overrides={"twice/second/shraed": "float32"}))


def test_operations_of_a_functional_model_have_paths_too() -> None:
    inputs = keras.Input((4,))
    product = keras.ops.matmul(layers.Dense(4)(inputs), np.ones((4, 4), np.float32))
    inner = keras.Model(inputs, product, name="inner")
    outer = keras.Input((4,))
    net = keras.Model(outer, layers.Dense(2)(inner(outer)))
    name = f"inner/{inner.operations[-1].name}"
    with apply_policy(net, BFLOAT16) as applied:
        assert applied.choices[name] == ("bfloat16", "product")
        assert inner(X).dtype == tf.bfloat16
    with apply_policy(net, BFLOAT16.replace(overrides={name: "float32"})):
        assert inner(X).dtype == tf.float32
