"""Rule S23: parameters that the loss does not depend on stay as they are, and so does the optimizer's state of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import Array, Batch, batch, changed_arrays, layers, recipe
from polyamp.contract.backend import Backend
from polyamp.contract.harness import DenseWeights, Harness
from polyamp.errors import PolyampError

OPTIMIZERS = [
    polyamp.sgd(0.1, momentum=0.9, weight_decay=0.1),
    polyamp.adam(0.05, weight_decay=0.1),
    polyamp.adamw(0.05, weight_decay=0.1),
    polyamp.rmsprop(0.05, momentum=0.9, weight_decay=0.1),
    polyamp.adagrad(0.1, lr_decay=0.5, weight_decay=0.1),
    polyamp.lion(0.05, weight_decay=0.1),
    polyamp.nadam(0.05, weight_decay=0.1),
    polyamp.lamb(0.05),
    polyamp.adafactor(0.05, weight_decay=0.1),
    polyamp.muon(0.05),
    polyamp.schedule_free(0.05, weight_decay=0.1),
]


def loss_of_both(model: Any, batch: Batch) -> Any:
    """Depends on both branches, each by itself."""
    first, second = model(batch["x"])
    mean_squared_error = polyamp.losses.mean_squared_error
    return mean_squared_error(first * batch["gain"], batch["y"]) + mean_squared_error(second, batch["y"])


def loss_of_first(model: Any, batch: Batch) -> Any:
    """Depends on the first branch; the second is run, for nothing."""
    return polyamp.losses.mean_squared_error(model(batch["x"])[0] * batch["gain"], batch["y"])


def loss_of_none(model: Any, batch: Batch) -> Any:
    """Depends on the batch alone."""
    return polyamp.losses.mean_squared_error(batch["y"], batch["x"][:, :3])


def two_branches() -> list[DenseWeights]:
    """Two layers that take the same input."""
    return [*layers((4, 3), seed=1), *layers((4, 3), seed=2)]


def train_on_losses(harness: Harness, made: polyamp.Recipe, losses: Sequence[Any], seeds: Sequence[int]) -> Any:
    """The state after a step on each loss and batch."""
    state = polyamp.init(harness.branches(two_branches()), made)
    steps = {loss: polyamp.train_step(loss, made) for loss in losses}
    for loss, seed in zip(losses, seeds, strict=True):
        state, _ = steps[loss](state, batch(seed))
    return state


def second_branch_arrays(backend: Backend, state: Any) -> dict[str, Array]:
    """The second branch's part of a state: its parameters, and what the optimizer keeps of them."""
    return {name: value for name, value in backend.export_state(state).items() if "dense1" in name}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_s23_an_unused_parameter_and_its_optimizer_state_stay(
    backend: Backend, harness: Harness, optimizer: Any
) -> None:
    """And what the optimizer counts for it are its own updates: it goes on as if the other steps had not been."""
    made = recipe(optimizer=optimizer, scaler=polyamp.LossScaler.static(8.0))
    without = train_on_losses(harness, made, [loss_of_both, loss_of_both], [0, 3])
    state = train_on_losses(harness, made, [loss_of_both], [0])
    before, first = second_branch_arrays(backend, state), harness.weights(state)[0].kernel
    assert any(name.startswith("optimizer/") for name in before)
    run = polyamp.train_step(loss_of_first, made)
    for seed in (1, 2):
        state, result = run(state, batch(seed))
        assert not bool(backend.to_numpy(result.skipped))
    assert changed_arrays(before, second_branch_arrays(backend, state)) == []
    assert not np.array_equal(harness.weights(state)[0].kernel, first)
    state, _ = polyamp.train_step(loss_of_both, made)(state, batch(3))
    assert int(backend.to_numpy(state.step)) == 4
    for got, want in zip(harness.weights(state)[1], harness.weights(without)[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "settings", [{"clip_norm": 0.05}, {"accumulate_steps": 2}], ids=lambda settings: next(iter(settings))
)
def test_s23_under_clipping_and_accumulation(backend: Backend, harness: Harness, settings: dict[str, Any]) -> None:
    made = recipe(optimizer=polyamp.adamw(0.05), **settings)
    state = train_on_losses(harness, made, [loss_of_both], [0])
    before = second_branch_arrays(backend, state)
    state, result = polyamp.train_step(loss_of_first, made)(state, batch(1))
    assert changed_arrays(before, second_branch_arrays(backend, state)) == []
    _, gradients = polyamp.value_and_grad(loss_of_first)(train_on_losses(harness, made, [loss_of_both], [0]), batch(1))
    own = [backend.to_numpy(g) for name, g in backend.named_gradients(gradients) if "dense0" in name]
    norm = np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in own))
    np.testing.assert_allclose(float(backend.to_numpy(result.grad_norm)), norm, rtol=1e-5)


