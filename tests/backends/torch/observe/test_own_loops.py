"""`polyamp.compare` of loops written by hand under a 16-bit policy: what is said of their updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import polyamp

RATE, DECAY = 1e-2, 0.01


def batches(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {"x": rng.standard_normal((32, 12), "f4"), "y": rng.integers(0, 5, 32)}


def loss_fn(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch["x"]).float(), batch["y"])


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24)) for _ in range(3)]
    return nn.Sequential(nn.Linear(12, 24), *blocks, nn.Linear(24, 5))


def loop(make: Callable[[Any], Any], *, steps: bool = True) -> polyamp.parity.OwnLoop:
    def begin(model: Any) -> Any:
        return polyamp.porting.training(model, make(model.parameters()), step=0)

    def step(training: Any, batch: Any) -> Any:
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(training.model, {name: torch.from_numpy(array) for name, array in batch.items()})
        loss.backward()
        if steps:
            training.optimizer.step()
        return training, loss.detach()

    return polyamp.parity.OwnLoop(begin, step, policy="mixed_bfloat16")


def compared(model: nn.Module, own: polyamp.parity.OwnLoop, steps: int = 2) -> polyamp.parity.Report:
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(RATE, weight_decay=DECAY))
    return polyamp.compare(model, model, batches, loss_fn, (recipe, own), steps=steps, labels=("recipe", "loop"))


def test_a_right_loop_agrees_and_its_updates_are_judged(model: nn.Module) -> None:
    report = compared(model, loop(lambda params: torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY)))

    assert report.agrees, str(report)
    (count,) = report.comparisons[0].updates
    assert (count.phase, count.updated) == ("mixed_bfloat16", 16)
    assert count.judged >= 15  # not the bias of 5 values
    assert f"  updates     judged: {count.judged} of 16 parameters under mixed_bfloat16; rounding hides" in str(report)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=0.5), "0.0001 in recipe, 0.005 in loop"),
        (lambda p: torch.optim.AdamW(p, lr=2 * RATE, weight_decay=DECAY), "loop's update is 2 times recipe's"),
    ],
    ids=["decay of 0.5 for 0.01", "twice the rate"],
)
def test_another_decay_or_rate_is_found(model: nn.Module, make: Any, why: str) -> None:
    first = compared(model, loop(make)).first

    assert first is not None
    assert (first.phase, first.step, first.stage, first.what) == ("mixed_bfloat16", 1, "update", "parameter")
    assert any(why in said for said in first.evidence), first.evidence


def scaled_loop(*, skips: bool = True) -> polyamp.parity.OwnLoop:
    """A loop in float16 whose first scale overflows."""

    def begin(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        return polyamp.porting.training(model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**24))

    def step(training: Any, batch: Any) -> Any:
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(training.model, {name: torch.from_numpy(array) for name, array in batch.items()})
        training.scaler.scale(loss).backward()
        training.scaler.unscale_(training.optimizer)
        if skips:
            training.scaler.step(training.optimizer)
        else:
            training.optimizer.step()
        training.scaler.update()
        return training, loss.detach()

    return polyamp.parity.OwnLoop(begin, step, policy="mixed_float16")


@pytest.mark.parametrize("skips", [True, False])
def test_an_overflow_of_a_loop_is_judged_by_what_the_step_does(model: nn.Module, skips: bool) -> None:
    """The loop's passes are recorded under its own scale, so that gradients overflow on both sides or on none."""
    recipe = polyamp.Recipe(
        policy="mixed_float16", optimizer=polyamp.sgd(RATE), scaler=polyamp.LossScaler(init_scale=2.0**24)
    )
    report = polyamp.compare(model, model, batches, loss_fn, (recipe, scaled_loop(skips=skips)), steps=2)

    if skips:
        assert report.agrees, str(report)
        scales = [row for row in report.comparisons[0].rows if row.what == "scale"]
        assert [row.phase for row in scales] == ["mixed_float16"]
    else:
        assert report.first is not None
        assert (report.first.step, report.first.stage, report.first.what) == (1, "update", "parameter")
