"""The torch step's edges: parameters without a gradient, unfrozen ones, the caller's own `.grad`, replaced buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import GradientError, LossError, ModelError, UnsupportedError


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 2)


def batch(gain: float = 1.0, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=(4, 2)).astype(np.float32)
    return {"x": x, "y": y, "gain": np.full((4, 2), gain, np.float32)}


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], batch["y"])


class Branches(nn.Module):
    """Which head runs depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.heads[self.turn](x)
        return out


@pytest.mark.parametrize(
    "make",
    [
        lambda p: polyamp.adamw(0.1, weight_decay=0.5),
        lambda p: polyamp.sgd(0.1, momentum=0.9, weight_decay=0.5),
        lambda p: polyamp.rmsprop(0.1, momentum=0.9),
        lambda p: polyamp.lion(0.1, weight_decay=0.5),
        lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.5),
    ],
    ids=["adamw", "sgd", "rmsprop", "lion", "native"],
)
def test_a_parameter_without_a_gradient_is_left_alone(make: Any) -> None:
    """As torch's optimizers do: neither decay nor momentum moves what the loss does not depend on."""
    model = Branches()
    recipe = polyamp.Recipe(optimizer=make(model.parameters()), scaler=polyamp.LossScaler.static(4.0), clip_norm=1.0)
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for turn in (0, 1, 0):
        model.turn = turn
        idle = model.heads[1 - turn].weight
        before = idle.detach().clone()
        slots = {name: value.clone() for name, value in state.optimizer.state[idle].items()}
        moved = model.heads[turn].weight.detach().clone()
        state, result = step(state, batch(seed=turn))
        assert torch.equal(before, idle)
        assert all(torch.equal(value, state.optimizer.state[idle][name]) for name, value in slots.items())
        assert not torch.equal(moved, model.heads[turn].weight)
    assert int(result.step) == 3


def test_gradients_of_none_between_the_two_halves() -> None:
    model = Branches()
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.1))
    state = polyamp.init(model, recipe)
    _, gradients = polyamp.value_and_grad(loss_fn)(state, batch())
    assert gradients.values["heads/1/weight"] is None
    before = [head.weight.detach().clone() for head in model.heads]
    polyamp.apply_gradients(state, gradients)
    assert [torch.equal(old, head.weight) for old, head in zip(before, model.heads, strict=True)] == [False, True]
    with pytest.raises(GradientError, match="every gradient is None"):
        polyamp.apply_gradients(state, gradients._replace(values=dict.fromkeys(gradients.values)))
    other = linear()
    step = polyamp.train_step(lambda m, b: other(torch.ones(1, 6)).sum(), recipe)
    with pytest.raises(LossError, match="depends on none of the model's trainable parameters"):
        step(state, batch())


def test_the_callers_gradients_and_the_two_halves() -> None:
    """`value_and_grad` gives back the `.grad` that was there; `apply_gradients` writes into nothing that is given."""
    model = linear()
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.1), clip_norm=1e-3, scaler=polyamp.LossScaler.static(4.0))
    state = polyamp.init(model, recipe)
    held = torch.full_like(model.weight, 7.0)
    model.weight.grad = held
    _, gradients = polyamp.value_and_grad(loss_fn)(state, batch())
    assert model.weight.grad is held
    before = {name: value.clone() for name, value in gradients.values.items()}
    polyamp.apply_gradients(state, gradients)
    assert all(torch.equal(before[name], value) for name, value in gradients.values.items())


def test_an_error_in_loss_fn_leaves_everything_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), linear())
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.1), accumulate_steps=2)
    state = polyamp.init(model, recipe)
    held = torch.full_like(model[1].weight, 7.0)
    model[1].weight.grad = held
    calls = []

    def failing(m: Any, b: Any) -> Any:
        loss = loss_fn(m, b)
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("the user's own")
        return loss

    before = state.backend.export_state(state)
    with pytest.raises(ValueError, match="the user's own"):
        polyamp.train_step(failing, recipe)(state, batch())
    after = state.backend.export_state(state)
    assert [name for name in before if before[name].tobytes() != after[name].tobytes()] == []
    assert model[1].weight.grad is held


