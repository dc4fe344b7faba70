"""`compile` and `fit` with losses that are no mean over rows: masks and sample weights over micro-batches (S8)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import polyamp
import polyamp_tensorflow

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, 9, size=(8, 5))
TOKENS[:4, 1:], TOKENS[4, :] = 0, 0  # the first rows have one token each, and one has none
LABELS = RNG.integers(0, 3, size=(8, 5))
WEIGHTS = np.array([0.1, 0.1, 0.0, 0.2, 3.0, 2.0, 1.0, 4.0], np.float32)


def masked() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((5,), dtype="int32"), keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.Dense(3)]
    )


def plain() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((5,), dtype="int32"), keras.layers.Embedding(9, 4), keras.layers.Dense(3, use_bias=False)]
    )


def dense() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])


def trained(make: Any, loss: Any, count: int, x: Any, y: Any, **data: Any) -> list[Any]:
    model = make()
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.5), accumulate_steps=count)
    polyamp_tensorflow.compile(model, recipe, loss=loss)
    model.fit(x, y, batch_size=8 // count, epochs=2, shuffle=False, verbose=0, **data)
    assert int(model.optimizer.iterations) == 2
    return list(model.get_weights())


def test_s08_a_mask_decides_what_a_micro_batch_counts() -> None:
    """Keras divides a masked loss by what the mask leaves."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    one, several = (trained(masked, loss, n, TOKENS, LABELS) for n in (1, 2))
    for ours, theirs in zip(several, one, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize(("make", "column"), [(masked, True), (plain, False)], ids=["masked", "plain"])
def test_s08_a_class_that_a_loss_ignores_does_not_count(make: Any, column: bool) -> None:
    """Beside a mask as well: Keras divides by what both leave."""
    labels = np.where(np.arange(5) < [[1], [5], [2], [0], [4], [3], [1], [1]], LABELS, 2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
    one, several = (trained(make, loss, n, TOKENS, labels[..., None] if column else labels) for n in (1, 4))
    for ours, theirs in zip(several, one, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_s08_sample_weights_decide_where_the_loss_divides_by_them(reduction: str) -> None:
    x, y = RNG.normal(size=(8, 5)).astype("f4"), RNG.normal(size=(8, 1)).astype("f4")
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    one, several = (trained(dense, loss, n, x, y, sample_weight=WEIGHTS) for n in (1, 4))
    for ours, theirs in zip(several, one, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_s08_a_window_in_which_nothing_counts_updates_nothing() -> None:
    model = dense()
    recipe = polyamp.Recipe(optimizer=polyamp.adamw(0.5, weight_decay=0.5), accumulate_steps=2)
    polyamp_tensorflow.compile(model, recipe, loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    before = [weights.copy() for weights in model.get_weights()]
    x, y = np.ones((8, 5), "f4"), np.ones((8, 1), "f4")
    model.fit(x, y, batch_size=4, verbose=0, sample_weight=np.zeros(8, "f4"))
    assert int(model.optimizer.iterations) == 0
    assert all(np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True))
