"""`GradScaler.watch(model, monitor)`: the records of a loop of one's own are those of `train_step` (S35)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import polyamp
import polyamp_torch
from polyamp.errors import UnsupportedError
from polyamp.monitor.records import MonitorRecord
from tests import ranks

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


def own_loop(
    *, unscale: bool, wrap: Callable[[Any], Any] = lambda model: model, rank: int | None = None, **options: Any
) -> list[MonitorRecord]:
    """Records of a loop; those of a rank of two have half of the rows of each batch."""
    model, monitor = wrap(network()), polyamp.Monitor(every=1, weights=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, **options)
    scaler = polyamp_torch.GradScaler(SCALER).watch(model, monitor)
    for batch in batches():
        if rank is not None:
            batch = tuple(part[4 * rank :][:4] for part in batch)
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


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model[0])  # type: ignore[index]  # a Sequential
    return fully_shard(model)  # type: ignore[return-value]  # torch has a mixin here


def shards(rank: int) -> tuple[dict[bool, list[MonitorRecord]], list[str]]:
    """Records under `fully_shard` with and without `unscale_`, and what is said of flat parameters of FSDP1."""
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: FSDP1 is deprecated
        for original in (False, True):
            flat = FullyShardedDataParallel(nn.Linear(6, 8), use_orig_params=original, device_id=torch.device("cpu"))
            with pytest.raises(UnsupportedError) as error:
                polyamp_torch.GradScaler(SCALER).watch(flat, polyamp.Monitor())
            said.append(str(error.value))
    return {unscale: own_loop(unscale=unscale, wrap=sharded, rank=rank) for unscale in (False, True)}, said


def test_s35_shards_have_the_figures_of_one_process_and_flat_parameters_are_refused() -> None:
    """The loss is each rank's own (its rows'), whose mean is that of all rows."""
    alone = own_loop(unscale=False)
    found = ranks.run(shards, 2, timeout=240.0)
    for unscale in (False, True):
        pairs = zip(*[records[unscale] for records, _ in found], alone, strict=True)
        for first, second, one in pairs:
            assert first.skipped is second.skipped is one.skipped
            if one.skipped:
                continue
            assert (first.loss + second.loss) / 2 == pytest.approx(one.loss, rel=1e-2)
            for record in (first, second):
                assert (record.call, record.step, record.scale, record.next_scale, record.skips, record.word) == (
                    one.call, one.step, one.scale, one.next_scale, one.skips, one.word
                )  # fmt: skip
                assert record.grad_norm == pytest.approx(one.grad_norm, rel=1e-2)
                assert [each.module for each in record.modules] == ["0", "2"]
                for own, wanted in zip(record.modules, one.modules, strict=True):
                    for kind in ("gradients", "weights"):
                        assert getattr(own, kind).elements == getattr(wanted, kind).elements
                        assert getattr(own, kind).norm == pytest.approx(getattr(wanted, kind).norm, rel=2e-2)
                    assert own.update_ratio == pytest.approx(wanted.update_ratio, rel=2e-2)
    for _, said in found:
        assert len(said) == 2
        for message in said:
            assert "Received: FullyShardedDataParallel (FSDP1)" in message
            assert "Use torch's fully_shard (FSDP2), or leave out the monitor." in message
