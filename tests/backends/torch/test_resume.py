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
