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
from polyamp_torch.step.torch_only import random_state


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
def test_s22_resume_continues_dropout_and_native_optimizers(tmp_path: Path, native: bool, done: int) -> None:
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


def test_s22_a_spec_and_another_optimizers_checkpoint_do_not_mix(tmp_path: Path) -> None:
    state, _ = make(native=True, seed=0)
    polyamp.save(state, tmp_path / "checkpoint")
    other, _ = make(native=False, seed=0)
    before = other.export()
    for on_change in ("error", "accept"):
        with pytest.raises(CheckpointError, match=r"optimizer\.type: torch\.optim\.nadam\.NAdam -> adamw"):
            polyamp.restore(other, tmp_path / "checkpoint", on_change=on_change)
    assert all(other.export()[name].tobytes() == value.tobytes() for name, value in before.items())


def test_s22_resume_keeps_the_layout_of_optimizer_state(tmp_path: Path) -> None:
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


def test_s22_resume_keeps_every_number_of_the_groups(tmp_path: Path) -> None:
    state, _ = make(native=True, seed=0)
    state.optimizer.param_groups[0].update(weight_decay=0.25, betas=(0.5, 0.75))
    polyamp.save(state, tmp_path / "checkpoint")
    other, recipe = make(native=True, seed=1)
    run(other, recipe, range(2))
    polyamp.restore(other, tmp_path / "checkpoint")
    group = other.optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"]) == (0.25, (0.5, 0.75))
    assert not other.optimizer.state, "saved before the first step, so there is no state yet"


def test_s22_another_kind_of_scaler_is_said_and_starts_anew(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    polyamp.save(polyamp.init(model, polyamp.Recipe(scaler=polyamp.LossScaler())), tmp_path / "checkpoint")
    static = polyamp.init(model, polyamp.Recipe(scaler=polyamp.LossScaler.static(8.0)))
    with pytest.raises(CheckpointError, match=r"scaler\.kind: dynamic -> static"):
        polyamp.restore(static, tmp_path / "checkpoint")
    assert float(polyamp.restore(static, tmp_path / "checkpoint", on_change="accept").scale_state.scale) == 8.0


def test_s22_resume_restores_what_a_torch_scheduler_made_of_the_rate(tmp_path: Path) -> None:
    """The rate of a native optimizer is state: bit for bit as if the run had not stopped, and no changed recipe."""

    def made(seed: int) -> tuple[Any, polyamp.Recipe, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(5, 1)
        optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], 0.1)
        recipe = polyamp.Recipe(optimizer=optimizer)
        return polyamp.init(model, recipe), recipe, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def advance(state: Any, recipe: polyamp.Recipe, scheduler: Any, seeds: range) -> None:
        for seed in seeds:
            run(state, recipe, range(seed, seed + 1))
            scheduler.step()

    state, recipe, scheduler = made(0)
    advance(state, recipe, scheduler, range(3))
    polyamp.save(state, tmp_path / "checkpoint")
    kept = scheduler.state_dict()
    advance(state, recipe, scheduler, range(3, 6))
    other, recipe, scheduler = made(1)
    scheduler.load_state_dict(kept)
    polyamp.restore(other, tmp_path / "checkpoint")
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.1 / 8, 0.5 / 8]
    advance(other, recipe, scheduler, range(3, 6))
    straight, resumed = state.export(), other.export()
    assert [name for name in straight if straight[name].tobytes() != resumed[name].tobytes()] == []


def test_s22_a_native_optimizers_changed_options_are_said_by_group(tmp_path: Path) -> None:
    def made(rate: float, decay: float) -> Any:
        model = nn.Linear(6, 2)
        groups = [{"params": [model.weight], "weight_decay": decay}, {"params": [model.bias], "lr": rate}]
        return polyamp.init(model, polyamp.Recipe(optimizer=torch.optim.AdamW(groups, 0.1)))

    saved = made(0.25, 0.0)
    saved.optimizer.param_groups[0]["lr"] = 0.0125  # moved since by a scheduler, or by hand
    polyamp.save(saved, tmp_path / "checkpoint")
    other = made(0.75, 0.5)
    with pytest.raises(CheckpointError) as caught:
        polyamp.restore(other, tmp_path / "checkpoint")
    assert str(caught.value).splitlines()[2:4] == [
        "  optimizer.groups.0.weight_decay: 0.0 -> 0.5",
        "  optimizer.groups.1.lr: 0.25 -> 0.75",
    ]
    polyamp.restore(other, tmp_path / "checkpoint", on_change="accept")
    first, second = other.optimizer.param_groups
    assert (first["lr"], first["weight_decay"], second["lr"], second["weight_decay"]) == (0.0125, 0.5, 0.75, 0.01)


class Forged:
    """A state of anybody's making, which `save` writes with a digest that is right."""

    name = "torch"

    def __init__(self, state: Any, **changes: Any) -> None:
        self.backend, self.recipe = self, state.recipe
        self.arrays = {**state.export(), **changes}

    def export_state(self, _: Any) -> Any:
        return self.arrays


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rng/cpu", None, "rng/cpu is no state of torch's random numbers"),
        ("optimizer/groups/0/lr#number", np.array([7.0, 0.1]), "lr#number is not a number with its type"),
        ("optimizer/state/elsewhere/exp_avg", np.zeros(3, "f4"), "elsewhere/exp_avg is of no parameter"),
        ("optimizer/state/0/weight/step", np.array(-1.0, "f4"), "step is -1.0, and a count is never negative"),
    ],
)
def test_s22_what_torch_would_refuse_is_refused_first(tmp_path: Path, name: str, value: Any, said: str) -> None:
    state, _ = make(native=True, seed=0)  # before its first step: the file may hold any state of the optimizer
    before = {key: array.tobytes() for key, array in state.export().items()}
    garbage = np.full_like(state.export()["rng/cpu"], 255)
    polyamp.save(Forged(state, **{name: garbage if value is None else value}), tmp_path / "forged")
    with pytest.raises(CheckpointError, match=said):
        polyamp.restore(state, tmp_path / "forged")
    assert {key: array.tobytes() for key, array in state.export().items()} == before


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("saved_on_gpu", [False, True])
def test_s22_a_training_goes_on_on_another_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved_on_gpu: bool, sharded: bool
) -> None:
    """A state on a GPU has its generator's state besides; here the CPU's stands for it."""

    def on_gpu(device: torch.device) -> dict[str, torch.Tensor]:
        return {"rng/cpu": torch.get_rng_state(), "rng/cuda": torch.get_rng_state()}

    def generators(used: Any) -> None:
        monkeypatch.setattr("polyamp_torch.step.torch_only.random_state.generator_states", used)

    on_cpu = random_state.generator_states
    state, recipe = make(native=False, seed=0)
    run(state, recipe, range(3))
    generators(on_gpu if saved_on_gpu else on_cpu)
    assert ("rng/cuda" in state.export()) is saved_on_gpu
    polyamp.save(state, tmp_path / "checkpoint", sharded=sharded)
    other, recipe = make(native=False, seed=1)
    generators(on_cpu if saved_on_gpu else on_gpu)
    seeded: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new, device: seeded.append(new))
    restored = polyamp.restore(other, tmp_path / "checkpoint")
    run(state, recipe, range(3, 4))
    run(restored, recipe, range(3, 4))
    assert (restored.step, len(seeded)) == (4, 0 if saved_on_gpu else 1)
