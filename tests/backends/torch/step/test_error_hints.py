"""S20 in torch: a backward pass in `loss_fn`, and what a failed step leaves in memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp import LossError

RECIPE = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1))
BATCH = {"x": torch.ones(4, 3), "y": torch.zeros(4, 2)}


class Net(nn.Module):
    """The loss depends neither on the first nor on the last parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1))
        self.layer = nn.Linear(3, 2)
        self.last = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])


def backward(model: Any, batch: Any) -> Any:
    loss = loss_fn(model, batch)
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}])
def test_s20_a_backward_pass_in_loss_fn_is_noticed_by_any_parameter(options: dict[str, Any]) -> None:
    """It would double the gradients, and under a scaler add unscaled ones to scaled ones."""
    recipe = RECIPE.replace(**options)
    state = polyamp.init(Net(), recipe)
    before = state.backend.export_state(state)
    for half in (polyamp.train_step(backward, recipe), polyamp.value_and_grad(backward)):
        with pytest.raises(LossError, match="loss_fn must not run the backward pass"):
            half(state, BATCH)
    after = state.backend.export_state(state)
    assert all(np.array_equal(after[name], value) for name, value in before.items() if not name.startswith("rng/"))
    assert all(p.grad is None for p in state.model.parameters())


def test_a_backward_pass_of_something_else_is_welcome() -> None:
    probe = nn.Linear(3, 2)

    def probing(model: Any, batch: Any) -> Any:
        probe(batch["x"]).sum().backward()
        return loss_fn(model, batch)

    def adversarial(model: Any, batch: Any) -> Any:
        loss_fn(model, batch).backward()
        model.zero_grad()
        return loss_fn(model, batch)

    for loss in (probing, adversarial):
        _, result = polyamp.train_step(loss, RECIPE)(polyamp.init(Net(), RECIPE), BATCH)
        assert not bool(result.skipped)
    assert probe.weight.grad is not None
    recipe = RECIPE.replace(accumulate_steps=3)
    _, result = polyamp.train_step(probing, recipe)(polyamp.init(Net(), recipe), BATCH)
    assert not bool(result.skipped)
    with pytest.raises(LossError, match="loss_fn must not run the backward pass"):  # zero_grad() takes the window's
        polyamp.train_step(adversarial, recipe)(polyamp.init(Net(), recipe), BATCH)


def test_s20_a_failed_step_keeps_no_tensor_alive() -> None:
    kept: list[weakref.ref[Any]] = []

    def to_numpy(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        kept.append(weakref.ref(out))
        return np.asarray(out)

    def fails(model: Any, batch: Any) -> Any:
        out = model(batch["x"])
        kept.append(weakref.ref(out))
        return out @ out

    state = polyamp.init(Net(), RECIPE)
    gc.collect()
    gc.disable()
    try:
        for loss in (to_numpy, fails):
            error = None
            try:
                polyamp.train_step(loss, RECIPE)(state, BATCH)
            except (LossError, RuntimeError) as caught:
                error = type(caught)
            assert error is not None
            assert kept.pop()() is None, error
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_s20_a_part_of_a_cast_model_that_loss_fn_calls_is_named_as_the_reason(mode: Any) -> None:
    """torch's own error stays, with a note that says what mode "cast" casts."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    recipe = polyamp.Recipe(policy=polyamp.Policy("mixed_bfloat16", mode=mode), optimizer=polyamp.sgd(0.1))
    step = polyamp.train_step(lambda model, batch: model[0](batch["x"]).square().mean(), recipe)
    state, batch = polyamp.init(model, recipe), {"x": torch.ones(2, 4)}
    if mode == "autocast":
        step(state, batch)
        return
    with pytest.raises(RuntimeError, match="same dtype") as failure:
        step(state, batch)
    note = "".join(failure.value.__notes__)
    assert "mode='cast' holds the model's weights in bfloat16" in note
    assert "call the model, cast the part's input in loss_fn, or use mode='autocast'" in note
