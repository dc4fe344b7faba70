"""S34 in torch: torch's own averages bit for bit, devices that are not read, compiled steps, blocks, engines."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import polyamp
from polyamp.errors import StateError, UnsupportedError
from tests.backends.torch.step.test_gradients import INF, Reads, item, loss_fn, network, refuse_to_look


@pytest.fixture(params=["looking", "blind"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways through the step: the CPU's, and that of every other device."""
    if request.param == "blind":
        refuse_to_look(monkeypatch)
    return str(request.param)


def recipe(**settings: Any) -> polyamp.Recipe:
    ema = settings.pop("ema", polyamp.Ema(0.9))
    return polyamp.Recipe(
        optimizer=polyamp.adamw(0.05), scaler=polyamp.LossScaler(init_scale=16.0), ema=ema, **settings
    )


@pytest.mark.parametrize(("statistics", "compiled"), [("current", False), ("average", False), ("average", True)])
def test_s34_averages_are_those_of_swa_utils(statistics: Any, compiled: bool, way: str) -> None:
    """Bit for bit, through skipped steps, of which `AveragedModel` knows nothing."""
    made = recipe(ema=polyamp.Ema(0.9, statistics=statistics))
    model = network()
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=statistics == "average")
    state = polyamp.init(model, made)
    step = polyamp.train_step(loss_fn, made, compile={"backend": "eager"} if compiled else False)
    for seed, gain in enumerate((1.0, INF, 1.0, 1.0, INF, 1.0)):
        state, result = step(state, item(gain, seed))
        if not bool(result.skipped):
            theirs.update_parameters(model)
    averaged = polyamp.averaged_model(state)
    assert int(state.step) == 4
    for (name, one), other in zip(averaged.state_dict().items(), theirs.module.state_dict().values(), strict=True):
        if one.is_floating_point() or statistics == "current":  # torch leaves a counter as its first average found it
            assert torch.equal(one, other), name
    with polyamp.averaged(state) as inside:
        assert inside is model
        for one, other in zip(inside.state_dict().values(), averaged.state_dict().values(), strict=True):
            assert torch.equal(one, other)


def test_s34_trap_averages_by_hand_move_at_skipped_steps() -> None:
    """GradScaler skips, `update_parameters` does not know it, and the average goes on towards the parameter."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    state = polyamp.init(copy.deepcopy(model), recipe(ema=polyamp.Ema(0.5)))
    step = polyamp.train_step(lambda m, x: m(x).square().mean(), state.recipe)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=16.0), torch.optim.AdamW(model.parameters(), 0.05)
    moved = []
    for gain in (1.0, 1.0, INF):
        x = torch.full((4, 2), gain)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        before = averaged.module.weight.clone()
        averaged.update_parameters(model)
        moved.append(not torch.equal(before, averaged.module.weight))
        own = state.averages.model["weight"].clone()
        state, _ = step(state, x)
    assert moved[2], "torch's average moved although nothing was trained"
    assert torch.equal(own, state.averages.model["weight"])


@pytest.mark.parametrize("ema", [polyamp.Ema(0.9), polyamp.Ema(0.99, warmup=True, every=2, statistics="average")])
def test_s34_off_the_cpu_nothing_is_read(ema: polyamp.Ema, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_look(monkeypatch)
    made = recipe(ema=ema, policy="mixed_float16")
    state, step = polyamp.init(network(), made), polyamp.train_step(loss_fn, made)
    step(state, item(1.0, 0))
    with Reads() as reads:
        for seed, gain in enumerate((INF, 1.0, 1.0)):
            step(state, item(gain, seed))
    assert reads.count == 0


def test_s34_in_the_block_the_state_is_refused(tmp_path: Path) -> None:
    made = recipe()
    state, step = polyamp.init(network(), made), polyamp.train_step(loss_fn, made)
    state, _ = step(state, item(1.0, 0))
    polyamp.save(state, tmp_path / "state")
    half = polyamp.value_and_grad(loss_fn)
    value, gradients = half(state, item(1.0, 1))
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    with contextlib.suppress(ZeroDivisionError), polyamp.averaged(state):
        for call in (
            lambda: step(state, item(1.0, 1)),
            lambda: half(state, item(1.0, 1)),
            lambda: polyamp.apply_gradients(state, gradients),
            lambda: polyamp.save(state, tmp_path / "other"),
            lambda: polyamp.restore(state, tmp_path / "state"),
            lambda: polyamp.refresh(state),
            lambda: polyamp.averaged_model(state),
            lambda: polyamp.averaged(state).__enter__(),
        ):
            with pytest.raises(StateError, match=r"inside `with polyamp\.averaged\(state\)`"):
                call()
        raise ZeroDivisionError
    for name, value in state.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    state, result = step(state, item(1.0, 1))
    assert int(result.step) == 2


def test_s34_float64_and_complex_parameters() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).abs().square()

    for model, policy, dtype in (
        (nn.Linear(3, 1).double(), "float64", torch.float64),
        (Complex(), "float32", torch.complex64),
    ):
        made = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1), ema=polyamp.Ema(0.5))
        state, step = polyamp.init(model, made), polyamp.train_step(lambda m, x: m(x).mean(), made)
        x = np.ones((2, 3), "f8" if policy == "float64" else "f4")
        values = []
        for _ in range(3):
            state, _ = step(state, x)
            values.append(model.weight.detach().clone())
        (average,) = (value for name, value in state.averages.model.items() if name == "weight")
        assert average.dtype == dtype
        torch.testing.assert_close(average, 0.25 * values[0] + 0.25 * values[1] + 0.5 * values[2], rtol=1e-6, atol=1e-6)


def test_s34_a_model_that_cannot_be_copied() -> None:
    model = network()
    model.extra = torch.ones(2, requires_grad=True) * 2.0  # no leaf: torch refuses to copy it
    state = polyamp.init(model, recipe())
    with pytest.raises(UnsupportedError, match=r"cannot copy this .*Use `with polyamp\.averaged\(state\) as model:`"):
        polyamp.averaged_model(state)
    with polyamp.averaged(state) as inside:
        assert inside is model
