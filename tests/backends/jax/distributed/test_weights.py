"""Losses that are no mean over rows, on several replicas (S9): the result is that of one batch of all their rows."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import polyamp
from tests.backends.jax.distributed.meshes import apart, bits
from tests.backends.jax.distributed.test_replicas import NAMED, WAYS, over_replicas

COUNTS = [(4, 1, 0, 2), (0, 0, 3, 0), (4, 4, 4, 4)]
"""Labels that count in the four rows of each replica, step by step."""


def given(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    labels = rng.integers(0, 3, size=(4, 4))
    labels[np.arange(4) >= np.asarray(COUNTS[step])[:, None]] = -100
    return {"x": rng.normal(size=(16, 4)).astype(np.float32), "labels": labels.ravel()}


def ignoring(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["labels"], ignore_index=-100)


def number_of(batch: Any) -> Any:
    return polyamp.losses.count(batch["labels"] != -100)


def own_sum(model: Any, batch: Any) -> Any:
    return ignoring(model, batch) * 1.0


def means(model: Any, batch: Any) -> Any:
    outputs = model(batch["x"])
    total = polyamp.losses.softmax_cross_entropy(outputs, batch["labels"], ignore_index=-100, reduction="sum")
    return polyamp.losses.Mean(total, number_of(batch)) + 0.1 * polyamp.losses.huber(outputs, outputs * 0.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("loss_fn", "options", "windows"),
    [(ignoring, {}, 1), (own_sum, {"weight": number_of}, 2), (means, {}, 1), (means, {}, 2)],
    ids=["loss", "fn, 2 windows", "means", "means, 2 windows"],
)
def test_s09_replicas_count_by_the_labels_that_count(way: str, windows: int, loss_fn: Any, options: Any) -> None:
    """Replicas without any among them."""
    w = np.random.default_rng(9).normal(size=(4, 3)).astype(np.float32)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-2), clip_norm=0.3, accumulate_steps=windows)
    alone = recipe.replace(accumulate_steps=1)
    state, one = (polyamp.init((lambda p, x: x @ p, jax.numpy.asarray(w)), made) for made in (recipe, alone))
    step = over_replicas(way, polyamp.train_step(loss_fn, recipe, **NAMED[way], **options))
    step_alone = polyamp.train_step(means if loss_fn is means else ignoring, alone)
    for number in range(len(COUNTS)):
        state, result = step(state, given(number))
        one, expected = step_alone(one, given(number))
        np.testing.assert_allclose(float(result.loss), float(expected.loss), rtol=2e-6)
        np.testing.assert_allclose(float(result.grad_norm), float(expected.grad_norm), rtol=1e-5)
        if loss_fn is not means:
            assert float(result.weight) == sum(COUNTS[number])
    assert apart(state.params, one.params) < 2e-6


@pytest.mark.parametrize("way", WAYS)
def test_s09_a_step_without_any_label_is_skipped_on_all_replicas(way: str) -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-2, weight_decay=0.5))
    state = polyamp.init((lambda p, x: x @ p, jax.numpy.ones((4, 3))), recipe)
    step = over_replicas(way, polyamp.train_step(ignoring, recipe, **NAMED[way]))
    after, result = step(state, {**given(0), "labels": np.full(16, -100)})
    assert (float(result.loss), float(result.weight), bool(result.skipped)) == (0.0, 0.0, True)
    assert bits(after.params) == bits(state.params)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("windows", [1, 2])
def test_s08_a_large_count_does_not_enlarge_the_scaled_loss(way: str, windows: int) -> None:
    """A mean over 65,536 elements: what float16 holds of the scaled gradients without weights, it holds with them."""
    scaler = polyamp.LossScaler(init_scale=2.0**14)
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1), scaler=scaler, accumulate_steps=windows)

    def over_many(model: Any, batch: Any) -> Any:
        outputs, number = model(batch["x"]), 65536.0 * jax.numpy.ones(())
        return polyamp.losses.Mean(polyamp.losses.mean_squared_error(outputs, outputs * 0.5) * number, number)

    w = np.random.default_rng(9).normal(size=(4, 3)).astype(np.float32)
    state = polyamp.init((lambda p, x: x @ p, jax.numpy.asarray(w)), recipe)
    _, result = over_replicas(way, polyamp.train_step(over_many, recipe, **NAMED[way]))(state, given(0))
    assert not bool(result.skipped)
    assert np.isfinite(float(result.grad_norm))
