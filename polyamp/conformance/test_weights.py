"""Rules S8 and S24 where the mean of a loss is not over rows: a step's result is that of one batch of all its rows."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import (
    Batch,
    advance,
    changed_arrays,
    flat_weights,
    layers,
    recipe,
    relative_difference,
    split_rows,
    to_float,
)
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import ArgumentError, LossError, UnsupportedError

LOSSES: Any = polyamp.losses
IGNORED = -100
CLASSES = np.array([0.5, 2.0, 1.0], "f4")
SETTINGS: dict[str, Any] = {"optimizer": polyamp.adamw(1e-2), "clip_norm": 0.5}

Loss = Callable[[Any, Batch], Any]


def weighted_batch(seed: int = 0, *, size: int = 12) -> Batch:
    """Rows whose labels and weights count for more and more; those of the first three count for nothing."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, size=size)
    counts = np.arange(size) >= 3
    return {
        "x": rng.normal(size=(size, 4)).astype("f4"),
        "y": rng.normal(size=(size, 3)).astype("f4"),
        "labels": np.where(counts, labels, IGNORED),
        "classes": labels,
        "weights": np.where(counts, rng.uniform(0.2, 3.0, size), 0.0).astype("f4")[:, None],
    }


def ignored_label_loss(model: Any, batch: Batch) -> Any:
    return LOSSES.softmax_cross_entropy(model(batch["x"]), batch["labels"], ignore_index=IGNORED)


def class_weighted_loss(model: Any, batch: Batch) -> Any:
    return LOSSES.softmax_cross_entropy(
        model(batch["x"]), batch["labels"], ignore_index=IGNORED, class_weights=CLASSES, label_smoothing=0.1
    )


def class_weight_loss(model: Any, batch: Batch) -> Any:
    return LOSSES.softmax_cross_entropy(model(batch["x"]), batch["classes"], class_weights=CLASSES)


def element_weighted_loss(model: Any, batch: Batch) -> Any:
    return LOSSES.mean_squared_error(model(batch["x"]), batch["y"], weights=batch["weights"]), {"rows": batch["x"]}


def mean_value_loss(model: Any, batch: Batch) -> Any:
    total = LOSSES.softmax_cross_entropy(model(batch["x"]), batch["labels"], ignore_index=IGNORED, reduction="sum")
    return LOSSES.Mean(total, label_count(batch))


def label_count(batch: Batch) -> Any:
    """How many labels count, in float32, in NumPy or in the framework."""
    return LOSSES.count(batch["labels"] != IGNORED)


def sum_of_means_loss(model: Any, batch: Batch) -> Any:
    """Over the labels that count, over weights, and over the rows."""
    outputs = model(batch["x"])
    labels = LOSSES.softmax_cross_entropy(outputs, batch["labels"], ignore_index=IGNORED, reduction="sum")
    squares = LOSSES.mean_squared_error(outputs, batch["y"], weights=batch["weights"], reduction="sum")
    plain = LOSSES.huber(outputs, batch["y"])
    whole = LOSSES.Mean(labels, label_count(batch)) - 0.1 * LOSSES.Mean(-squares, LOSSES.count(batch["weights"]) * 3.0)
    return whole + 0.5 * plain


CASES: list[tuple[Loss, list[int]]] = [
    (ignored_label_loss, [2, 7, 2, 1]),
    (class_weighted_loss, [4, 4, 4]),
    (class_weight_loss, [6, 6]),
    (element_weighted_loss, [2, 7, 2, 1]),
    (mean_value_loss, [4, 4, 4]),
    (sum_of_means_loss, [2, 7, 2, 1]),
]


def train_micro_batches(
    harness: Harness, loss_fn: Loss, count: int, batches: list[Any], policy: str = "float32", **options: Any
) -> tuple[Any, list[polyamp.StepResult]]:
    scaler = polyamp.LossScaler(init_scale=256.0) if policy == "mixed_float16" else None
    made = recipe(policy, accumulate_steps=count, scaler=scaler, **SETTINGS)
    return advance(polyamp.init(harness.mlp(layers()), made), batches, loss_fn, **options)


