"""One small training as Lightning, Fabric and Accelerate run it with `monitor=`; `test_monitors` compares the records
with those of `train_step`, and `test_adapter_ranks` those of two processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import lightning.pytorch as pl
import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricShards
from lightning.pytorch.strategies import ModelParallelStrategy as LightningShards
from torch import nn
from torch.distributed.fsdp import fully_shard

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

    def configure_model(self) -> None:
        mesh = self.device_mesh  # of a ModelParallelStrategy
        if mesh is not None:
            for part in (self.first, self.head):
                fully_shard(part, mesh=mesh["data_parallel"])
            fully_shard(self, mesh=mesh["data_parallel"])

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
    model = made.setup_module(Net())
    optimizer = made.setup_optimizers(make(model.parameters()))
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
    made = Accelerator(policy, scaler, cpu=True, monitor=monitor, gradient_accumulation_steps=accumulate, **several)
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


RANK_LOOPS: Final = [
    *[(library, engine, "mixed_float16") for library in LOOPS for engine in ("ddp", "fsdp2")],
    ("fabric", "fsdp2", "mixed_bfloat16"),
]
"""Library, engine and policy of each training in two processes."""


def bad_batch(policy: str) -> int | None:
    """Return which batch overflows: none where nothing is skipped."""
    return 2 if policy == "mixed_float16" else None


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


def sharded_over(net: Any, mesh: Any) -> Any:
    for part in (net.first, net.head, net):
        fully_shard(part, mesh=mesh["data_parallel"])
    return net


def options_of(library: str, engine: str) -> dict[str, Any]:
    """What a library is given to train in two processes."""
    if library == "accelerate":
        return {} if engine == "ddp" else {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    if engine == "fsdp2":
        made: Any = LightningShards if library == "lightning" else functools.partial(FabricShards, sharded_over)
        options["strategy"] = made(data_parallel_size=2, tensor_parallel_size=1)
    if library == "lightning":
        options["use_distributed_sampler"] = False
    return options


def monitored_ranks(rank: int) -> dict[tuple[str, str, str], list[MonitorRecord]]:
    """Records of every library, engine and policy in one of two processes, each of which has half of each batch."""
    from tests.backends.torch.integrations.rank_loops import fresh

    found = {}
    for library, engine, policy in RANK_LOOPS:
        data = [(x[rank * 4 :][:4], y[rank * 4 :][:4]) for x, y in batches(bad=bad_batch(policy))]
        monitor = polyamp.Monitor(every=1, weights=True)
        with fresh():
            LOOPS[library](policy, monitor, data, sgd, **options_of(library, engine))
            found[library, engine, policy] = monitor.records  # the last go to Accelerate's trackers now
    return found
