"""One small training as Lightning, Fabric and Accelerate run it with `monitor=`; `test_monitors` compares the records
with those of `train_step`, and `test_adapter_ranks` those of two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

import polyamp
from polyamp.monitor.records import MonitorRecord
from polyamp_torch.accelerate import Accelerator
from polyamp_torch.lightning import FabricPrecision, MixedPrecision

SCALER: Final = polyamp.LossScaler(init_scale=2.0**10, growth_interval=4)
CLIP: Final = 0.05
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.first(x)))


class Module(pl.LightningModule):
    """The same layers, trained by Lightning."""

    def __init__(self, make: Callable[[Any], Any], *, manual: bool = False) -> None:
        super().__init__()
        net = Net()
        self.first, self.head, self.make = net.first, net.head, make
        self.automatic_optimization = not manual

    def training_step(self, batch: Batch, index: int) -> Any:
        loss = loss_fn(lambda x: self.head(torch.tanh(self.first(x))), batch)
        if self.automatic_optimization:
            return loss
        optimizers: Any = self.optimizers()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return self.make(self.parameters())
        return [self.make(part.parameters()) for part in (self.first, self.head)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, fused=True)


def loss_fn(model: Any, batch: Batch) -> torch.Tensor:
    return ((model(batch[0]).float() - batch[1]) ** 2).mean()


def batches(rows: int = 8, *, bad: int | None = 2) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    found = [(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(6)]
    if bad is not None:
        found[bad] = (found[bad][0] * float("inf"), found[bad][1])
    return [(x[at : at + rows], y[at : at + rows]) for x, y in found for at in range(0, 8, rows)]


def loader(data: list[Batch]) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset


def expected(policy: str, *, bad: int | None = 2) -> list[MonitorRecord]:
    """Records of `train_step`."""
    scaler = SCALER if policy == "mixed_float16" else None
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1), scaler=scaler, clip_norm=CLIP)
    monitor = polyamp.Monitor(every=1, weights=True)
    state, step = polyamp.init(Net(), recipe), polyamp.train_step(loss_fn, recipe, monitor=monitor)
    for batch in batches(bad=bad):
        state, _ = step(state, batch)
    return monitor.records


def lightning(
    policy: str, monitor: polyamp.Monitor, data: list[Batch], make: Any, accumulate: int = 1, **several: Any
) -> None:
    scaler = SCALER if policy == "mixed_float16" else None
    trainer(
        MixedPrecision(policy, scaler, device="cpu", monitor=monitor), accumulate_grad_batches=accumulate, **several
    ).fit(Module(make), loader(data))


def trainer(plugin: Any, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "max_epochs": 1, "gradient_clip_val": CLIP,
    }  # fmt: skip
    return pl.Trainer(plugins=plugin, **(settings | options))


def fabric(
    policy: str, monitor: polyamp.Monitor, data: list[Batch], make: Any, accumulate: int = 1, **several: Any
) -> None:
    scaler = SCALER if policy == "mixed_float16" else None
    plugin = FabricPrecision(policy, scaler, device="cpu", monitor=monitor)
    made = Fabric(accelerator="cpu", plugins=plugin, **several)
    if several:
        made.launch()
    net = Net()
    model, optimizer = made.setup(net, make(net.parameters()))
    for number, batch in enumerate(data, 1):
        made.backward(loss_fn(model, batch) / accumulate)
        if number % accumulate == 0:
            made.clip_gradients(model, optimizer, max_norm=CLIP, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()


def accelerated(
    policy: str, monitor: polyamp.Monitor, data: list[Batch], make: Any, accumulate: int = 1, **several: Any
) -> None:
    scaler = SCALER if policy == "mixed_float16" else None
    made = Accelerator(policy, scaler, cpu=True, monitor=monitor, gradient_accumulation_steps=accumulate)
    net = Net()
    model, optimizer = made.prepare(net, make(net.parameters()))
    for batch in data:
        with made.accumulate(model):
            made.backward(loss_fn(model, batch))
            if made.sync_gradients:
                made.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


LOOPS: Final[dict[str, Callable[..., None]]] = {"lightning": lightning, "fabric": fabric, "accelerate": accelerated}


def assert_alike(records: list[MonitorRecord], wanted: list[MonitorRecord]) -> None:
    assert len(records) == len(wanted)
    for one, other in zip(records, wanted, strict=True):
        for name in ("call", "step", "scale", "next_scale", "skipped", "skips", "word"):
            assert getattr(one, name) == getattr(other, name), name
        if one.skipped:
            assert one.grad_norm != one.grad_norm
            continue
        assert one.loss == pytest.approx(other.loss, rel=5e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-2)
        assert [each.module for each in one.modules] == [each.module for each in other.modules] == ["first", "head"]
        for own, theirs in zip(one.modules, other.modules, strict=True):
            assert own.gradients is not None
            assert theirs.gradients is not None
            assert own.gradients.elements == theirs.gradients.elements
            assert own.gradients.norm == pytest.approx(theirs.gradients.norm, rel=2e-2)
            assert own.weights is not None
            assert theirs.weights is not None
            assert own.weights.norm == pytest.approx(theirs.weights.norm, rel=1e-3)
            assert own.update_ratio == pytest.approx(theirs.update_ratio, rel=2e-2)


def monitored_ranks(rank: int) -> dict[str, list[MonitorRecord]]:
    """Records of every library in one of two processes, each of which has half of each batch."""
    from tests.backends.torch.integrations.rank_loops import fresh

    data = [(x[rank * 4 :][:4], y[rank * 4 :][:4]) for x, y in batches()]
    found = {}
    for library, loop in LOOPS.items():
        options = {} if library == "accelerate" else {"strategy": "ddp", "devices": 2}
        if library == "lightning":
            options["use_distributed_sampler"] = False
        monitor = polyamp.Monitor(every=1, weights=True)
        with fresh():
            loop("mixed_float16", monitor, data, sgd, **options)
        found[library] = monitor.records
    return found
