"""Lion's own `step()`, as a user or a scheduler calls it: the momentum lives from one call to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import polyamp


def test_lions_own_step_keeps_its_momentum() -> None:
    """Gradients 1 and then -0.2: the interpolation 0.9 m + 0.1 g keeps its sign by the momentum alone."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    state: Any = polyamp.init(model, polyamp.Recipe(policy="float32", optimizer=polyamp.lion(0.5, betas=(0.9, 0.99))))
    moments = []
    for gradient in (1.0, -0.02):
        model.weight.grad = torch.full_like(model.weight, gradient)
        state.optimizer.step()
        moments.append(state.optimizer.state[model.weight]["exp_avg"].item())
    torch.testing.assert_close(moments, [0.01, 0.99 * 0.01 - 0.01 * 0.02])
    assert model.weight.item() == -1.0, "twice down: 0.9 * 0.01 - 0.1 * 0.02 is above 0"
    fresh = nn.Linear(1, 1, bias=False)
    again: Any = polyamp.init(fresh, polyamp.Recipe(policy="float32", optimizer=polyamp.lion(0.5, betas=(0.9, 0.99))))
    del again.optimizer.state[fresh.weight]["exp_avg"]  # as after a load of another optimizer's state
    fresh.weight.grad = torch.ones_like(fresh.weight)
    again.optimizer.step()
    torch.testing.assert_close(again.optimizer.state[fresh.weight]["exp_avg"].item(), 0.01)
