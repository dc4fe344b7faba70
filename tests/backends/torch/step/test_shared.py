"""The torch step with parameters that several states share, that the loss leaves out, or that left the model (S23)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import polyamp
from polyamp.errors import GradientError, ModelError

CHANGES = [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {}), (torch.optim.AdamW, {"fused": True})]
CHANGES += [(torch.optim.Adagrad, {"lr_decay": 0.5}), (torch.optim.NAdam, {}), (torch.optim.RMSprop, {"momentum": 0.9})]


class Head(nn.Module):
    """A head of its own on an encoder that others have too."""

    def __init__(self, encoder: nn.Module, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = encoder
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 2)."""
        out: torch.Tensor = self.head(functional.relu(self.encoder(x)))
        return out


def two_heads() -> tuple[Head, Head]:
    """Two models with one encoder."""
    torch.manual_seed(0)
    encoder = nn.Linear(3, 4)
    return Head(encoder, 1), Head(encoder, 2)


def batch(seed: int = 0) -> torch.Tensor:
    """Inputs, shape (6, 3)."""
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))


def both(models: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss of both heads."""
    return models[0](x).square().mean() + 3.0 * models[1](x).square().mean()


def by_hand(rate: float, steps: int) -> tuple[Head, Head]:
    """torch's own loop: one `.grad` of the shared encoder, on which both optimizers step."""
    models = two_heads()
    optimizers = [torch.optim.SGD(model.parameters(), rate, momentum=0.9) for model in models]
    for seed in range(steps):
        for model in models:
            model.zero_grad()
        both(models, batch(seed)).backward()  # type: ignore[no-untyped-call]  # torch's own
        for optimizer in optimizers:
            optimizer.step()
    return models


@pytest.mark.parametrize("scale", [1.0, 1024.0, 32768.0])
def test_s23_a_shared_parameter_is_unscaled_once_and_stepped_by_each_optimizer(scale: float) -> None:
    recipe = polyamp.Recipe(
        policy="float32", optimizer=polyamp.sgd(0.05, momentum=0.9), scaler=polyamp.LossScaler(init_scale=scale)
    )
    models = two_heads()
    states = [polyamp.init(model, recipe) for model in models]
    for seed in range(3):
        _, gradients = polyamp.value_and_grad(both)(states, batch(seed))
        first, second = (item.values["encoder/weight"] for item in gradients)
        assert torch.equal(first, second)
        states, results = polyamp.apply_gradients(states, gradients)
        assert not any(bool(result.skipped) for result in results)
        assert all(p.grad is None for model in models for p in model.parameters())
    for ours, theirs in zip(models, by_hand(0.05, 3), strict=True):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_s23_each_state_clips_its_own_gradients_of_a_shared_parameter() -> None:
    """And the gradients of one do not stand in the shared `.grad` when the other steps."""
    scaler = polyamp.LossScaler.static(64.0)
    recipes = [
        polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(1.0), scaler=scaler, clip_norm=clip)
        for clip in (1e-3, None)
    ]
    models = two_heads()
    start = models[0].encoder.weight.detach().clone()  # type: ignore[operator, union-attr]  # a Linear
    states = [polyamp.init(model, recipe) for model, recipe in zip(models, recipes, strict=True)]
    _, gradients = polyamp.value_and_grad(both)(states, batch())
    before = [{name: value.clone() for name, value in item.values.items()} for item in gradients]
    _, results = polyamp.apply_gradients(states, gradients)
    clipped = 1e-3 / float(results[0].grad_norm)
    moved = start - models[0].encoder.weight.detach()  # type: ignore[operator, union-attr]  # a Linear
    torch.testing.assert_close(moved, before[0]["encoder/weight"] * (1.0 + clipped), rtol=1e-5, atol=1e-7)
    for item, old in zip(gradients, before, strict=True):
        assert all(torch.equal(item.values[name], value) for name, value in old.items()), "the caller's, untouched"


def test_s23_a_state_of_several_that_the_loss_leaves_out() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.05), scaler=polyamp.LossScaler.static(8.0))
    models = (nn.Linear(3, 2), nn.Linear(3, 2))
    states = [polyamp.init(model, recipe) for model in models]
    _, (used, unused) = polyamp.value_and_grad(lambda both, x: both[0](x).square().mean())(states, batch())
    assert list(unused.values.values()) == [None, None]
    polyamp.apply_gradients(states[0], used)
    with pytest.raises(GradientError, match="every gradient is None"):
        polyamp.apply_gradients(states, [used, unused])
    assert int(states[0].step) == 1


