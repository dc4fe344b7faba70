"""Training on a device that is not the CPU, simulated: the numbers of the CPU, and no number read by the host (S9)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
import polyamp_torch
from polyamp import losses
from tests.simulated_device import device

LIBRARIES = device.register()
X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3] * 2)
HOST = {"x": X, "y": Y}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)
    )


def loss_fn(model: Any, batch: dict[str, Any]) -> Any:
    return losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def on_device() -> dict[str, torch.Tensor]:
    return {name: device.to_device(value) for name, value in HOST.items()}


def recipe(policy: str, **options: Any) -> polyamp.Recipe:
    return polyamp.Recipe(policy=policy, optimizer=polyamp.adamw(1e-2), clip_norm=1.0, **options)


def numbers(model: nn.Module) -> list[torch.Tensor]:
    return [device.to_host(value) for value in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_s09_a_step_has_the_cpus_numbers_and_reads_none(policy: str, accumulate_steps: int) -> None:
    chosen = recipe(policy, accumulate_steps=accumulate_steps)
    here, there = network(), device.to_device(network())
    host, state = polyamp.init(here, chosen), polyamp.init(there, chosen)
    step, host_step = polyamp.train_step(loss_fn, chosen), polyamp.train_step(loss_fn, chosen)
    batch = on_device()
    device.PRODUCT_DTYPES.clear()
    for number in range(3):
        device.READS.clear()
        state, result = step(state, batch)
        reads = list(device.READS)
        host, wanted = host_step(host, HOST)
        assert bool(reads) is (number == 0), "the first step alone: it looks whether the model writes to its parameters"
        torch.testing.assert_close(device.to_host(result.loss), wanted.loss, rtol=2e-2, atol=0)
    narrow = {"mixed_bfloat16": {torch.bfloat16}, "mixed_float16": {torch.float16}}
    assert narrow.get(policy, set()) == device.PRODUCT_DTYPES
    tolerance = 1e-6 if policy == "float32" else 2e-3
    torch.testing.assert_close(numbers(there), numbers(here), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_s27_a_late_group_has_the_cpus_numbers_and_reads_none(name: str) -> None:
    """Before, at and after its start."""
    made: Any = {"adamw": polyamp.adamw, "lion": polyamp.lion}[name]
    optimizer = made(1e-2, groups=[polyamp.Group("0", trainable_after=3, clip_norm=0.01)])
    chosen = polyamp.Recipe(optimizer=optimizer, clip_norm=1.0, scaler=polyamp.LossScaler(init_scale=8.0))
    here, there = network(), device.to_device(network())
    host, state = polyamp.init(here, chosen), polyamp.init(there, chosen)
    step, host_step = polyamp.train_step(loss_fn, chosen), polyamp.train_step(loss_fn, chosen)
    before, batch = numbers(there)[0].clone(), on_device()
    for number in range(6):
        device.READS.clear()
        state, result = step(state, batch)
        reads = list(device.READS)
        host, wanted = host_step(host, HOST)
        assert bool(reads) is (number == 0)
        torch.testing.assert_close(device.to_host(result.grad_norm), wanted.grad_norm, rtol=1e-5, atol=0)
        assert torch.equal(numbers(there)[0], before) is (number < 3)
    torch.testing.assert_close(numbers(there), numbers(here), rtol=1e-5, atol=1e-6)


def test_s12_an_update_that_overflows_is_skipped_on_the_device() -> None:
    chosen = recipe("mixed_float16")
    model = device.to_device(network())
    state, step = polyamp.init(model, chosen), polyamp.train_step(loss_fn, chosen)
    state, _ = step(state, on_device())
    before = [value.clone() for value in numbers(model)]
    batch = on_device() | {"x": device.to_device(X * 1e5)}
    device.READS.clear()
    state, result = step(state, batch)
    assert device.READS == []
    assert bool(device.to_host(result.skipped))
    torch.testing.assert_close(numbers(model), before, rtol=0, atol=0)


def test_batches_of_the_host_are_sent_to_the_device() -> None:
    chosen = recipe("mixed_bfloat16")
    model = device.to_device(network())
    state, step = polyamp.init(model, chosen), polyamp.train_step(loss_fn, chosen)
    for batch in (HOST, {name: np.asarray(value) for name, value in HOST.items()}):
        state, result = step(state, batch)
        assert result.loss.device.type == device.NAME


def test_s17_a_loop_of_ones_own_with_the_grad_scaler() -> None:
    model, twin = device.to_device(network()), network()
    scaler, plain = polyamp_torch.GradScaler(device.NAME), polyamp_torch.GradScaler("cpu")
    for net, used, batch in ((model, scaler, on_device()), (twin, plain, HOST)):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            used.scale(loss_fn(net, batch)).backward()
            used.unscale_(optimizer)
            used.step(optimizer)
            used.update()
    torch.testing.assert_close(numbers(model), numbers(twin), rtol=1e-6, atol=1e-6)


def test_s22_a_state_is_saved_there_and_restored_here(tmp_path: Path) -> None:
    chosen = recipe("mixed_bfloat16")
    model, twin = device.to_device(network()), network()
    state, step = polyamp.init(model, chosen), polyamp.train_step(loss_fn, chosen)
    state, _ = step(state, on_device())
    polyamp.save(state, tmp_path / "state")
    polyamp.restore(polyamp.init(twin, chosen), tmp_path / "state")
    torch.testing.assert_close(numbers(twin), numbers(model), rtol=0, atol=0)
    there = device.to_device(network())
    polyamp.restore(polyamp.init(there, chosen), tmp_path / "state")
    torch.testing.assert_close(numbers(there), numbers(model), rtol=0, atol=0)


def test_s31_compare_tells_the_device_and_finds_the_fault() -> None:
    chosen, there = recipe("mixed_bfloat16"), device.to_device(network())
    batch = {name: np.asarray(value) for name, value in HOST.items()}
    report = polyamp.compare(network(), there, batch, loss_fn, chosen, 2)
    assert report.agrees, str(report)
    assert "torch 2" in str(report)
    assert str(report).count(f"on {device.NAME}:0") == 1
    assert str(report).count("on cpu") == 1
    there[2].eps = 1e-2
    report = polyamp.compare(network(), there, batch, loss_fn, chosen)
    assert (report.first.module, report.first.kind) == ("2", "epsilon")


def test_a_model_is_moved_to_the_device_and_back() -> None:
    source, there, back = network(), device.to_device(network()), network()
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    polyamp.port(source, there)
    polyamp.port(there, back)
    for model in (there, back):
        torch.testing.assert_close(numbers(model), numbers(source), rtol=0, atol=0)


def test_the_islands_are_the_mode_where_the_device_has_the_key() -> None:
    model = polyamp.Policy("mixed_bfloat16").autocast(device.to_device(network()))
    assert "float32_islands='mode'" in repr(model)
    output = copy.copy(model)(device.to_device(X))
    assert output.dtype == torch.float32, "the policy's output"


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_s08_the_loss_of_a_batch_without_any_label_is_0(accumulate_steps: int) -> None:
    """The host doesn't know the weight; the mean over no label is NaN, and the step skips."""

    def ignoring_loss(model: Any, batch: dict[str, Any]) -> Any:
        return losses.softmax_cross_entropy(model(batch["x"]), batch["y"], ignore_index=3)

    chosen = recipe("float32", accumulate_steps=accumulate_steps)
    model = device.to_device(network())
    state, step = polyamp.init(model, chosen), polyamp.train_step(ignoring_loss, chosen)
    state, _ = step(state, on_device())
    before, batch = [value.clone() for value in numbers(model)[:2]], on_device()
    batch["y"] = device.to_device(torch.full((8,), 3))
    device.READS.clear()
    state, result = step(state, batch)
    assert device.READS == []
    assert (float(device.to_host(result.loss)), float(device.to_host(result.weight))) == (0.0, 0.0)
    assert bool(device.to_host(result.skipped))
    torch.testing.assert_close(numbers(model)[:2], before, rtol=0, atol=0)
    loss, _ = polyamp.value_and_grad(ignoring_loss)(state, batch)
    assert float(device.to_host(loss)) == 0.0


def test_s35_a_monitor_reads_no_number_until_it_is_read() -> None:
    chosen = recipe("mixed_float16")
    monitor = polyamp.Monitor(every=2, weights=True)
    state, host_monitor = polyamp.init(device.to_device(network()), chosen), polyamp.Monitor(every=2, weights=True)
    host = polyamp.init(network(), chosen)
    step = polyamp.train_step(loss_fn, chosen, monitor=monitor)
    host_step = polyamp.train_step(loss_fn, chosen, monitor=host_monitor)
    batch = on_device()
    for number in range(2):
        device.READS.clear()
        state, _ = step(state, batch)
        host, _ = host_step(host, HOST)
        assert bool(device.READS) is (number == 0)
    (found,), (wanted,) = monitor.records, host_monitor.records
    assert [each.module for each in found.modules] == [each.module for each in wanted.modules]
    for own, expected in zip(found.modules, wanted.modules, strict=True):
        assert own.weights is not None
        assert expected.weights is not None
        assert own.weights.exponents == expected.weights.exponents
        assert own.update_ratio == pytest.approx(expected.update_ratio, rel=2e-2)
