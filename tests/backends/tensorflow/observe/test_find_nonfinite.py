"""`polyamp.find_nonfinite` in Keras: planted faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import polyamp
import polyamp_tensorflow
from polyamp import losses
from polyamp.nonfinite.report import NonfiniteReport


class Middle(keras.layers.Layer):
    def __init__(self, function: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


def plain(function: Callable[[Any], Any]) -> Any:
    """Three layers, the middle one a function of the test."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, name="first"), Middle(function, name="middle"), keras.layers.Dense(3, name="head")]
    return keras.Sequential([keras.Input((8,)), *layers])


def masked(x: Any) -> Any:
    """A mask of -1e9 that is added in float16, with a row that has nothing else."""
    mask = keras.ops.cast(keras.ops.reshape([-1e9, 0.0, 0.0, 0.0], (4, 1)), x.dtype)
    return keras.ops.cast(keras.ops.exp(x + mask - keras.ops.max(x + mask, axis=-1, keepdims=True)), x.dtype)


PLANTS: dict[str, tuple[Callable[[Any], Any], str, bool]] = {
    "activations above 65504": (lambda x: (x * 300) * 3000, "Mul", True),
    "a mask of -1e9": (masked, "Cast", True),
    "a variance of zero": (lambda x: x / keras.ops.std(x - x, axis=-1, keepdims=True), "", False),
    "exp of a large number": (lambda x: keras.ops.exp(x * 0 + 1000), "Exp", False),
}
RNG = np.random.default_rng(1)
BATCH = {"x": RNG.normal(size=(4, 8)).astype(np.float32), "y": np.array([0, 1, 2, 0])}


def loss_fn(model: Any, batch: Any) -> Any:
    return losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def found(model: Any, batch: Any = None, **options: Any) -> NonfiniteReport:
    return polyamp.find_nonfinite(loss_fn, "mixed_float16", model, BATCH if batch is None else batch, **options)


@pytest.mark.parametrize("name", list(PLANTS))
def test_a_planted_fault_is_named(name: str) -> None:
    function, operation, by_precision = PLANTS[name]
    model = plain(function)
    before = [np.array(value) for value in model.get_weights()]
    report = found(model)
    assert (report.origin, report.module) == ("forward", "middle"), str(report)
    assert report.operation == operation or not operation, str(report)
    assert report.by_precision is by_precision
    assert all(np.array_equal(one, other) for one, other in zip(before, model.get_weights(), strict=True))


def test_what_is_finite_bad_data_and_gradients_that_overflow() -> None:
    assert found(plain(keras.ops.tanh)).origin == "none"
    bad = {**BATCH, "x": np.where(np.arange(4)[:, None] == 2, np.nan, BATCH["x"])}
    assert str(found(plain(keras.ops.tanh), bad)) == (
        "The batch is not finite: 8 elements of batch['x']. This is no matter of precision."
    )
    report = found(plain(keras.ops.tanh), loss_scale=2.0**40)
    assert (report.origin, report.by_precision) == ("backward", True)


def test_a_loss_in_16_bits_and_a_rate_that_diverged() -> None:
    def narrow(model: Any, batch: Any) -> Any:
        squares = keras.ops.square(keras.ops.cast(model(batch["x"]), "float16") * 3000)
        return keras.ops.cast(keras.ops.sum(squares), "float32")

    report = polyamp.find_nonfinite(narrow, "mixed_float16", plain(keras.ops.tanh), BATCH)
    assert (report.origin, report.module, report.by_precision, report.own_cast) == ("forward", "", None, "float16")
    model = plain(keras.ops.tanh)
    model.layers[-1].kernel.assign(keras.ops.full_like(model.layers[-1].kernel, 3e38))
    diverged = found(model)
    assert (diverged.origin, diverged.by_precision) == ("forward", False)


def test_a_mask_of_minus_infinity_before_a_softmax_is_no_fault() -> None:
    def softmax(x: Any) -> Any:
        return keras.ops.softmax(keras.ops.where(x > 0.5, keras.ops.cast(-np.inf, x.dtype), x))

    assert found(plain(softmax)).origin == "none"


def test_a_parameter_that_is_not_finite() -> None:
    model = plain(keras.ops.tanh)
    kernel = model.layers[0].kernel.numpy()
    kernel[0, 0] = np.inf
    model.layers[0].kernel.assign(kernel)
    report = found(model)
    assert report.origin == "parameters"
    assert report.module.endswith("first/kernel")


class _Rescale(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return (x * 3e5) / 3e5


@pytest.mark.parametrize("way", ["apply_policy", "compile"])
def test_a_model_that_carries_a_policy_is_judged_under_the_given_one(way: str) -> None:
    keras.utils.set_random_seed(0)
    x, y = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32), np.zeros(32, np.int32)
    layers = [keras.Input((8,)), keras.layers.Dense(16, name="a"), _Rescale(name="rescale"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adamw(1e-2))
    if way == "compile":
        polyamp_tensorflow.compile(model, recipe, loss="mse")
    else:
        polyamp_tensorflow.apply_policy(model, "mixed_float16")
    carried = [layer.compute_dtype for layer in model.layers]

    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])

    report = polyamp.find_nonfinite(loss_fn, "mixed_float16", model, {"x": x, "y": y})
    assert (report.origin, report.module, report.by_precision) == ("forward", "rescale", True)
    modules = {row.module for row in polyamp.explain(loss_fn, "mixed_bfloat16", model, {"x": x, "y": y}).operations}
    assert {"a", "rescale"} <= modules
    assert [layer.compute_dtype for layer in model.layers] == carried
    assert "float16" in carried


def test_a_state_in_place_of_its_model_is_refused() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    state = polyamp.init(model, polyamp.Recipe(optimizer=polyamp.sgd(0.1)))
    with pytest.raises(polyamp.ModelError, match=r"Received: a TensorFlowState\. Pass its model: state\.model"):
        polyamp.find_nonfinite(lambda m, x: m(x), "mixed_float16", state, np.ones((1, 8), np.float32))


def test_a_gradient_that_is_not_finite_stands_between_two_modules() -> None:
    """The untaken branch of the middle layer has an infinite slope; the forward pass is finite."""
    gate = Middle(lambda x: keras.ops.where(x > 1e9, keras.ops.log(x - x), x), name="gate")
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8, name="first"), gate, keras.layers.Dense(3, name="head")]
    )
    report = polyamp.find_nonfinite(
        lambda model, x: keras.ops.mean(keras.ops.square(model(x))), "float32", model, np.ones((4, 8), np.float32)
    )
    assert (report.origin, report.module, report.finite_until) == ("backward", "first", "gate")
    assert report.operation == "Log"
    assert report.place is not None
    assert "keras.ops.log(x - x)" in report.place.code