def test_s08_a_mean_over_a_selection_counts_what_is_selected(backend: Backend, harness: Harness) -> None:
    """Rows that a mask leaves out, as `logits[mask]` does: also where a micro-batch is left with none."""
    try:
        harness.selected(harness.array(np.ones((2, 1), "f4")), harness.array(np.ones(2, bool)))
    except UnsupportedError:
        pytest.skip("the compiled code of this backend knows the length of every array")

    def selected(model: Any, batch: Batch) -> Any:
        outputs, targets = (harness.selected(values, batch["mask"]) for values in (model(batch["x"]), batch["y"]))
        return LOSSES.mean_squared_error(outputs, targets)

    def in_a_sum(model: Any, batch: Batch) -> Any:
        return selected(model, batch) * 1.0

    batch = {name: value for name, value in weighted_batch().items() if name in ("x", "y")}
    one, made = recipe(**SETTINGS), recipe(accumulate_steps=3, **SETTINGS)
    for counts in ((4, 1, 2), (4, 0, 2), (0, 3, 4), (0, 0, 0)):
        batch["mask"] = np.concatenate([np.arange(4) < count for count in counts])
        expected, want = polyamp.train_step(selected, one)(polyamp.init(harness.mlp(layers()), one), batch)
        state, result = polyamp.train_step(selected, made)(polyamp.init(harness.mlp(layers()), made), batch)
        if any(counts):
            assert relative_difference(to_float(backend, result.loss), to_float(backend, want.loss)) < 2e-6, counts
            assert relative_difference(to_float(backend, result.grad_norm), to_float(backend, want.grad_norm)) < 1e-5, (
                counts
            )
        else:
            check_skipped(backend, want)
            check_skipped(backend, result)
        assert np.abs(flat_weights(harness, state) - flat_weights(harness, expected)).max() < 2e-6, counts
    batch["mask"] = np.concatenate([np.arange(4) < count for count in (4, 1, 2)])
    with pytest.warns(UserWarning, match="ignored, weighted or selected elements into a sum of its own"):
        polyamp.train_step(in_a_sum, made)(state, batch)


def test_s08_a_selection_of_nothing_skips_a_batch_by_itself(backend: Backend, harness: Harness) -> None:
    """Of a length that a compiler knows too. The halves say weight 0, and `apply_gradients` skips."""

    def loss_fn(model: Any, batch: Batch) -> Any:
        return LOSSES.mean_squared_error(model(batch["x"])[:0], batch["y"][:0])

    made = recipe(**SETTINGS)
    state, result = polyamp.train_step(loss_fn, made)(polyamp.init(harness.mlp(layers()), made), weighted_batch())
    check_skipped(backend, result)
    loss, gradients = polyamp.value_and_grad(loss_fn)(state, weighted_batch())
    assert to_float(backend, loss) == to_float(backend, gradients.weight) == 0.0
    state, result = polyamp.apply_gradients(state, gradients)
    check_skipped(backend, result._replace(loss=loss))
    state, result = polyamp.train_step(ignored_label_loss, made)(state, weighted_batch())
    assert int(backend.to_numpy(result.step)) == 1


def check_skipped(backend: Backend, result: polyamp.StepResult) -> None:
    """The first step was skipped because the weight of its batch is 0, and says so."""
    assert to_float(backend, result.loss) == to_float(backend, result.weight) == 0.0
    assert bool(backend.to_numpy(result.skipped))
    assert int(backend.to_numpy(result.step)) == 0


@pytest.mark.parametrize(("loss_fn", "lengths"), CASES)
def test_s08_a_mean_over_what_counts_is_that_of_one_batch(
    backend: Backend, harness: Harness, loss_fn: Loss, lengths: list[int]
) -> None:
    """Loss, norm before clipping and parameters; a micro-batch that counts for nothing among them."""
    batches = [weighted_batch(seed) for seed in range(2)]
    state, results = train_micro_batches(harness, loss_fn, 1, batches)
    split, found = train_micro_batches(
        harness, loss_fn, len(lengths), [split_rows(batch, lengths) for batch in batches]
    )
    for one, other in zip(results, found, strict=True):
        assert not bool(backend.to_numpy(other.skipped))
        assert relative_difference(to_float(backend, one.loss), to_float(backend, other.loss)) < 2e-6
        assert relative_difference(to_float(backend, one.grad_norm), to_float(backend, other.grad_norm)) < 1e-5
        assert (
            one.weight is None
            or relative_difference(to_float(backend, one.weight), to_float(backend, other.weight)) < 1e-6
        )
    assert np.abs(flat_weights(harness, state) - flat_weights(harness, split)).max() < 2e-6


def test_s08_a_batch_that_is_split_counts_by_its_labels(backend: Backend, harness: Harness) -> None:
    batches = [weighted_batch(seed) for seed in range(2)]
    state, _ = train_micro_batches(harness, ignored_label_loss, 1, batches)
    split, found = train_micro_batches(harness, ignored_label_loss, 4, batches)
    assert [to_float(backend, result.weight) for result in found] == [9.0, 9.0]
    assert np.abs(flat_weights(harness, state) - flat_weights(harness, split)).max() < 2e-6


