"""S22 on torch beyond the conformance suite: dropout's random numbers and native optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import CheckpointError


def make(native: bool, seed: int) -> tuple[Any, polyamp.Recipe]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer: Any = torch.optim.NAdam(model.parameters(), 1e-2) if native else polyamp.adamw(1e-2)
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=optimizer)
    return polyamp.init(model, recipe), recipe


def run(state: Any, recipe: polyamp.Recipe, seeds: range) -> None:
    step = polyamp.train_step(lambda m, b: m(b).float().square().mean(), recipe)
    for seed in seeds:
        step(state, np.random.default_rng(seed).normal(size=(4, 5)).astype(np.float32))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("done", [0, 3])
def test_resume_continues_dropout_and_native_optimizers(tmp_path: Path, native: bool, done: int) -> None:
    state, recipe = make(native, seed=0)
    run(state, recipe, range(done))
    polyamp.save(state, tmp_path / "checkpoint")
    run(state, recipe, range(done, 6))
    straight = state.backend.export_state(state)
    other, recipe = make(native, seed=1)
    restored = polyamp.restore(other, tmp_path / "checkpoint")
    run(restored, recipe, range(done, 6))
    resumed = restored.backend.export_state(restored)
    assert set(straight) == set(resumed)
    assert [name for name in straight if straight[name].tobytes() != resumed[name].tobytes()] == []


def test_a_spec_and_another_optimizers_checkpoint_do_not_mix(tmp_path: Path) -> None:
    state, _ = make(native=True, seed=0)
    polyamp.save(state, tmp_path / "checkpoint")
    other, _ = make(native=False, seed=0)
    with pytest.raises(CheckpointError, match="another model, optimizer or scaler"):
        polyamp.restore(other, tmp_path / "checkpoint")


def test_resume_keeps_the_layout_of_optimizer_state(tmp_path: Path) -> None:
    """Fused kernels read flat memory: slots must be laid out like a channels_last parameter."""

    def fresh(seed: int) -> tuple[Any, polyamp.Recipe]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=torch.channels_last)
        recipe = polyamp.Recipe(optimizer=polyamp.adamw(1e-2))
        return polyamp.init(model, recipe), recipe

    def advance(state: Any, recipe: polyamp.Recipe, seeds: range) -> None:
        step = polyamp.train_step(lambda m, b: m(b).square().mean(), recipe)
        for seed in seeds:
            step(state, np.random.default_rng(seed).normal(size=(2, 3, 5, 5)).astype(np.float32))

    state, recipe = fresh(0)
    advance(state, recipe, range(3))
    polyamp.save(state, tmp_path / "checkpoint")
    advance(state, recipe, range(3, 6))
    other, recipe = fresh(1)
    polyamp.restore(other, tmp_path / "checkpoint")
    advance(other, recipe, range(3, 6))
    assert torch.equal(state.model[0].weight, other.model[0].weight)


def test_resume_keeps_every_number_of_the_groups(tmp_path: Path) -> None:
    state, _ = make(native=True, seed=0)
    state.optimizer.param_groups[0].update(weight_decay=0.25, betas=(0.5, 0.75))
    polyamp.save(state, tmp_path / "checkpoint")
    other, recipe = make(native=True, seed=1)
    run(other, recipe, range(2))
    polyamp.restore(other, tmp_path / "checkpoint")
    group = other.optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"]) == (0.25, (0.5, 0.75))
    assert not other.optimizer.state, "saved before the first step, so there is no state yet"


def test_a_scale_that_the_scaler_never_has_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    polyamp.save(polyamp.init(model, polyamp.Recipe(scaler=polyamp.LossScaler())), tmp_path / "checkpoint")
    static = polyamp.init(model, polyamp.Recipe(scaler=polyamp.LossScaler.static(8.0)))
    with pytest.raises(CheckpointError, match="holds a loss scale of 32768"):
        polyamp.restore(static, tmp_path / "checkpoint")


def test_resume_restores_a_native_optimizers_rate(tmp_path: Path) -> None:
    def made(rate: float) -> Any:
        model = nn.Linear(6, 2)
        return polyamp.init(model, polyamp.Recipe(optimizer=torch.optim.SGD(model.parameters(), rate)))

    polyamp.save(made(0.1), tmp_path / "checkpoint")
    assert polyamp.restore(made(0.5), tmp_path / "checkpoint").optimizer.param_groups[0]["lr"] == 0.1
