"""The step beside what else a torch loop holds: data loaders, schedulers, averages, parameter groups, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import polyamp
from polyamp.errors import BatchError, ModelError, UnsupportedError

INF = float("inf")
SCALER = polyamp.LossScaler.static(16.0, on_stuck="ignore")
GAINS = [1.0, INF, 1.0, INF, INF, 1.0, 1.0]
"""Factors on the loss, batch by batch: an infinite one overflows, so that the step is skipped."""


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def batch(gain: float = 1.0, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator)
    return {"x": x, "y": y, "gain": torch.full((4, 2), gain)}


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], batch["y"])


def recipe_of(optimizer: Any, policy: Any = "mixed_float16", **settings: Any) -> polyamp.Recipe:
    return polyamp.Recipe(policy=policy, optimizer=optimizer, scaler=SCALER, **settings)


def trained(
    model: nn.Module,
    optimizer: Any,
    gains: list[float],
    after: Callable[[Any, Any], None] = lambda state, result: None,
    **settings: Any,
) -> Any:
    recipe = recipe_of(optimizer, **settings)
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    applied = 0
    for gain in gains:
        state, result = step(state, batch(gain, seed=applied))  # a skipped batch comes again
        assert bool(result.skipped) == (gain == INF)
        applied += gain != INF
        after(state, result)
    return state


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, value), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


# Data.


class Pairs(Dataset[dict[str, torch.Tensor]]):
    """Examples as dicts, which the loader collates into a dict of batches."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = batch(seed=index)
        return {name: value[0] for name, value in item.items()}


# From Python 3.12 on, forking a process that has threads is deprecated; it is what DataLoader does by itself.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_batches_of_a_data_loader_with_workers_go_straight_into_the_step() -> None:
    models = [network(), network()]
    for model, workers in zip(models, (0, 2), strict=True):
        recipe = recipe_of(polyamp.adamw(1e-2))
        state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe)
        for item in DataLoader(Pairs(), batch_size=4, num_workers=workers):
            state, result = step(state, item)
            assert not bool(result.skipped)
        assert int(state.step) == 4
    assert_same(*models)


def test_lists_of_a_data_loader_are_a_batch_unless_they_are_to_be_split() -> None:
    """The default collation makes a list of a tuple, which with `accumulate_steps` means a list of micro-batches."""
    loader = DataLoader(TensorDataset(torch.ones(4, 4), torch.zeros(4, 2)), batch_size=4)

    def loss_of(model: Any, batch: Any) -> Any:
        return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])

    once, twice = recipe_of(polyamp.sgd(0.1)), recipe_of(polyamp.sgd(0.1), accumulate_steps=2)
    for item in loader:
        assert isinstance(item, list)
        polyamp.train_step(loss_of, once)(polyamp.init(network(), once), item)
        with pytest.raises(BatchError, match="Pass the arrays of one batch as a tuple or a dict"):
            polyamp.train_step(loss_of, twice)(polyamp.init(network(), twice), item)
        _, result = polyamp.train_step(loss_of, twice)(polyamp.init(network(), twice), tuple(item))
        assert int(result.step) == 1


# Schedulers.

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=4),
    "warm_up_and_decay": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.1, fused=True)


@pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step:UserWarning")  # torch 2.7's SequentialLR
@pytest.mark.parametrize("make", [sgd, fused])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_counts_applied_updates(make: Any, name: str) -> None:
    """`if not result.skipped: scheduler.step()`: rates, weights and statistics as if the skipped steps were not."""
    models, rates = [network(), network()], []
    for model, gains in zip(models, (GAINS, [1.0] * 4), strict=True):
        optimizer = make(model)
        scheduler = SCHEDULERS[name](optimizer)

        def after(state: Any, result: Any, scheduler: Any = scheduler) -> None:
            if not result.skipped:
                scheduler.step()

        trained(model, optimizer, gains, after)
        rates.append(scheduler.get_last_lr())
    assert rates[0] == rates[1]
    assert_same(*models)