@pytest.mark.parametrize("earlier", [True, False], ids=["earlier", "later"])
def test_s23_what_one_micro_batch_of_another_shape_uses_has_its_gradient(
    backend: Backend, harness: Harness, earlier: bool
) -> None:
    """3 rows are micro-batches of 2 and 1, two programs; only one of them depends on the second branch."""

    def of_one(model: Any, part: Batch) -> Any:
        return loss_of_both(model, part) if (part["x"].shape[0] == 2) is earlier else loss_of_first(model, part)

    made = recipe(optimizer=polyamp.sgd(0.5), accumulate_steps=2)
    state = polyamp.init(harness.branches(two_branches()), made)
    whole = batch(1, size=3)
    used = slice(0, 2) if earlier else slice(2, 3)
    alone = polyamp.init(harness.branches(two_branches()), recipe())
    _, gradients = polyamp.value_and_grad(loss_of_both)(alone, {name: array[used] for name, array in whole.items()})
    named = [(name, backend.to_numpy(g)) for name, g in backend.named_gradients(gradients) if "dense1" in name]
    before = {name: backend.to_numpy(array).copy() for name, array in polyamp.parameters(state.model).items()}
    state, _ = polyamp.train_step(of_one, made)(state, whole)
    after = polyamp.parameters(state.model)
    share = (2 if earlier else 1) / 3
    for name, gradient in named:
        assert np.abs(gradient).max() > 1e-2
        moved = backend.to_numpy(after[name]) - before[name]
        np.testing.assert_allclose(moved, -0.5 * share * gradient, rtol=1e-4, atol=1e-6)


def test_s23_in_two_halves(backend: Backend, harness: Harness) -> None:
    """`value_and_grad` and `apply_gradients` mean the same, and an overflow elsewhere changes nothing of it."""
    made = recipe(optimizer=polyamp.adamw(0.05), scaler=polyamp.LossScaler(init_scale=16.0))
    state = train_on_losses(harness, made, [loss_of_both], [0])
    whole, _ = polyamp.train_step(loss_of_first, made)(train_on_losses(harness, made, [loss_of_both], [0]), batch(1))
    before = second_branch_arrays(backend, state)
    run = polyamp.value_and_grad(loss_of_first)
    for gain, skipped in ((np.inf, True), (1.0, False)):
        _, gradients = run(state, batch(1, gain=gain))
        state, result = polyamp.apply_gradients(state, gradients)
        assert bool(backend.to_numpy(result.skipped)) is skipped
        assert changed_arrays(before, second_branch_arrays(backend, state)) == []
    np.testing.assert_allclose(harness.weights(state)[0].kernel, harness.weights(whole)[0].kernel, rtol=1e-6)


def test_s23_a_gradient_of_zeros_is_a_gradient(backend: Backend, harness: Harness) -> None:
    """Dependence is a property of the program: momentum and decay go on."""
    made = recipe(optimizer=polyamp.sgd(0.1, momentum=0.9, weight_decay=0.1))
    state = train_on_losses(harness, made, [loss_of_both], [0])
    before = second_branch_arrays(backend, state)

    def times_zero(model: Any, batch: Batch) -> Any:
        first, second = model(batch["x"])
        return polyamp.losses.mean_squared_error(first + second * (batch["gain"] * 0.0), batch["y"])

    state, _ = polyamp.train_step(times_zero, made)(state, batch(1))
    assert set(changed_arrays(before, second_branch_arrays(backend, state))) == set(before)


def test_s23_a_loss_that_depends_on_no_parameter_is_refused(backend: Backend, harness: Harness) -> None:
    made = recipe(optimizer=polyamp.adamw(0.05))
    state = polyamp.init(harness.branches(two_branches()), made)
    before = backend.export_state(state)
    with pytest.raises(PolyampError, match="depend"):
        polyamp.train_step(loss_of_none, made)(state, batch())
    with pytest.raises(PolyampError, match="depend"):
        polyamp.value_and_grad(loss_of_none)(state, batch())
    assert changed_arrays(before, backend.export_state(state)) == []