def test_s08_weight_says_what_a_loss_of_ones_own_is_a_mean_over(backend: Backend, harness: Harness) -> None:
    def own_sum(model: Any, batch: Batch) -> Any:
        return ignored_label_loss(model, batch) * 1.0

    batches = [weighted_batch(seed) for seed in range(2)]
    state, _ = train_micro_batches(harness, ignored_label_loss, 1, batches)
    split, found = train_micro_batches(harness, own_sum, 4, batches, weight=label_count)
    assert [to_float(backend, result.weight) for result in found] == [9.0, 9.0]
    assert np.abs(flat_weights(harness, state) - flat_weights(harness, split)).max() < 2e-6


@pytest.mark.parametrize(
    ("policy", "loss_fn", "count"),
    [
        ("float32", ignored_label_loss, 1),
        ("mixed_float16", ignored_label_loss, 3),
        ("mixed_float16", mean_value_loss, 1),
        ("float32", mean_value_loss, 3),
    ],
)
def test_s08_a_step_without_any_weight_is_skipped_and_says_so(
    backend: Backend, harness: Harness, policy: str, loss_fn: Loss, count: int
) -> None:
    """The loss is 0 and not NaN, nothing moves, the loss scale neither; the next step is applied."""
    empty = weighted_batch(1)
    empty["labels"][:], empty["weights"][:] = IGNORED, 0.0
    state, _ = train_micro_batches(harness, loss_fn, count, [weighted_batch(0)], policy)
    step = polyamp.train_step(loss_fn, state.recipe)
    before = {name: np.array(value) for name, value in backend.export_state(state).items()}
    state, result = step(state, empty)
    assert bool(backend.to_numpy(result.skipped))
    assert (to_float(backend, result.loss), to_float(backend, result.weight)) == (0.0, 0.0)
    after = backend.export_state(state)
    assert changed_arrays(before, after) == []
    moved = {name for name in before if name.startswith("loss_scale/") and before[name] != after[name]}
    assert moved == {"loss_scale/skipped"}
    _, result = step(state, weighted_batch(2))
    assert not bool(backend.to_numpy(result.skipped))
    assert to_float(backend, result.step) == 2


def test_s08_gradients_without_any_weight_are_not_applied(backend: Backend, harness: Harness) -> None:
    """The two halves; weight decay would move the parameters where gradients of zeros were applied."""
    made = recipe(optimizer=polyamp.adamw(1e-2, weight_decay=0.5))
    state = polyamp.init(harness.mlp(layers()), made)
    empty = weighted_batch(1)
    empty["labels"][:] = IGNORED
    before = flat_weights(harness, state)
    loss, gradients = polyamp.value_and_grad(ignored_label_loss)(state, empty)
    state, result = polyamp.apply_gradients(state, gradients)
    assert to_float(backend, loss) == 0.0
    assert bool(backend.to_numpy(result.skipped))
    assert np.array_equal(flat_weights(harness, state), before)


def test_s08_an_overflow_skips_the_window_whatever_else_counts(backend: Backend, harness: Harness) -> None:
    made = recipe("mixed_float16", accumulate_steps=3, scaler=polyamp.LossScaler(init_scale=16.0))
    state = polyamp.init(harness.mlp(layers()), made)
    broken = weighted_batch()
    broken["x"][-1] = np.inf
    before = flat_weights(harness, state)
    state, result = polyamp.train_step(ignored_label_loss, made)(state, broken)
    assert (bool(backend.to_numpy(result.skipped)), to_float(backend, result.scale)) == (True, 8.0)
    assert np.array_equal(flat_weights(harness, state), before)


def test_s08_the_scale_of_the_gradients_does_not_move_with_the_counts(backend: Backend, harness: Harness) -> None:
    """What is multiplied by the loss scale stays as large as without weights: a scale that fits still fits."""
    made = recipe("mixed_float16", accumulate_steps=2, scaler=polyamp.LossScaler(init_scale=2.0**12), **SETTINGS)
    state = polyamp.init(harness.mlp(layers()), made)
    batches = weighted_batch(size=64)
    batches["labels"][:62] = np.where(np.arange(62) % 31 == 0, 1, IGNORED)
    state, result = polyamp.train_step(ignored_label_loss, made)(state, batches)
    assert (bool(backend.to_numpy(result.skipped)), to_float(backend, result.weight)) == (False, 4.0)