def test_trap_a_scheduler_beside_grad_scaler_moves_on_skipped_steps() -> None:
    """The loop of torch's documentation; its first step is skipped, and torch blames the order of the calls."""
    model = network()
    optimizer = sgd(model)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def plain_step(gain: float) -> None:
        item = batch(gain)
        optimizer.zero_grad()
        scaler.scale(functional.mse_loss(model(item["x"]) * item["gain"], item["y"])).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    with pytest.warns(UserWarning, match="before `optimizer.step"):
        plain_step(INF)
    plain_step(1.0)
    assert scheduler.get_last_lr() == [0.025]
    rates: list[float] = []
    model = network()
    optimizer = sgd(model)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def after(state: Any, result: Any) -> None:
        if not result.skipped:
            scheduler.step()
        rates.extend(scheduler.get_last_lr())

    trained(model, optimizer, [INF, 1.0], after)
    assert rates == [0.1, 0.05]


def test_a_schedule_of_polyamps_needs_no_host_and_equals_torchs_scheduler() -> None:
    """For accelerators: `result.skipped` is read on the host, a schedule in the spec is not."""
    by_torch, by_polyamp = network(), network()
    optimizer = torch.optim.SGD(by_torch.parameters(), 0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    trained(by_torch, optimizer, GAINS, lambda state, result: None if result.skipped else scheduler.step())
    trained(by_polyamp, polyamp.sgd(polyamp.schedules.step(0.1, every=2, factor=0.5)), GAINS)
    for value, expected in zip(by_polyamp.parameters(), by_torch.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)  # one rate is float64, the other float32


def test_a_plateau_scheduler_takes_the_loss_of_applied_updates() -> None:
    optimizer = sgd(model := network())
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs")
    trained(model, optimizer, GAINS, lambda _, r: None if r.skipped else scheduler.step(float(r.loss)))
    assert scheduler.last_epoch == 4
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_a_scheduler_resumes_beside_a_checkpoint(tmp_path: Path) -> None:
    def built() -> tuple[nn.Module, Any, Any]:
        model = network()
        optimizer = fused(model)
        return model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 8)

    models = []
    for stop in (None, 3):
        model, optimizer, scheduler = built()
        recipe = recipe_of(optimizer)
        state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe)
        for i, gain in enumerate(GAINS):
            if i == stop:
                polyamp.save(state, tmp_path / "state")
                torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
                model, optimizer, scheduler = built()
                recipe = recipe_of(optimizer)
                step = polyamp.train_step(loss_fn, recipe)
                state = polyamp.restore(polyamp.init(model, recipe), tmp_path / "state")
                scheduler.load_state_dict(torch.load(tmp_path / "scheduler.pt"))
            state, result = step(state, batch(gain, seed=i))
            if not result.skipped:
                scheduler.step()
        models.append(model)
    assert_same(*models)


# Averages.


@pytest.mark.parametrize("buffers", [False, True])
def test_an_average_of_the_weights_counts_applied_updates(buffers: bool) -> None:
    averages = []
    for gains in (GAINS, [1.0] * 4):
        model = network()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=buffers)

        def after(state: Any, result: Any, average: Any = average) -> None:
            if not result.skipped:
                average.update_parameters(state.model)

        trained(model, polyamp.adamw(1e-2), gains, after)
        averages.append(average)
    assert int(averages[0].n_averaged) == 4
    assert_same(averages[0], averages[1])
    assert not torch.equal(averages[0].module[0].weight, model[0].weight)
    output = polyamp.Policy("mixed_float16").autocast(averages[0].eval())(batch()["x"])
    assert output.dtype == torch.float32


# Optimizers.


