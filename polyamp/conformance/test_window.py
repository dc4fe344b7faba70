"""Rule S8 where micro-batches differ: the last, smaller batch of an epoch trains as one batch of its size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import (
    Batch,
    batch,
    flat_weights,
    layers,
    loss_fn,
    recipe,
    relative_difference,
    split_rows,
    to_float,
    train,
)
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness

SETTINGS: dict[str, Any] = {
    "optimizer": polyamp.adamw(1e-2),
    "scaler": polyamp.LossScaler.static(64.0),
    "clip_norm": 0.5,
}


def assert_same_training(harness: Harness, backend: Backend, wholes: list[Batch], given: list[Any]) -> None:
    """Training on whole batches at once, and on the same in 4 micro-batches, end at the same place."""
    found = []
    for count, batches in ((1, wholes), (4, given)):
        state, results = train(harness, recipe(**SETTINGS, accumulate_steps=count), batches)
        assert to_float(backend, results[-1].step) == len(wholes)
        reported = [to_float(backend, field) for r in results for field in (r.loss, r.grad_norm)]
        found.append((flat_weights(harness, state), reported))
    assert relative_difference(found[0][0], found[1][0]) < 2e-5
    assert relative_difference(found[0][1], found[1][1]) < 5e-6


def test_s08_the_last_batch_of_an_epoch_equals_one_batch_of_its_size(backend: Backend, harness: Harness) -> None:
    """7 rows of 4 micro-batches are 2, 2, 2 and 1; fewer rows than micro-batches are one each."""
    batches = [batch(seed, size=size) for seed, size in enumerate((8, 7, 2, 1, 8))]
    assert_same_training(harness, backend, batches, batches)


def test_s08_a_list_may_be_shorter_and_its_members_may_differ(backend: Backend, harness: Harness) -> None:
    lengths = ((3, 3, 1), (2, 2, 2))
    wholes = [batch(seed, size=sum(own)) for seed, own in enumerate(lengths)]
    assert_same_training(
        harness, backend, wholes, [split_rows(whole, own) for whole, own in zip(wholes, lengths, strict=True)]
    )


def test_s08_what_is_no_row_is_the_same_in_every_micro_batch(backend: Backend, harness: Harness) -> None:
    """In a list an array that does not differ along axis 0 has no say in what a micro-batch weighs."""

    def weighed(model: Any, item: Batch) -> Any:
        return loss_fn(model, item) * (item["weights"][0] * 5)

    made = recipe(accumulate_steps=2)
    state = polyamp.init(harness.mlp(layers()), made)
    weights = np.full(5, 0.2, np.float32)
    parts = [{**part, "weights": weights} for part in split_rows(batch(size=3), [2, 1])]
    _, result = polyamp.train_step(weighed, made)(state, parts)
    alone = polyamp.init(harness.mlp(layers()), recipe())
    _, whole = polyamp.train_step(loss_fn, recipe())(alone, batch(size=3))
    assert relative_difference(to_float(backend, whole.loss), to_float(backend, result.loss)) < 5e-6


def test_s08_aux_of_micro_batches_that_differ(backend: Backend, harness: Harness) -> None:
    """A number is stacked; what has a row for every example is concatenated."""

    def with_aux(model: Any, item: Batch) -> Any:
        outputs = model(item["x"])
        return polyamp.losses.mean_squared_error(outputs, item["y"]), {"loss": outputs[0, 0] * 0 + 1, "x": item["x"]}

    made = recipe(accumulate_steps=3)
    state = polyamp.init(harness.mlp(layers()), made)
    step = polyamp.train_step(with_aux, made)
    for size, stacked, shape in ((5, (3,), (5, 4)), (1, (1,), (1, 1, 4))):
        given = batch(size=size)
        state, result = step(state, given)
        assert backend.to_numpy(result.aux["loss"]).shape == stacked
        found = backend.to_numpy(result.aux["x"])
        assert found.shape == shape
        assert np.array_equal(found.reshape(size, 4), given["x"])


@pytest.mark.parametrize(("size", "row"), [(8, 5), (7, 6)], ids=["any", "the smallest"])
def test_s08_an_overflow_in_a_micro_batch_skips_the_window(
    backend: Backend, harness: Harness, size: int, row: int
) -> None:
    made = recipe("mixed_float16", accumulate_steps=4, scaler=polyamp.LossScaler(init_scale=16.0))
    state = polyamp.init(harness.mlp(layers()), made)
    before = flat_weights(harness, state)
    broken = batch(size=size)
    broken["gain"][row] = np.inf
    state, result = polyamp.train_step(loss_fn, made)(state, broken)
    assert bool(backend.to_numpy(result.skipped))
    assert to_float(backend, result.scale) == 8.0
    assert np.array_equal(flat_weights(harness, state), before)


@pytest.mark.parametrize("size", [8, 7], ids=["even", "uneven"])
@pytest.mark.parametrize("listed", [False, True], ids=["split", "listed"])
def test_s08_what_a_batch_leaves_out_stays_out_of_every_micro_batch(
    backend: Backend, harness: Harness, size: int, listed: bool
) -> None:
    """`"mask": None`, as loaders say that there is no mask."""
    made = recipe(accumulate_steps=2)
    whole = {**batch(size=size), "mask": None}
    parts = [{**batch(i, size=4), "mask": None} for i in range(2)]
    seen = []

    def masked(model: Any, item: Any) -> Any:
        seen.append(item["mask"])
        return loss_fn(model, item)

    state = polyamp.init(harness.mlp(layers()), made)
    _, result = polyamp.train_step(masked, made)(state, parts if listed else whole)
    assert to_float(backend, result.step) == 1
    assert seen
    assert all(mask is None for mask in seen)
