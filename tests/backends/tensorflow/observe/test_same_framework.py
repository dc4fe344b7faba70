"""`polyamp.compare` of two Keras trainings: replicas against one device, dtypes, XLA."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import polyamp
import polyamp_tensorflow

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((8, 6)).astype("f4"), RNG.integers(0, 3, 8)


def network() -> Any:
    given = keras.Input((6,))
    hidden = layers.Dense(16, activation="gelu", name="first")(given)
    hidden = layers.Dropout(0.25, name="drop")(layers.LayerNormalization(name="norm")(hidden))
    return keras.Model(given, layers.Dense(3, name="head")(hidden))


def loss_of(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch[0]), batch[1])


def batches(step: int) -> Any:
    return X + np.float32(step), Y


def recipe(policy: str = "float32") -> polyamp.Recipe:
    return polyamp.Recipe(policy=policy, optimizer=polyamp.adamw(0.01), clip_norm=1.0)


def test_two_replicas_train_as_one_device_does(two_cpus: Any, caplog: Any) -> None:
    one = network()
    with two_cpus.scope():
        two = network()
    held = [variable.numpy() for variable in (*one.variables, *two.variables)]
    labels = ("one device", "two replicas")
    with caplog.at_level(logging.WARNING, "tensorflow"):
        report = polyamp.compare(
            one, two, batches, loss_of, recipe("mixed_bfloat16"), steps=2, labels=labels, randomness="shared"
        )
    assert report.agrees, str(report)
    seen = {(row.module, row.what) for row in report.comparisons[0].rows if row.phase == "float32"}
    assert {("norm", "output"), ("norm", "cotangent"), ("first", "gradient"), ("head", "parameter")} <= seen
    for variable, value in zip((*one.variables, *two.variables), held, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert "retracing" not in caplog.text


def test_float32_against_bfloat16() -> None:
    recipes = (recipe(), recipe("mixed_bfloat16"))
    report = polyamp.compare(network(), network(), batches, loss_of, recipes, labels=("float32", "mixed_bfloat16"))
    assert report.agrees, str(report)
    dtypes = {row.dtypes for row in report.comparisons[0].rows if row.module == "first" and row.what == "output"}
    assert ("float32", "bfloat16") in dtypes


def test_xla_on_and_off() -> None:
    options = ({"step": {"jit_compile": True}}, {"step": {"jit_compile": False}})
    report = polyamp.compare(
        network(), network(), batches, loss_of, recipe(), labels=("XLA", "no XLA"), options=options
    )
    assert report.agrees, str(report)


@pytest.mark.parametrize("inside", ["first", "second"])
def test_s31_a_layer_whose_partner_has_its_activation_inside_keeps_its_row(inside: str) -> None:
    """Its output is compared behind the activation, whichever side has it inside, in every phase."""

    def apart() -> Any:
        given = keras.Input((6,))
        hidden = layers.Activation("gelu", name="gelu")(layers.Dense(16, name="fc")(given))
        return keras.Model(given, layers.Dense(3, name="head")(hidden))

    def whole() -> Any:
        given = keras.Input((6,))
        return keras.Model(given, layers.Dense(3, name="head")(layers.Dense(16, activation="gelu", name="fc")(given)))

    one, two = (whole(), apart()) if inside == "first" else (apart(), whole())
    report = polyamp.compare(one, two, batches, loss_of, recipe())
    assert report.agrees, str(report)
    rows = [row for row in report.comparisons[0].rows if row.module == "fc" and row.stage == "forward"]
    assert [row.what for row in rows if row.what != "input"] == ["output" if inside == "first" else "output, gelu"]
    assert not any(row.counts for row in rows)


@pytest.mark.parametrize("way", ["compile", "apply_policy"])
def test_models_that_carry_a_policy_are_compared_without_it(way: str) -> None:
    """With it no layer's output was seen, and another epsilon was taken for another loss function."""
    made = []
    for epsilon in (1e-3, 1e-5):
        stack = [keras.Input((6,)), layers.Dense(8), layers.LayerNormalization(epsilon=epsilon, name="norm")]
        model = keras.Sequential([*stack, layers.Dense(3)])
        if way == "compile":
            polyamp_tensorflow.compile(model, recipe("mixed_bfloat16"), loss="mse")
        else:
            polyamp_tensorflow.apply_policy(model, "mixed_bfloat16")
        made.append(model)
    carried = [layer.compute_dtype for layer in made[0].layers]
    report = polyamp.compare(*made, X)
    assert report.first is not None
    assert (report.first.module, report.first.kind) == ("norm", "epsilon"), str(report)
    assert [layer.compute_dtype for layer in made[0].layers] == carried
    assert "bfloat16" in carried