@pytest.mark.parametrize("is_fused", [False, True])
def test_parameter_groups_keep_their_options(is_fused: bool) -> None:
    """Two rates and two decays, in float32 under a scale of 16: torch's own loop bit for bit."""

    def made(model: nn.Sequential) -> torch.optim.Optimizer:
        plain, decayed = list(model[0].parameters()) + list(model[1].parameters()), model[3].parameters()
        groups = [{"params": plain, "lr": 0.05, "weight_decay": 0.0}, {"params": decayed}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=is_fused)

    model, plain = network(), network()
    trained(model, made(model), GAINS, policy="float32")
    optimizer = made(plain)
    for i in range(4):
        item = batch(seed=i)
        optimizer.zero_grad()
        functional.mse_loss(plain(item["x"]) * item["gain"], item["y"]).backward()
        optimizer.step()
    assert_same(model, plain)


class Branches(nn.Module):
    """Of three layers the second is never used and the third shares the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused, self.tied = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.used.weight
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.tied(torch.relu(self.used(x))))


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.AdamW(p, 1e-2), lambda p: torch.optim.AdamW(p, 1e-2, fused=True)]
)
def test_unused_and_tied_parameters_train_as_in_torchs_own_loop(make: Any) -> None:
    """A parameter without a gradient is not touched, by weight decay neither; a shared one is updated once."""
    model, plain = Branches(), Branches()
    before = model.unused.weight.detach().clone()
    state = trained(model, make(model.parameters()), GAINS, policy="float32")
    assert "tied/weight" not in state.parameters
    optimizer = make(plain.parameters())
    for i in range(4):
        item = batch(seed=i)
        optimizer.zero_grad()
        functional.mse_loss(plain(item["x"]) * item["gain"], item["y"]).backward()
        optimizer.step()
    assert_same(model, plain)
    assert torch.equal(model.unused.weight, before)
    assert model.tied.weight is model.used.weight


def test_frozen_parameters_train_after_init_is_called_again() -> None:
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    state = trained(model, polyamp.adamw(1e-2), [1.0, 1.0])
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    with pytest.raises(ModelError, match=r"polyamp\.refresh\(state\)"):
        polyamp.train_step(loss_fn, state.recipe)(state, batch())
    trained(model, polyamp.adamw(1e-2), [1.0])
    assert not torch.equal(model[0].weight, before)


def test_what_the_step_cannot_train_is_refused_before_it() -> None:
    with pytest.raises(UnsupportedError, match="Received: cpu, meta"):
        polyamp.init(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, device="meta")), recipe_of(polyamp.sgd(0.1)))
    with pytest.raises(UnsupportedError, match="LBFGS"):
        polyamp.init(model := network(), recipe_of(torch.optim.LBFGS(model.parameters())))


# Evaluation.


def test_evaluation_between_steps_leaves_training_as_it_was() -> None:
    policy = polyamp.Policy("mixed_float16")
    seen: list[Any] = []

    def evaluate(state: Any, result: Any) -> None:
        state.model.eval()
        with torch.inference_mode():
            output = policy.autocast(state.model)(batch()["x"])
        seen.append((output.dtype, output.is_inference()))
        state.model.train()

    evaluated, undisturbed = network(), network()
    trained(evaluated, polyamp.adamw(1e-2), GAINS, evaluate)
    trained(undisturbed, polyamp.adamw(1e-2), GAINS)
    assert seen == [(torch.float32, True)] * len(GAINS)
    assert_same(evaluated, undisturbed)


def test_modes_set_within_loss_fn_hold() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    recipe = recipe_of(polyamp.sgd(0.1))

    def consistency(model: Any, batch: Any) -> Any:
        model.eval()
        with torch.no_grad():
            target = model(batch["x"])
        model.train()
        return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], target), target

    state, step = polyamp.init(model, recipe), polyamp.train_step(consistency, recipe)
    counts = []
    for gain in (1.0, INF, 1.0):
        state, result = step(state, batch(gain))
        counts.append(int(model[2].num_batches_tracked))  # type: ignore[arg-type, union-attr]  # a batch norm's
        assert result.aux.shape == (4, 2)
        assert model.training
    assert counts == [1, 1, 2], "the pass in eval mode does not count, and the skipped step neither"
