"""What the adapters share: `LoopScaler`, whose update waits, and `LoopSettings`, in loops without any library."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import BackendNotInstalledError, UnsupportedError
from polyamp_torch.integrations.loop_adapter import LoopScaler, LoopSettings, require_extra

INF = float("inf")
GROWING = polyamp.LossScaler(init_scale=16.0, growth_interval=1)


def settings(policy: Any = "mixed_float16", scaler: Any = GROWING) -> LoopSettings:
    return LoopSettings.create(policy, scaler, "cpu", library="The loop")


def scaler() -> LoopScaler:
    return LoopScaler(GROWING, device="cpu")


def stepped(made: LoopScaler, optimizer: torch.optim.Optimizer, gain: float = 1.0) -> None:
    """One iteration whose gradients are `gain`; the update waits."""
    optimizer.zero_grad()
    (p,) = optimizer.param_groups[0]["params"]
    made.scale((p * gain).sum()).backward()
    made.step(optimizer)
    made.update()


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)


@pytest.mark.parametrize(
    "saved", [lambda made: made.state_dict()["scale"], lambda made: copy.deepcopy(made).get_scale()]
)
@pytest.mark.parametrize(("gain", "scale"), [(1.0, 32.0), (INF, 8.0)])
def test_a_saved_scaler_has_made_the_update_that_waits(saved: Any, gain: float, scale: float) -> None:
    made = scaler()
    stepped(made, sgd(), gain)
    assert saved(made) == scale
    assert made.get_scale() == scale, "once"


def test_a_loaded_state_is_not_updated_by_the_step_before() -> None:
    made, optimizer = scaler(), sgd()
    state = made.state_dict()
    stepped(made, optimizer)
    made.load_state_dict(state)
    assert made.get_scale() == 16.0
    assert not made.has_skipped(optimizer)


def test_gradients_are_unscaled_again_after_the_scale_was_set() -> None:
    made, optimizer = scaler(), sgd()
    (p,) = optimizer.param_groups[0]["params"]
    for scale in (16.0, 64.0):
        optimizer.zero_grad()
        made.scale(p.sum()).backward()
        assert p.grad == scale
        for _ in range(2):
            made.unscale_(optimizer)
            assert p.grad == 1.0
        made.step(optimizer)
        made.update(64.0)
    assert p.item() == -2.0


def test_whether_a_step_was_skipped_is_known_of_each_optimizer() -> None:
    made, first, second, idle = scaler(), sgd(), sgd(), sgd()
    stepped(made, first, INF)
    stepped(made, second)
    assert [made.has_skipped(optimizer) for optimizer in (first, second, idle)] == [True, False, False]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def passes(model: Any) -> int:
    return int(model[1].num_batches_tracked)


def forward(using: LoopSettings, model: nn.Module) -> torch.Tensor:
    """A forward pass as an adapter makes it."""
    using.snapshot_buffers(model)
    out: torch.Tensor = model(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    return out


def train(using: LoopSettings, model: nn.Module, optimizer: torch.optim.Optimizer, gain: float) -> None:
    assert using.scaler is not None
    optimizer.zero_grad()
    using.scaler.scale((forward(using, model) * gain).sum()).backward()
    using.scaler.step(optimizer)
    using.scaler.update()


def test_a_skip_puts_back_the_statistics_of_what_the_optimizer_trains_alone() -> None:
    """The two of a GAN: the discriminator's skipped step leaves the generator's statistics where they are."""
    using, generator, discriminator = settings(), normed(), normed()
    ours, theirs = (torch.optim.SGD(model.parameters(), 0.1) for model in (generator, discriminator))
    made = forward(using, generator)
    train(using, discriminator, theirs, INF)
    assert (passes(generator), passes(discriminator)) == (1, 0)
    assert using.scaler is not None
    using.scaler.scale((made * INF).sum()).backward()
    using.scaler.step(ours)
    assert (passes(generator), passes(discriminator)) == (0, 0)


def test_statistics_that_move_outside_of_training_stay() -> None:
    """A pass without gradients, as to estimate statistics anew; and numbers loaded after an evaluation."""
    using, model = settings(), normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.no_grad():
        forward(using, model)
    train(using, model, optimizer, INF)
    assert passes(model) == 1
    forward(using, model.eval())
    model.load_state_dict({**model.state_dict(), "1.num_batches_tracked": torch.tensor(7)})
    train(using, model.train(), optimizer, INF)
    assert passes(model) == 7
    train(using, model, optimizer, 1.0)
    assert passes(model) == 8


def test_a_scaler_that_only_checks_skips_as_well() -> None:
    using, model = settings("mixed_bfloat16", polyamp.LossScaler.off(check_finite=True)), normed()
    before = [p.detach().clone() for p in model.parameters()]
    train(using, model, torch.optim.SGD(model.parameters(), 0.1), INF)
    assert using.step_was_skipped
    assert passes(model) == 0
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert settings("mixed_bfloat16", "off").scaler is None


def test_lbfgs_is_refused_under_a_scaler_alone() -> None:
    optimizer = torch.optim.LBFGS(normed().parameters())
    settings("mixed_bfloat16", None).check_optimizer(optimizer)
    with pytest.raises(UnsupportedError, match="LBFGS evaluates the loss several times"):
        settings().check_optimizer(optimizer)


@pytest.mark.parametrize("wanted", [None, "medium"])
def test_a_backward_pass_has_the_policys_precision_of_float32_products(wanted: Any) -> None:
    before = torch.get_float32_matmul_precision()
    with settings(polyamp.Policy("float32", float32_matmul=wanted), None).matmul_precision():
        assert torch.get_float32_matmul_precision() == (wanted or before)
    assert torch.get_float32_matmul_precision() == before


def test_only_the_missing_package_itself_is_reported_as_missing() -> None:
    message = r'polyamp_torch.no_such needs no_such, .* Run: pip install "polyamp\[no_such\]"'
    with pytest.raises(BackendNotInstalledError, match=message), require_extra("no_such"):
        importlib.import_module("no_such.part")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such'"), require_extra("lightning"):
        importlib.import_module("no_such.part")
