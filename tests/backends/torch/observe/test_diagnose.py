"""`polyamp.diagnose` on planted modules whose arithmetic does not fit float16: exactly these, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import polyamp


class Hot(nn.Module):
    """Passes 65504 on the way to an output of usual size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 3e5) / 3e5


class SmallVariance(nn.Module):
    """Squares numbers of 1e-4, which are below float16's range."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = x * 1e-4
        return small * torch.rsqrt((small * small).mean(-1, keepdim=True) + 1e-12)


class Block(nn.Module):
    def __init__(self, extra: nn.Module | None) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.down(self.act(self.up(self.norm(x))))
        return x + (inner if self.extra is None else self.extra(inner))


def network(blocks: int, planted: dict[int, nn.Module]) -> nn.Module:
    torch.manual_seed(blocks)
    return nn.Sequential(nn.Linear(16, 16), *[Block(planted.get(number)) for number in range(blocks)], nn.Linear(16, 4))


def batches(count: int = 12) -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    rows = [torch.tensor(rng.normal(size=(32, 16)).astype(np.float32)) for _ in range(count)]
    return [{"x": x, "y": x[:, :4].argmax(-1)} for x in rows]


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


RECIPE = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adamw(3e-3))


def test_the_planted_modules_are_found_and_mend_the_training() -> None:
    model = network(6, {1: Hot(), 4: SmallVariance()})
    before = [p.detach().clone() for p in model.parameters()]
    report = polyamp.diagnose(model, loss_fn, batches(), RECIPE)
    assert report.sensitive == ["2/extra", "5/extra"]
    assert report.overrides == {"2/extra": "float32", "5/extra": "float32"}
    assert len(report.trials) <= 2 + 2 * 2 * np.log2(len(report.modules))
    assert report.trials[0].distance is None
    last = next(trial for trial in report.trials if trial.float32 == report.sensitive)
    assert last.distance is not None
    assert last.distance < report.tolerance
    assert "2 modules must stay in float32: 2/extra, 5/extra." in str(report)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    state = polyamp.init(model, report.recipe(RECIPE))
    assert state.recipe.policy.overrides == report.overrides


def test_what_autocast_keeps_in_float32_is_not_blamed() -> None:
    """exp(11.5) is above 65504, and runs in float32 by the op list (S4)."""

    class Exponential(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (torch.exp(11.5 + 0 * x) / np.exp(11.5))

    assert polyamp.diagnose(network(2, {1: Exponential()}), loss_fn, batches(6), RECIPE).outcome == "fits"
