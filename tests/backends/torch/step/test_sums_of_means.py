"""Sums of `polyamp.losses.Mean`s over micro-batches: the passes that count leave nothing behind (S8, S12)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import polyamp

ROWS = 12


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(ROWS, 4, generator=generator),
        "labels": torch.randint(0, 3, (ROWS,), generator=generator),
        "boxes": torch.randn(ROWS, 3, generator=generator),
        "mask": (torch.arange(ROWS) % 4 > 0).float(),
    }


def means(model: Any, batch: Any) -> Any:
    """A classification over all rows and a regression over some: the same number in each micro-batch."""
    outputs = model(batch["x"])
    total = polyamp.losses.softmax_cross_entropy(outputs, batch["labels"], reduction="sum")
    errors = ((outputs - batch["boxes"]).abs().mean(1) * batch["mask"]).sum()
    return polyamp.losses.Mean(total, len(batch["x"])) + 0.5 * polyamp.losses.Mean(errors, batch["mask"].sum())


def plain(model: Any, batch: Any) -> Any:
    """The same in one number, which is right since micro-batches count alike."""
    outputs = model(batch["x"])
    errors = ((outputs - batch["boxes"]).abs().mean(1) * batch["mask"]).sum() / batch["mask"].sum()
    return nn.functional.cross_entropy(outputs.float(), batch["labels"]) + 0.5 * errors


class Written(nn.Module):
    """A weight that the forward pass writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        with torch.no_grad():
            self.first.weight.mul_(0.75)
        return self.last(torch.tanh(self.first(x)))


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "writes":
        return Written()
    first: nn.Module = nn.Linear(4, 8)
    if kind == "spectral":
        first = nn.utils.parametrizations.spectral_norm(first)
    middle = nn.BatchNorm1d(8) if kind == "normalized" else nn.Dropout(0.5) if kind == "dropout" else nn.Identity()
    return nn.Sequential(first, middle, nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("kind", ["normalized", "spectral", "writes", "dropout"])
@pytest.mark.parametrize("mode", ["float32", "autocast", "cast"])
def test_a_sum_of_means_trains_as_one_number_does(kind: str, mode: Any) -> None:
    """Parameters and running state after three steps; the first step finds out that the loss is such a sum."""
    policy = polyamp.Policy("float32") if mode == "float32" else polyamp.Policy("mixed_bfloat16", mode=mode)
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1), accumulate_steps=3)
    found = []
    for loss_fn in (means, plain):
        net = model(kind)
        torch.manual_seed(1)
        state, step = polyamp.init(net, recipe), polyamp.train_step(loss_fn, recipe)
        losses = [float(step(state, batch())[1].loss) for _ in range(3)]
        found.append((losses, copy.deepcopy(net.state_dict())))
    (losses, arrays), (expected, wanted) = found
    assert losses == pytest.approx(expected, rel=2e-6 if mode == "float32" else 2e-3)
    for name, value in wanted.items():
        assert (arrays[name].float() - value.float()).abs().max() < (2e-6 if mode == "float32" else 2e-3), name


def test_only_the_first_step_runs_a_pass_twice() -> None:
    calls = []

    def noted(model: Any, batch: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return means(model, batch)

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1), accumulate_steps=3)
    state, step = polyamp.init(model("normalized"), recipe), polyamp.train_step(noted, recipe)
    step(state, batch())
    assert calls == [True, False, False, True, True, True]
    calls.clear()
    step(state, batch())
    assert calls == [False, False, True, True, True]