def test_s08_what_the_step_cannot_know_is_said_once(backend: Backend, harness: Harness) -> None:
    def own_sum(model: Any, batch: Batch) -> Any:
        return ignored_label_loss(model, batch) + 0.1 * LOSSES.mean_squared_error(model(batch["x"]), batch["y"])

    with pytest.warns(UserWarning, match=r"weight=lambda batch: polyamp.losses.count\(batch\['labels'\] != "):
        train_micro_batches(harness, own_sum, 2, [weighted_batch()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_micro_batches(harness, own_sum, 2, [weighted_batch()])
        train_micro_batches(
            harness, lambda model, batch: own_sum(model, batch), 1, [weighted_batch()]
        )  # one batch: nothing to weigh


def test_s20_weights_that_say_nothing_are_refused(backend: Backend, harness: Harness) -> None:
    state = polyamp.init(harness.mlp(layers()), recipe())
    with pytest.raises(ArgumentError, match="weight must be a function of a batch"):
        polyamp.train_step(ignored_label_loss, state.recipe, weight=3.0)  # type: ignore[arg-type]  # what is refused
    refused: list[tuple[Any, str]] = [
        (-1.0, "at least 0"),
        ("many", "a number or a scalar"),
        (np.ones(3), "a scalar array"),
    ]
    for given, match in refused:
        with pytest.raises(LossError, match=match):
            polyamp.train_step(
                ignored_label_loss, state.recipe, weight=functools.partial(lambda own, batch: own, given)
            )(state, weighted_batch())
    with pytest.raises(LossError, match="has its own count"):
        polyamp.train_step(mean_value_loss, state.recipe, weight=lambda batch: 1.0)(state, weighted_batch())


def test_s24_a_mean_is_a_total_and_a_count(backend: Backend, harness: Harness) -> None:
    total = harness.array(np.asarray(6.0, np.float32))
    with pytest.raises(LossError, match="total must be a floating scalar"):
        LOSSES.Mean(harness.array(np.ones(3, np.float32)), 2)
    with pytest.raises(LossError, match="count must be at least 0"):
        LOSSES.Mean(total, -2)
    with pytest.raises(LossError, match="count must be a number or a scalar"):
        LOSSES.Mean(total, harness.array(np.ones(3, np.float32)))
    with pytest.raises(LossError, match="not by another Mean"):
        LOSSES.Mean(total, 2) * LOSSES.Mean(total, 2)


def test_s08_sums_of_means_that_count_alike_are_one_mean(backend: Backend, harness: Harness) -> None:
    """Python's `sum`, which begins with 0, and two means over the very same count: by weight, as either of them."""

    def several(model: Any, batch: Batch) -> Any:
        outputs = model(batch["x"])
        count = LOSSES.count(batch["labels"] != IGNORED)
        total = LOSSES.softmax_cross_entropy(outputs, batch["labels"], ignore_index=IGNORED, reduction="sum")
        return sum([LOSSES.Mean(total, count), 0.5 * LOSSES.Mean(total, count)])

    def once(model: Any, batch: Batch) -> Any:
        outputs = model(batch["x"])
        total = LOSSES.softmax_cross_entropy(outputs, batch["labels"], ignore_index=IGNORED, reduction="sum")
        return LOSSES.Mean(1.5 * total, LOSSES.count(batch["labels"] != IGNORED))

    state, (result,) = train_micro_batches(harness, several, 4, [weighted_batch()])
    expected, (want,) = train_micro_batches(harness, once, 4, [weighted_batch()])
    assert to_float(backend, result.weight) == to_float(backend, want.weight) == 9.0
    assert relative_difference(to_float(backend, result.loss), to_float(backend, want.loss)) < 2e-6
    assert np.abs(flat_weights(harness, state) - flat_weights(harness, expected)).max() < 2e-6


def test_s08_a_sum_of_means_over_nothing_skips_a_batch_by_itself(backend: Backend, harness: Harness) -> None:
    batch = weighted_batch()
    batch["labels"] = np.full(12, IGNORED)
    batch["weights"] = np.zeros((12, 1), "f4")
    made = recipe(**SETTINGS)
    state = polyamp.init(harness.mlp(layers()), made)
    before = backend.export_state(state)

    def means(model: Any, batch: Batch) -> Any:
        outputs = model(batch["x"])
        labels = LOSSES.softmax_cross_entropy(outputs, batch["labels"], ignore_index=IGNORED, reduction="sum")
        errors = LOSSES.mean_squared_error(outputs, batch["y"], weights=batch["weights"], reduction="sum")
        counts = LOSSES.count(batch["labels"] != IGNORED), LOSSES.count(batch["weights"])
        return LOSSES.Mean(labels, counts[0]) + LOSSES.Mean(errors, counts[1])

    state, result = polyamp.train_step(means, made)(state, batch)
    assert (bool(backend.to_numpy(result.skipped)), to_float(backend, result.weight)) == (True, 0.0)
    assert changed_arrays(before, backend.export_state(state)) == []
