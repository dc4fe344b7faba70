"""Rule S27: groups that are trained after a number of applied updates (`trainable_after`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import Group
from polyamp.conformance.problems import Batch, advance, batch, changed_arrays, flat_weights, layers, recipe, train
from polyamp.conformance.test_unused import (
    OPTIMIZERS,
    loss_of_both,
    loss_of_first,
    second_branch_arrays,
    two_branches,
)
from polyamp.contract import registry
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import PolyampError

LATE = Group("**/dense1", trainable_after=3)
SCALER = polyamp.LossScaler(init_scale=16.0)


def loss_with_gain_of_second(model: Any, batch: Batch) -> Any:
    """Has infinite gradients in the second branch alone if the batch's gain is infinite."""
    first, second = model(batch["x"])
    mean_squared_error = polyamp.losses.mean_squared_error
    return mean_squared_error(first, batch["y"]) + mean_squared_error(second * batch["gain"], batch["y"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_s27_a_late_group_trains_as_if_it_had_been_unused_before(
    backend: Backend, harness: Harness, optimizer: Any
) -> None:
    """Frozen, then thawed, by hand: three applied updates on the first branch alone; the skipped one does not count."""
    rate = polyamp.schedules.linear_warmup(optimizer.learning_rate, 6)
    settings: dict[str, Any] = {"scaler": SCALER, "clip_norm": 0.5, "accumulate_steps": 2}
    made = recipe(optimizer=optimizer.replace(learning_rate=rate, groups=[LATE]), **settings)
    plain = recipe(optimizer=optimizer.replace(learning_rate=rate), **settings)
    batches = [batch(i, gain=np.inf if i == 1 else 1.0) for i in range(7)]
    start = polyamp.init(harness.branches(two_branches()), made)
    before = second_branch_arrays(backend, start)
    assert before
    late, results = advance(start, batches[:4], loss_of_both)
    assert [bool(backend.to_numpy(result.skipped)) for result in results] == [False, True, False, False]
    assert changed_arrays(before, second_branch_arrays(backend, late)) == []
    late, more = advance(late, batches[4:], loss_of_both)
    after = second_branch_arrays(backend, late)
    unused = {name for name, value in after.items() if value.shape == () and not value.any()}  # of the other shapes
    assert {name for name in before if name not in unused} == set(changed_arrays(before, after))
    hand, expected = advance(polyamp.init(harness.branches(two_branches()), plain), batches[:4], loss_of_first)
    hand, later = advance(hand, batches[4:], loss_of_both)
    np.testing.assert_allclose(flat_weights(harness, late), flat_weights(harness, hand), rtol=1e-6, atol=1e-6)
    norms = [
        [float(backend.to_numpy(one.grad_norm)) for one in run if not bool(backend.to_numpy(one.skipped))]
        for run in (results + more, expected + later)
    ]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-6)


def test_s27_gradients_of_a_waiting_group_are_not_checked(backend: Backend, harness: Harness) -> None:
    """Their infinity skips nothing before the first update, and does after it."""
    made = recipe(optimizer=polyamp.adamw(0.05, groups=[LATE]), scaler=SCALER)
    state = polyamp.init(harness.branches(two_branches()), made)
    state, results = advance(state, [batch(i, gain=np.inf) for i in range(4)], loss_with_gain_of_second)
    assert [bool(backend.to_numpy(result.skipped)) for result in results] == [False, False, False, True]
    assert all(np.isfinite(float(backend.to_numpy(result.grad_norm))) for result in results[:3])
    assert int(backend.to_numpy(state.step)) == 3


def test_s27_a_late_group_in_two_halves(backend: Backend, harness: Harness) -> None:
    """`value_and_grad` gives all gradients, and does not have them changed; `apply_gradients` leaves the group out."""
    made = recipe(optimizer=polyamp.adamw(0.05, groups=[Group("**/dense1", trainable_after=1)]), clip_norm=0.5)
    state = polyamp.init(harness.branches(two_branches()), made)
    twin = polyamp.init(harness.branches(two_branches()), made)
    half = polyamp.value_and_grad(loss_of_both)
    before = second_branch_arrays(backend, state)
    for number in range(2):
        _, gradients = half(state, batch(number))
        copies = {name: np.array(backend.to_numpy(value)) for name, value in backend.named_gradients(gradients)}
        state, _ = polyamp.apply_gradients(state, gradients)
        assert all(
            np.array_equal(backend.to_numpy(g), copies[name]) for name, g in backend.named_gradients(gradients)
        ), "the caller's gradients"
        assert np.any(copies[next(name for name in copies if "dense1" in name)] != 0.0)
        assert bool(changed_arrays(before, second_branch_arrays(backend, state))) is (number == 1)
    twin, _ = advance(twin, [batch(0), batch(1)], loss_of_both)
    np.testing.assert_allclose(flat_weights(harness, state), flat_weights(harness, twin), rtol=1e-6, atol=1e-6)


def test_s27_a_late_group_trains_as_the_reference_does(backend: Backend, harness: Harness) -> None:
    """For 50 steps, with two starts, a kind, a rate of its own and skipped steps."""
    groups = [
        Group("**/dense0", trainable_after=20, learning_rate_scale=0.5),
        Group(kind="bias", weight_decay=0.0, trainable_after=9),
    ]
    rate = polyamp.schedules.warmup_cosine(0.02, 5, 50)
    made = recipe(optimizer=polyamp.adamw(rate, weight_decay=0.3, groups=groups), scaler=SCALER, clip_norm=1.0)
    batches = [batch(i, gain=np.inf if i in (4, 21) else 1.0) for i in range(50)]
    state, results = train(harness, made, batches)
    oracle = registry.get("reference").testing()
    expected, wanted = train(oracle, made, batches)
    np.testing.assert_allclose(flat_weights(harness, state), flat_weights(oracle, expected), rtol=0, atol=1e-5)
    norms = [float(backend.to_numpy(result.grad_norm)) for result in results if not backend.to_numpy(result.skipped)]
    theirs = [float(result.grad_norm) for result in wanted if not result.skipped]
    np.testing.assert_allclose(norms, theirs, rtol=5e-5)


def test_s27_a_late_group_resumes_before_and_after_its_start(
    backend: Backend, harness: Harness, tmp_path: Path
) -> None:
    made = recipe(optimizer=polyamp.adamw(0.05, weight_decay=0.1, groups=[LATE]), scaler=SCALER)
    batches = [batch(i, gain=np.inf if i == 1 else 1.0) for i in range(7)]
    whole, _ = advance(polyamp.init(harness.branches(two_branches()), made), batches, loss_of_both)
    for cut in (2, 5):
        half, _ = advance(polyamp.init(harness.branches(two_branches()), made), batches[:cut], loss_of_both)
        polyamp.save(half, tmp_path / f"at{cut}")
        again = polyamp.restore(polyamp.init(harness.branches(two_branches()), made), tmp_path / f"at{cut}")
        again, _ = advance(again, batches[cut:], loss_of_both)
        assert changed_arrays(backend.export_state(whole), backend.export_state(again)) == []


def test_s27_refusals_of_late_groups(backend: Backend, harness: Harness) -> None:
    """Somebody trains first; a group that is frozen in the framework, or absent, is still one that matches nothing."""
    every = recipe(optimizer=polyamp.adamw(0.1, groups=[Group("**", trainable_after=2)]))
    with pytest.raises(PolyampError, match=r"trainable_after: at least one .* all 4 parameters wait, .* 2 updates"):
        polyamp.init(harness.mlp(layers()), every)
    absent = recipe(optimizer=polyamp.adamw(0.1, groups=[Group("**/dense7", trainable_after=2)]))
    with pytest.raises(PolyampError, match=r"'\*\*/dense7' matches no trainable parameter"):
        polyamp.init(harness.mlp(layers()), absent)
