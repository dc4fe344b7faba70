"""Schedules over parameter groups: each group has its own multiple of the schedule's rate (S13)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import UnsupportedError
from polyamp_torch.step.torch_only.learning_rates import GroupLearningRates

SPECS = [polyamp.sgd, polyamp.adam, polyamp.adamw, polyamp.rmsprop, polyamp.adagrad, polyamp.lion]
SCHEDULE = polyamp.schedules.step(0.1, every=2, factor=0.5)


def network() -> nn.Module:
    """A body and a head."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The mean square of the output."""
    out: torch.Tensor = model(x)
    return out.square().mean()


def batch(seed: int) -> torch.Tensor:
    """Inputs, shape (6, 3)."""
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))


def prepared(spec: Any, **changes: Any) -> tuple[Any, Any]:
    """A state whose head has a group of its own with other options, and its step."""
    recipe = polyamp.Recipe(policy="float32", optimizer=spec)
    state = polyamp.init(network(), recipe)
    (group,) = state.optimizer.param_groups
    body, head = group["params"][:2], group["params"][2:]
    state.optimizer.param_groups = [{**group, "params": body}, {**group, "params": head, **changes}]
    return state, polyamp.train_step(loss_fn, recipe)


def weights(state: Any) -> list[torch.Tensor]:
    """Copies."""
    return [p.detach().clone() for p in state.model.parameters()]


@pytest.mark.parametrize("make", SPECS)
def test_s13_a_group_with_rate_zero_stays_and_one_with_half_the_rate_takes_half(make: Any) -> None:
    """As with constant rates set by hand before each step."""
    by_hand, constant = prepared(make(0.1))
    state, step = prepared(make(SCHEDULE), lr=0.05)
    still, hold = prepared(make(SCHEDULE), lr=0.0)
    start = weights(still)
    for seed, rate in enumerate([0.1, 0.1, 0.05, 0.05, 0.025]):
        for group, factor in zip(by_hand.optimizer.param_groups, (1.0, 0.5), strict=True):
            group["lr"] = rate * factor
        for one, run in ((by_hand, constant), (state, step), (still, hold)):
            run(one, batch(seed))
        assert [group["lr"] for group in state.optimizer.param_groups] == [rate, rate * 0.5]
    for p, q in zip(weights(state), weights(by_hand), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
    assert [torch.equal(p, q) for p, q in zip(weights(still), start, strict=True)] == [False, False, True, True]


def test_s13_a_rate_written_later_is_a_multiple_of_the_schedules_rate_of_then() -> None:
    state, step = prepared(polyamp.sgd(SCHEDULE))
    for seed in range(3):
        step(state, batch(seed))
    state.optimizer.param_groups[1]["lr"] = 0.01  # a fifth of 0.05
    for seed in range(2):
        step(state, batch(seed))
    assert [group["lr_scale"] for group in state.optimizer.param_groups] == [1.0, pytest.approx(0.2)]
    assert state.optimizer.param_groups[1]["lr"] == pytest.approx(0.025 / 5)


@pytest.mark.parametrize("changes", [{"lr": 0.0}, {"lr_scale": 0.0}])
def test_s13_a_warm_up_that_begins_at_zero(changes: dict[str, float]) -> None:
    """A group set to 0 then is told from one that the schedule has at 0."""
    state, step = prepared(polyamp.adamw(polyamp.schedules.linear_warmup(0.1, 4)), **changes)
    start = weights(state)
    for seed in range(4):
        step(state, batch(seed))
    assert [torch.equal(p, q) for p, q in zip(weights(state), start, strict=True)] == [False, False, True, True]
    other, run = prepared(polyamp.adamw(polyamp.schedules.linear_warmup(0.1, 4)), lr=0.01)
    with pytest.raises(UnsupportedError, match=r"lr=0\.01 in parameter group 1 says no multiple"):
        run(other, batch(0))


def test_s13_multiples_are_saved_and_restored(tmp_path: Path) -> None:
    state, step = prepared(polyamp.adamw(SCHEDULE), lr=0.05)
    for seed in range(3):
        step(state, batch(seed))
    polyamp.save(state, tmp_path / "file")
    restored, _ = prepared(polyamp.adamw(SCHEDULE))
    polyamp.restore(restored, tmp_path / "file")
    for one in (state, restored):
        step(one, batch(3))
    assert [group["lr_scale"] for group in restored.optimizer.param_groups] == [1.0, 0.5]
    assert all(torch.equal(p, q) for p, q in zip(weights(state), weights(restored), strict=True))


@pytest.mark.parametrize("rate", [0.0, 0.02])
def test_s13_a_compiled_step_multiplies_too(rate: float) -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(SCHEDULE))
    found = []
    for how in (False, {"backend": "aot_eager"}):
        state = polyamp.init(network(), recipe)
        step = polyamp.train_step(loss_fn, recipe, compile=how)
        step(state, batch(0))
        state.optimizer.param_groups[0]["lr"] = rate
        for seed in range(1, 4):
            step(state, batch(seed))
        found.append(weights(state))
    for p, q in zip(*found, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_s13_two_schedules_are_refused_and_a_native_one_is_left_alone() -> None:
    state, step = prepared(polyamp.sgd(SCHEDULE))
    torch.optim.lr_scheduler.StepLR(state.optimizer, 1)
    with pytest.raises(UnsupportedError, match="the optimizer's rate has two schedules"):
        step(state, batch(0))
    model = network()
    native = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}], 0.1)  # type: ignore[index]  # a Sequential
    scheduler = torch.optim.lr_scheduler.StepLR(native, 1, 0.5)
    recipe = polyamp.Recipe(policy="float32", optimizer=native)
    state = polyamp.init(model, recipe)
    run = polyamp.train_step(loss_fn, recipe)
    for seed in range(3):
        run(state, batch(seed))
        scheduler.step()
    assert [group["lr"] for group in native.param_groups] == [0.0125, 0.0]
    assert all("lr_scale" not in group for group in native.param_groups)


@pytest.mark.parametrize("float64", [False, True])
def test_s01_rates_of_float64_parameters_are_numbers_on_every_device(
    monkeypatch: pytest.MonkeyPatch, float64: bool
) -> None:
    """A GPU's fused kernels take a rate as a number in float64, and as a tensor in float32 alone."""
    monkeypatch.setattr("polyamp_torch.step.torch_only.learning_rates.can_read_without_sync", lambda _: False)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    rates = GroupLearningRates(optimizer, [polyamp.schedules.step(0.1, every=10)], [1.0], float64=float64)
    rates.set(torch.tensor(10))
    rate = optimizer.param_groups[0]["lr"]
    assert isinstance(rate, float) is float64
    assert float(rate) == pytest.approx(0.01)
