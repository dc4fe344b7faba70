"""`GradScaler.watch(model, monitor)`: the records of a loop of one's own are those of `train_step` (S35)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
import polyamp_torch
from polyamp.monitor.records import MonitorRecord

SCALER = polyamp.LossScaler(init_scale=2.0**10, growth_interval=4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = [(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(6)]
    found[2] = (found[2][0] * float("inf"), found[2][1])
    return found


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return ((model(batch[0]).float() - batch[1]) ** 2).mean()


def own_loop(*, unscale: bool, **options: Any) -> list[MonitorRecord]:
    model, monitor = network(), polyamp.Monitor(every=1, weights=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, **options)
    scaler = polyamp_torch.GradScaler(SCALER).watch(model, monitor)
    for batch in batches():
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(model, batch)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return monitor.records


@pytest.mark.parametrize(("unscale", "options"), [(False, {}), (True, {}), (False, {"fused": True})])
def test_s35_the_records_are_those_of_train_step(unscale: bool, options: dict[str, Any]) -> None:
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1), scaler=SCALER)
    monitor = polyamp.Monitor(every=1, weights=True)
    state, step = polyamp.init(network(), recipe), polyamp.train_step(loss_fn, recipe, monitor=monitor)
    for batch in batches():
        state, _ = step(state, batch)
    records = own_loop(unscale=unscale, **options)
    assert [record.skipped for record in records] == [False, False, True, False, False, False]
    for one, other in zip(records, monitor.records, strict=True):
        assert (one.call, one.step, one.scale, one.next_scale) == (
            other.call,
            other.step,
            other.scale,
            other.next_scale,
        )
        assert (one.skips, one.word) == (other.skips, other.word)
        if one.skipped:
            continue
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=2e-3)
        assert [each.module for each in one.modules] == [each.module for each in other.modules] == ["0", "2"]
        for own, wanted in zip(one.modules, other.modules, strict=True):
            assert own.gradients is not None
            assert wanted.gradients is not None
            assert own.gradients.norm == pytest.approx(wanted.gradients.norm, rel=5e-3)
            assert own.gradients.first_exponent == pytest.approx(wanted.gradients.first_exponent, abs=3)
            assert own.update_ratio == pytest.approx(wanted.update_ratio, rel=5e-3)


def test_s35_gradients_are_those_before_a_clip_and_the_losses_are_summed() -> None:
    """Two micro-batches of half the loss each, clipped."""
    records = []
    for parts in (1, 2):
        model, monitor = network(), polyamp.Monitor(every=1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = polyamp_torch.GradScaler(SCALER).watch(model, monitor, "float32")
        x, y = batches()[0]
        for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            scaler.scale(loss_fn(model, part) / parts).backward()
        if parts == 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        records += monitor.records
    whole, clipped = records
    assert clipped.loss == pytest.approx(whole.loss, rel=1e-5)
    assert clipped.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    for one, other in zip(clipped.modules, whole.modules, strict=True):
        assert one.gradients is not None
        assert other.gradients is not None
        assert one.gradients.norm == pytest.approx(other.gradients.norm, rel=1e-5)
        assert one.update_ratio is not None
        assert other.update_ratio is not None
        assert one.update_ratio < 0.01 * other.update_ratio


def test_s35_an_iteration_of_two_optimizers_is_one_record() -> None:
    model, monitor = network(), polyamp.Monitor(every=2)
    optimizers = [torch.optim.SGD(model[index].parameters(), 0.1) for index in (0, 2)]  # type: ignore[index]  # a Sequential
    scaler = polyamp_torch.GradScaler(SCALER).watch(model, monitor, "mixed_float16")
    for batch in batches()[3:] * 2:
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(model, batch)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    assert [(record.call, record.step, len(record.modules)) for record in monitor.records] == [
        (2, 2, 2),
        (4, 4, 2),
        (6, 6, 2),
    ]


def test_s35_a_copy_of_a_scaler_tells_no_monitor() -> None:
    model, monitor = network(), polyamp.Monitor(every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = polyamp_torch.GradScaler(SCALER).watch(model, monitor, "float32")
    for each in (scaler, copy.deepcopy(scaler)):
        each.scale(loss_fn(model, batches()[0])).backward()
        each.step(optimizer)
        each.update()
        optimizer.zero_grad()
    assert [record.call for record in monitor.records] == [1]
