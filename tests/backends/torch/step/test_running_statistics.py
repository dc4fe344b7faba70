"""Running statistics of a skipped step: torch's scaler leaves them moved, polyamp's step puts them back (S12)."""

from __future__ import annotations

import copy

import torch

import polyamp


def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch).float() * torch.inf).sum()


def test_s12_trap_a_skipped_step_moves_the_statistics_of_a_batch_norm() -> None:
    theirs = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    ours, batch = copy.deepcopy(theirs), torch.randn(8, 4)
    before = {name: value.clone() for name, value in ours.state_dict().items()}

    optimizer, scaler = torch.optim.SGD(theirs.parameters(), 0.1), torch.amp.GradScaler("cpu")
    scaler.scale(loss_fn(theirs, batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(theirs[0].weight, before["0.weight"]), "torch skipped the step"
    assert not torch.equal(theirs.state_dict()["1.running_mean"], before["1.running_mean"])

    recipe = polyamp.Recipe(policy="mixed_bfloat16", scaler=polyamp.LossScaler(), optimizer=polyamp.sgd(0.1))
    _, result = polyamp.train_step(loss_fn, recipe)(polyamp.init(ours, recipe), batch)
    assert bool(result.skipped)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
