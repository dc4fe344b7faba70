"""Losses that are no mean over rows, on several replicas (S9): the result is that of one batch of all their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import polyamp
from tests.backends.tensorflow.distributed.test_as_one import assert_alike, copies, on

COUNTS = [(6, 1), (0, 4), (6, 6)]
"""Labels that count in the six rows of each replica, step by step."""


def given(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    labels = rng.integers(0, 2, size=(2, 6))
    labels[np.arange(6) >= np.asarray(COUNTS[step])[:, None]] = -100
    return {"x": rng.normal(size=(12, 4)).astype(np.float32), "labels": labels.ravel()}


def ignoring(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["labels"], ignore_index=-100)


def number_of(batch: Any) -> Any:
    return polyamp.losses.count(batch["labels"] != -100)


def means(model: Any, batch: Any) -> Any:
    outputs = model(batch["x"])
    total = polyamp.losses.softmax_cross_entropy(outputs, batch["labels"], ignore_index=-100, reduction="sum")
    return polyamp.losses.Mean(total, number_of(batch)) + 0.1 * polyamp.losses.huber(outputs, outputs * 0.0)


@pytest.mark.parametrize(("loss_fn", "windows"), [(ignoring, 1), (ignoring, 2), (means, 1), (means, 2)])
def test_s09_replicas_count_by_the_labels_that_count(loss_fn: Any, windows: int, two_cpus: Any) -> None:
    """A replica without any among them."""
    recipe = polyamp.Recipe(optimizer=polyamp.adamw(1e-2), clip_norm=0.3, accumulate_steps=windows)
    alone = recipe.replace(accumulate_steps=1)
    several, one = on(two_cpus, recipe), on(tf.distribute.get_strategy(), alone)
    step, step_alone = polyamp.train_step(loss_fn, recipe), polyamp.train_step(loss_fn, alone)
    for number in range(len(COUNTS)):
        several, result = step(several, given(number))
        one, expected = step_alone(one, given(number))
        np.testing.assert_allclose([result.loss, result.grad_norm], [expected.loss, expected.grad_norm], rtol=1e-5)
        if loss_fn is ignoring:
            assert float(result.weight) == sum(COUNTS[number])
    assert_alike(copies(two_cpus, several))
    for ours, theirs in zip(several.model.get_weights(), one.model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_s09_replicas_count_by_their_rows(two_cpus: Any) -> None:
    """Batches of 5 rows and of 1, as a distributed dataset yields at its end."""

    def mean(model: Any, rows: Any) -> Any:
        return tf.reduce_mean(tf.square(model(rows) - rows[:, :2]))

    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.1))
    several, one = on(two_cpus, recipe), on(tf.distribute.get_strategy(), recipe)
    step = polyamp.train_step(mean, recipe)
    rows = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    parts = [rows[:5], rows[5:]]

    def own(context: Any) -> Any:
        return tf.constant(parts[context.replica_id_in_sync_group])

    several, result = step(several, two_cpus.experimental_distribute_values_from_function(own))
    one, expected = step(one, rows)
    np.testing.assert_allclose([result.loss, result.grad_norm], [expected.loss, expected.grad_norm], rtol=2e-6)
    for ours, theirs in zip(several.model.get_weights(), one.model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_s09_a_step_without_any_label_is_skipped_on_all_replicas(two_cpus: Any) -> None:
    recipe = polyamp.Recipe(optimizer=polyamp.adamw(1e-2, weight_decay=0.5))
    state = on(two_cpus, recipe)
    before = [weights.copy() for weights in state.model.get_weights()]
    state, result = polyamp.train_step(ignoring, recipe)(state, {**given(0), "labels": np.full(12, -100)})
    assert (float(result.loss), float(result.weight), bool(result.skipped)) == (0.0, 0.0, True)
    assert all(np.array_equal(old, new) for old, new in zip(before, state.model.get_weights(), strict=True))
