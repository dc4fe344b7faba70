"""Training states of models with alike layers: a batch shows which is which, and their moments go along (S30)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import PortError

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


class Heads(nn.Module):
    """Two heads of one shape, the first of which is called first."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        for name in sorted((first, second)):
            setattr(self, name, nn.Linear(4, 3))
        self.names = first, second

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (getattr(self, name) for name in self.names)
        hidden = torch.tanh(self.trunk(x))
        return first(hidden), second(hidden)


def loss_fn(model: Any, x: Any) -> Any:
    first, second = model(x)
    return first.square().mean() + (second - 1.0).square().mean()


def test_s30_a_batch_tells_the_heads_of_a_state_apart() -> None:
    recipe = polyamp.Recipe(optimizer=polyamp.adam(0.05), ema=polyamp.Ema(0.5))
    source = polyamp.init(Heads("zeta", "alpha"), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for _ in range(3):
        source, _ = step(source, X)
    target = polyamp.init(Heads("left", "right"), recipe)
    with pytest.raises(PortError, match="nothing tells which of"):
        polyamp.port(source, target)
    moved, report = polyamp.port(source, target, batch=X)
    assert {each.source: each.target for each in report.moved} == {"trunk": "trunk", "zeta": "left", "alpha": "right"}
    for state in (source, moved):
        step(state, X)
    for ours, theirs in (("zeta", "left"), ("alpha", "right"), ("trunk", "trunk")):
        assert torch.equal(source.parameters[f"{ours}/weight"], moved.parameters[f"{theirs}/weight"])
        assert torch.equal(source.averages.model[f"{ours}/bias"], moved.averages.model[f"{theirs}/bias"])
