"""The torch step's edges: parameters without a gradient, unfrozen ones, the caller's own `.grad`, replaced buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
    from polyamp_torch.step.torch_only import buffers

    if blind:
        monkeypatch.setattr(buffers, "can_read_without_sync", lambda device: False)

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


@pytest.mark.parametrize("spec", [polyamp.rmsprop(0.1), polyamp.adagrad(0.1), polyamp.lion(0.1)])
def test_specs_whose_formula_runs_here_never_call_the_optimizers_step(spec: Any) -> None:
    """Hooks on it do not run, and torch's schedulers warn."""
    recipe, calls = polyamp.Recipe(optimizer=spec), []
    state = polyamp.init(linear(), recipe)
    state.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(state.optimizer, 1)
    polyamp.train_step(loss_fn, recipe)(state, batch())
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
    assert calls == []


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


def test_a_state_array_replaced_in_the_middle_is_used() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    recipe = polyamp.Recipe(optimizer=polyamp.adamw())
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    step(state, batch())
    fresh = torch.zeros(4)
    state.optimizer.state[model[0].bias]["exp_avg"] = fresh
    step(state, batch(seed=1))
    assert fresh.any()


def stepped(model: nn.Module, change: Callable[[Any], Any], optimizer: Any = None) -> Any:
    """The state after one step, a change by hand, and another step."""
    recipe = polyamp.Recipe(optimizer=optimizer or polyamp.adamw())
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    step(state, batch())
    change(state)
    step(state, batch(seed=1))
    return state


def put_linear(state: Any) -> None:
    state.model[0] = nn.Linear(6, 4)


def put_parameter(state: Any) -> None:
    state.model[1].bias = nn.Parameter(torch.zeros(2))


def put_parametrization(state: Any) -> None:
    nn.utils.parametrizations.weight_norm(state.model[0])


def put_shape(state: Any) -> None:
    state.model[0].weight.data = torch.zeros(5, 6)


def put_dtype(state: Any) -> None:
    state.model.bfloat16()


def put_group(state: Any) -> None:
    state.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put_linear, r"'0/weight' was put into the model after init.*state = polyamp\.refresh\(state\)"),
        (put_parameter, r"'1/bias' was put into the model after init"),
        (put_parametrization, r"'0/parametrizations/weight/original0' was put into the model"),
        (put_shape, r"'0/weight' was \(4, 6\), torch\.float32, cpu at init\. Received: \(5, 6\), torch\.float32, cpu"),
        (put_dtype, r"'0/weight' was .* Received: \(4, 6\), torch\.bfloat16, cpu"),
        (put_group, r"parameter groups were changed after init"),
    ],
)
def test_a_model_changed_after_init_is_refused(change: Callable[[Any], Any], message: str) -> None:
    """Otherwise what is new is never trained, and kernels write over the end of the old state arrays."""
    with pytest.raises(ModelError, match=message):
        stepped(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), change)


class Rotating(nn.Module):
    """Puts one of its own layers in another place at every call, which is its own business."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.current = self.layers[self.calls % 2]
        self.calls += 1
        out: torch.Tensor = self.head(self.current(x))
        return out


def test_a_model_may_move_its_own_modules() -> None:
    model = Rotating()
    before = model.layers[1].weight.detach().clone()
    state = stepped(model, lambda state: None)
    assert int(state.step) == 2
    assert not torch.equal(before, model.layers[1].weight)


@pytest.mark.parametrize(
    ("spec", "native", "option", "value"),
    [
        (polyamp.rmsprop(0.01), torch.optim.RMSprop, "weight_decay", 0.1),
        (polyamp.rmsprop(0.01), torch.optim.RMSprop, "alpha", 0.5),
        (polyamp.adagrad(0.01), torch.optim.Adagrad, "eps", 0.1),
    ],
)
def test_options_written_into_the_groups_count(spec: Any, native: Any, option: str, value: float) -> None:
    def change(state: Any) -> None:
        state.optimizer.param_groups[0][option] = value

    torch.manual_seed(0)
    one = nn.Linear(6, 2)
    other = copy.deepcopy(one)
    stepped(one, change, spec)
    stepped(other, change, native(other.parameters(), 0.01, foreach=False))
    torch.testing.assert_close(one.weight, other.weight, rtol=1e-5, atol=1e-7)


def test_options_that_need_other_state_arrays_are_refused() -> None:
    def change(state: Any) -> None:
        state.optimizer.param_groups[0]["momentum"] = 0.9

    with pytest.raises(UnsupportedError, match=r"state arrays are square_avg; .* ask for square_avg, momentum"):
        stepped(nn.Linear(6, 2), change, polyamp.rmsprop(0.01))