@pytest.mark.parametrize(("make", "options"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
def test_s23_native_optimizers_leave_unused_parameters_alone(make: Any, options: dict[str, Any]) -> None:
    """In some micro-batches, in none, and across skips; their counts are their own, as in the loop by hand."""
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}))
        optimizers.append(make(models[-1].parameters(), 0.05, **options))
    scaler = polyamp.LossScaler(init_scale=16.0)
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizers[0], scaler=scaler, accumulate_steps=2)
    state = polyamp.init(models[0], recipe)

    def loss_fn(model: Any, part: dict[str, torch.Tensor]) -> torch.Tensor:
        x = part["x"]
        loss: torch.Tensor = (model["a"](x) * part["gain"]).square().mean()
        return loss + model["b"](x).square().mean() if bool(part["both"].all()) else loss

    step = polyamp.train_step(loss_fn, recipe)
    for number, uses in enumerate([(0, 0), (0, 1), (0, 0), (1, 1), (0, 0)]):
        x, flags = batch(number), torch.tensor([uses[0]] * 3 + [uses[1]] * 3)
        before = [p.detach().clone() for p in models[0]["b"].parameters()]
        broken = torch.full((6, 1), float("inf"))
        _, skipped = step(state, {"x": x, "both": flags, "gain": broken})
        _, result = step(state, {"x": x, "both": flags, "gain": torch.ones(6, 1)})
        assert (bool(skipped.skipped), bool(result.skipped)) == (True, False)
        same = [torch.equal(p, old) for p, old in zip(models[0]["b"].parameters(), before, strict=True)]
        assert same == [not any(uses)] * 2
        models[1].zero_grad()
        for half in range(2):
            rows = slice(3 * half, 3 * half + 3)
            part = {"x": x[rows], "both": flags[rows], "gain": torch.ones(3, 1)}
            (loss_fn(models[1], part) / 2).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizers[1].step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", [polyamp.adamw(0.05), polyamp.adagrad(0.1, lr_decay=0.5)])
def test_s23_a_compiled_step_counts_the_updates_of_each_parameter(optimizer: Any) -> None:
    """After steps that left a parameter out, a compiled step that takes it goes on as the eager one does."""
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, scaler=polyamp.LossScaler.static(8.0))

    def of_all(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model[0](x).square().mean() + model[1](x).square().mean()

    def of_first(model: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model[0](x).square().mean()
        return out

    found = []
    for how in (False, {"backend": "eager"}):
        torch.manual_seed(0)
        state = polyamp.init(nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]), recipe)
        for loss_fn in (of_all, of_first, of_first):
            polyamp.train_step(loss_fn, recipe)(state, batch())
        compiled = polyamp.train_step(of_first, recipe, compile=how)
        old = [p.detach().clone() for p in state.model[1].parameters()]
        compiled(state, batch(1))
        assert all(torch.equal(p, q) for p, q in zip(state.model[1].parameters(), old, strict=True))
        polyamp.train_step(of_all, recipe, compile=how)(state, batch(2))
        counts = [int(state.optimizer.state[p]["step"]) for p in state.model.parameters()]
        assert counts == [5, 5, 2, 2]
        found.append([p.detach() for p in state.model.parameters()])
    for p, q in zip(*found, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_s23_a_compiled_window_of_16_bit_parameters_is_summed_in_float32() -> None:
    """256 + 3 * 1 stays 256 in bfloat16."""
    recipe = polyamp.Recipe(policy="bfloat16", optimizer=polyamp.sgd(2.0**-8), accumulate_steps=4)
    model = nn.Linear(1, 1, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.zero_()
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(lambda model, x: model(x).sum(), recipe, compile={"backend": "aot_eager"})
    x = torch.ones(4, 1)
    x[0] = 256.0
    step(state, x)
    assert float(model.weight.detach()) == pytest.approx(-259.0 / 4 / 256, rel=2.0**-8)


@pytest.mark.parametrize("attempt", range(5))
def test_s23_a_swapped_head_is_noticed_although_it_may_lie_where_the_old_one_lay(attempt: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(lambda model, x: model(x).square().mean(), recipe)
    step(state, torch.ones(2, 4))
    model[2] = nn.Identity()
    model[2] = nn.Linear(8, 2)
    with pytest.raises(ModelError, match=r"parameter '2/weight' was put into the model after init"):
        step(state, torch.ones(2, 4))
    with pytest.raises(ModelError, match=r"parameter '2/weight' was put into the model after init"):
        polyamp.value_and_grad(lambda model, x: model(x).square().mean())(state, torch.ones(2, 4))