def test_trap_a_parameter_unfrozen_after_init_is_named() -> None:
    """An optimizer built before does not hold it: a plain loop computes its gradient and never trains it."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    native = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    recipe = polyamp.Recipe()
    state = polyamp.init(model, recipe)
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    model(torch.ones(1, 6)).sum().backward()
    native.step()
    assert model[0].weight.grad is not None
    assert torch.equal(before, model[0].weight), "what torch does by itself"
    with pytest.raises(ModelError, match="'0/weight' was unfrozen after init, so no optimizer holds it"):
        polyamp.train_step(loss_fn, recipe)(state, batch())


def test_trap_native_fused_sgd_with_16_bit_parameters() -> None:
    """On the CPU it leaves whole blocks of parameters as they were."""
    torch.manual_seed(0)
    model = nn.Linear(64, 2).bfloat16()
    native = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    model.weight.grad, before = torch.ones_like(model.weight), model.weight.detach().clone()
    native.step()
    assert (model.weight == before).any(), "what torch does by itself"
    with pytest.raises(UnsupportedError, match=r"Received: fused=True with torch\.bfloat16\. Use fused=False"):
        polyamp.init(model, polyamp.Recipe(policy="bf16-true", optimizer=native))


@pytest.mark.parametrize("gain", [1.0, float("nan")])
@pytest.mark.parametrize("blind", [False, True])
def test_buffers_that_the_forward_pass_replaces(gain: float, blind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the step: one like the old is written into it, an unlike one takes its place, and a skip restores both."""
    from polyamp_torch import buffers

    if blind:
        monkeypatch.setattr(buffers, "looks", lambda device: False)

    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()
            self.register_buffer("alike", torch.zeros(6))
            self.register_buffer("grown", torch.zeros(0))
            self.register_buffer("made", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.alike = self.alike + x.detach().mean(0)
            self.grown = torch.ones(len(self.grown) + 1)
            self.made = torch.ones(3)
            out: torch.Tensor = self.linear(x)
            return out

    model = Replacing()
    alike, grown = model.alike, model.grown
    scaler = polyamp.LossScaler(init_scale=16.0)
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.1), scaler=scaler)
    polyamp.train_step(loss_fn, recipe)(polyamp.init(model, recipe), batch(gain))
    assert model.alike is alike
    if gain == 1.0:
        assert alike.any()
        assert len(model.grown) == 1
        assert model.made is not None
    else:
        assert not alike.any()
        assert model.grown is grown
        assert model.made is None


@pytest.mark.parametrize("spec", [polyamp.sgd(0.1), polyamp.sgd(0.1, momentum=0.9), polyamp.adam(), polyamp.adamw()])
def test_whoever_watches_the_optimizers_step_is_called(spec: Any) -> None:
    """Fused kernels run without `optimizer.step()`, unless someone hangs on it; the numbers are the same bits."""
    weights, calls = [], []
    for watched in (False, True):
        model = linear()
        recipe = polyamp.Recipe(optimizer=spec, scaler=polyamp.LossScaler(init_scale=8.0), clip_norm=0.1)
        state = polyamp.init(model, recipe)
        if watched:
            state.optimizer.register_step_post_hook(lambda *_: calls.append(1))
        step = polyamp.train_step(loss_fn, recipe)
        for seed, gain in enumerate((1.0, float("nan"), 1.0, 1.0)):
            step(state, batch(gain, seed))
        weights.append(model.weight.detach())
    assert len(calls) == 3, "not at the skipped step"
    assert torch.equal(*weights)


def test_torchs_scheduler_on_the_states_optimizer() -> None:
    """It warns if `optimizer.step` is never called."""
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(1.0))
    state = polyamp.init(linear(), recipe)
    scheduler = torch.optim.lr_scheduler.StepLR(state.optimizer, 1, gamma=0.5)
    step = polyamp.train_step(loss_fn, recipe)
    moved = []
    for _ in range(2):
        before = state.model.weight.detach().clone()
        _, gradients = polyamp.value_and_grad(loss_fn)(state, batch())
        step(state, batch())
        scheduler.step()
        moved.append(((before - state.model.weight) / gradients.values["weight"]).mean().item())
    assert moved == pytest.approx([1.0, 0.5], rel=1e-4)


def test_state_arrays_that_were_replaced_are_used() -> None:
    model = linear()
    recipe = polyamp.Recipe(optimizer=polyamp.adamw())
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    step(state, batch())
    state.optimizer.load_state_dict(state.optimizer.state_dict())
    fresh = state.optimizer.state[model.weight]["exp_avg"]
    before = fresh.clone()
    step(state, batch(seed=1))
    assert state.optimizer.state[model.weight]["exp_avg"] is fresh
    assert not torch.equal(before, fresh)
    assert float(state.optimizer.state[model.weight]["step"]) == 2.0
