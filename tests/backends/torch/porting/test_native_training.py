"""A torch loop of one's own goes on under polyamp, and back: `torch.optim` and `torch.amp.GradScaler`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp import porting
from polyamp.errors import PortError
from polyamp.reference import MLP

SCALER = polyamp.LossScaler.like("torch", init_scale=256.0, growth_interval=4)
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9), polyamp.sgd(0.02, momentum=0.9)),
    "adam": (lambda p: torch.optim.Adam(p, lr=1e-2), polyamp.adam(1e-2)),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), polyamp.adamw(1e-2, weight_decay=0.1)),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5), polyamp.rmsprop(1e-3, momentum=0.5)),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.02), polyamp.adagrad(0.02)),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=1e-2), polyamp.nadam(1e-2)),
}


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dense0, self.dense1 = nn.Linear(4, 3), nn.Linear(3, 1)

    def forward(self, x: Any) -> Any:
        return self.dense1(torch.relu(self.dense0(x)))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn((8, 4), generator=torch.Generator().manual_seed(number))
    return x * (1e30 if number in (3, 11) else 1.0), x.sum(1, keepdim=True)


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def own_loop(model: nn.Module, optimizer: Any, scaler: Any, numbers: range) -> list[tuple[float, float]]:
    """A loop as torch's documentation has it, in float32: (loss, scale) of each step."""
    seen = []
    for number in numbers:
        x, y = batch(number)
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((loss.item(), scaler.get_scale()))
    return seen


def begun(name: str, seed: int = 0, steps: int = 8) -> tuple[nn.Module, Any, Any]:
    model = Net(seed)
    optimizer = OPTIMIZERS[name][0](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
    own_loop(model, optimizer, scaler, range(steps))
    return model, optimizer, scaler


def recipe(name: str, **changes: Any) -> polyamp.Recipe:
    return polyamp.Recipe(scaler=SCALER, optimizer=OPTIMIZERS[name][1]).replace(**changes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_of_ones_own_goes_on_and_comes_back(name: str) -> None:
    model, optimizer, scaler = begun(name)
    state = polyamp.init(Net(1), recipe(name))
    saved = optimizer.state_dict(), scaler.state_dict()
    for source in (porting.training(model, *saved), porting.training(model, optimizer, scaler, step=7)):
        state, report = polyamp.port(source, state)
        assert report.recipe == []
    assert int(state.step) == 7
    other = begun(name, seed=2, steps=1)
    back, _ = polyamp.port(state, porting.training(*other))
    assert back.optimizer is other[1]
    assert other[2].state_dict() == scaler.state_dict()
    step, seen = polyamp.train_step(loss_fn, state.recipe), []
    for number in range(8, 16):
        state, result = step(state, batch(number))
        seen.append((float(result.loss), float(state.scale_state.scale)))
    straight = own_loop(model, optimizer, scaler, range(8, 16))
    assert own_loop(*other, range(8, 16)) == straight
    assert [scale for _, scale in seen] == [scale for _, scale in straight]
    losses = [loss for number, (loss, _) in enumerate(seen) if number != 3]
    assert losses == pytest.approx([loss for number, (loss, _) in enumerate(straight) if number != 3], rel=1e-6)


def test_it_goes_on_on_another_backend() -> None:
    model, optimizer, scaler = begun("adam")
    state = polyamp.init(MLP.random([4, 3, 1], seed=0), recipe("adam"))
    state, report = polyamp.port(porting.training(model, optimizer, scaler), state)
    assert [each.target for each in report.moved] == ["dense0", "dense1"]
    found = porting.training_state(state)
    assert found.counts == dict.fromkeys(("dense0/kernel", "dense0/bias", "dense1/kernel", "dense1/bias"), 7)
    assert (
        found.slots["exp_avg"]["dense0/kernel"].read().tolist()
        == optimizer.state[model.dense0.weight]["exp_avg"].T.tolist()
    )
    assert found.loss_scale["scale"] == scaler.get_scale()


def test_an_optimizer_that_does_not_count_says_so() -> None:
    model, optimizer, scaler = begun("sgd")
    state, report = polyamp.port(porting.training(model, optimizer, scaler), polyamp.init(Net(1), recipe("sgd")))
    assert int(state.step) == 0
    assert any("say it in training(..., step=)" in note for note in report.notes)


def test_a_layer_that_the_target_alone_trains_begins_anew_and_is_named() -> None:
    frozen, made = Net(0), recipe("adam")
    frozen.dense0.requires_grad_(False)
    source, step = polyamp.init(frozen, made), polyamp.train_step(loss_fn, made)
    for number in range(2):
        source, _ = step(source, batch(number))
    state, report = polyamp.port(source, polyamp.init(Net(1), made))
    (note,) = [note for note in report.notes if "begins anew" in note]
    assert note == (
        "trained in the target alone, so that the optimizer's state of it begins anew: dense0/weight, dense0/bias"
    )
    found = porting.training_state(state)
    assert found.counts == {"dense0/kernel": 0, "dense0/bias": 0, "dense1/kernel": 2, "dense1/bias": 2}
    assert not found.slots["exp_avg"]["dense0/kernel"].read().any()
    assert found.slots["exp_avg"]["dense1/kernel"].read().any()


def test_what_differs_of_the_recipe_is_reported() -> None:
    source = porting.training(*begun("adamw"))
    target = polyamp.init(Net(1), recipe("adamw", optimizer=polyamp.adamw(2e-2, weight_decay=0.1), scaler="torch"))
    _, report = polyamp.port(source, target)
    assert [str(change) for change in report.recipe] == [
        "scaler.growth_interval: 4 -> 2000",
        "optimizer.learning_rate: 0.01 -> 0.02",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adam(p, amsgrad=True), r"amsgrad=True in parameter group 0 of torch\.optim\.adam\.Adam"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), r"dampening=0\.5 in parameter group 0"),
        (lambda p: torch.optim.RAdam(p), r"it is trained by torch\.optim\.radam\.RAdam, of which polyamp knows no"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(make: Any, message: str) -> None:
    model = Net(0)
    state = polyamp.init(Net(1), recipe("adam"))
    with pytest.raises(PortError, match=message):
        polyamp.port(porting.training(model, make(model.parameters())), state)


def test_what_is_no_optimizer_or_scaler_is_refused() -> None:
    model, optimizer, scaler = begun("adam")
    state = polyamp.init(Net(1), recipe("adam"))
    for given, message in (
        (porting.training(model, model), r"over torch the optimizer is a torch\.optim\.Optimizer or its state_dict"),
        (porting.training(model, optimizer, optimizer), r"over torch the scaler is a torch\.amp\.GradScaler"),
        (porting.training(Net(0), optimizer), "does not hold the model's parameter 'dense0/weight'"),
    ):
        with pytest.raises(polyamp.ArgumentError, match=message):
            polyamp.port(given, state)
    with pytest.raises(polyamp.ArgumentError, match="what is filled is the optimizer and the GradScaler themselves"):
        polyamp.port(state, porting.training(model, optimizer.state_dict(), scaler))


def test_the_guide_runs() -> None:
    guide = Path(__file__).parents[4] / "docs" / "guides" / "moving_a_training.md"
    block = guide.read_text(encoding="utf-8").split("```python\n")[-1].split("```")[0]
    exec(compile(block, "docs/guides/moving_a_training.md", "exec"), {})


def test_polyamps_own_scaler_keeps_its_counters() -> None:
    from polyamp_torch import GradScaler

    state = polyamp.init(MLP.random([4, 3, 1], seed=0), recipe("adam", scaler=SCALER.replace(hysteresis=2)))
    arrays = state.backend.export_state(state)
    held = {"loss_scale/hysteresis": 1, "loss_scale/skipped": 5, "loss_scale/good_steps": 3}
    state = state.backend.import_state(state, arrays | {name: arrays[name].dtype.type(v) for name, v in held.items()})
    model = Net(0)
    scaler = GradScaler(SCALER.replace(hysteresis=2), device="cpu")
    polyamp.port(state, porting.training(model, torch.optim.Adam(model.parameters(), lr=1e-2), scaler))
    saved = scaler.state_dict()["polyamp"]
    assert (saved["hysteresis"], saved["skipped"], saved["good_steps"]) == (1, 5, 3)
