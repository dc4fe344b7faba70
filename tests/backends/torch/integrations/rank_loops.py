"""One training as libraries run it in each of two processes, and by hand; `test_adapter_ranks` compares them.

Every loop takes six windows of two micro-batches over the same data, clips and halves the rate by a schedule. In the
second window a gradient of rank 1 overflows, in the fourth one of rank 0. A loop returns its `Seen`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import polyamp
import polyamp_torch
from polyamp_torch.step.torch_only import buffers

INF = float("inf")
WINDOWS, CLIP = 6, 0.5
SCALER = polyamp.LossScaler(init_scale=16.0, growth_interval=2, on_stuck="ignore")
ALONE = ("one", "tensor")
"""One process without an engine, and two that divide one model: compared in float32, where sums may be divided."""


def policy_of(engine: str) -> polyamp.Policy:
    return polyamp.Policy("float32" if engine in ALONE else "mixed_float16")


Weights = np.ndarray[Any, Any]
"""Not tensors, whose memory would go with the process that made them."""


class Seen(NamedTuple):
    """What a loop left behind.

    Attributes:
        windows: after each window whether it was skipped, the scale, the rate, and how many forward passes count.
        weights: whole, after each window, as one vector.
        dtype: what the first layer computed in.
        kind: of the model's first parameter: "DTensor" where it is sharded.
        more: what a loop has beyond that.
    """

    windows: list[tuple[bool, float, float, int]]
    weights: list[Weights]
    dtype: torch.dtype
    kind: str
    more: dict[str, Any]


class Net(nn.Sequential):
    """Two layers, a batch norm, and a layer that nothing uses where there is `spare`."""

    def __init__(self, *, spare: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.unused = nn.Linear(2, 2) if spare else None
        self.dtype = torch.float64

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self[0](x)
        self.dtype = hidden.dtype
        return self[2](self[1](hidden))


def sharded(net: nn.Module, **options: Any) -> nn.Module:
    for part in (*[part for part in net.children() if isinstance(part, nn.Linear)], net):
        fully_shard(part, **options)
    return net


def batches(rank: int, engine: str) -> list[Any]:
    """This rank's half of every micro-batch, or all of it where there is one replica: inputs, and gains of which an
    infinite one overflows."""
    generator = torch.Generator().manual_seed(1)
    rows = slice(None) if engine in ALONE else slice(rank * 4, rank * 4 + 4)
    found = []
    for at in range(2 * WINDOWS):
        x, gain = torch.randn(8, 4, generator=generator), torch.ones(8, 1)
        gain[7 if at == 2 else 0] = INF if at in (2, 7) else 1.0
        found.append((x[rows], gain[rows]))
    return found


def loss_of(output: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return (output.float() * gain).pow(2).mean()


def optimizer_of(parameters: Any, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, 1e-2, fused=kind == "fused")


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def vector(net: nn.Module) -> Weights:
    return torch.cat([whole(p).flatten() for name, p in net.named_parameters() if "unused" not in name]).numpy()


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """A library's run that leaves nothing behind: Lightning and Accelerate write to the environment, and Accelerate
    keeps its settings for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


class Noted:
    """Collects what a loop returns."""

    def __init__(self, net: Any) -> None:
        self.net, self.windows, self.weights = net, [], []
        self.more: dict[str, Any] = {}

    def window(self, skipped: bool, scale: float, rate: float) -> None:
        self.windows.append((skipped, scale, round(rate, 9), int(self.net[1].num_batches_tracked)))
        self.weights.append(vector(self.net))

    def seen(self) -> Seen:
        return Seen(self.windows, self.weights, self.net.dtype, type(self.net[0].weight).__name__, self.more)


def by_hand(rank: int, engine: str, kind: str) -> Seen:
    """The loop that the libraries' are held to."""
    net = Net(spare=engine == "ddp")
    model: Any = net if engine == "one" else sharded(net) if engine == "fsdp2" else None
    if engine == "ddp":
        model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = optimizer_of(model.parameters(), kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler, noted, rows = polyamp_torch.GradScaler(SCALER), Noted(net), batches(rank, engine)
    for at in range(WINDOWS):
        before = buffers.snapshot(model)
        for last in (False, True):
            x, gain = rows[2 * at + last]
            if engine == "fsdp2":
                model.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if last or engine != "ddp" else model.no_sync():
                with polyamp_torch.autocast(policy_of(engine), "cpu"):
                    loss = loss_of(model(x), gain) / 2
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.step_was_skipped:
            buffers.commit_or_rollback(before, torch.tensor(False))
        else:
            scheduler.step()
        noted.window(scaler.step_was_skipped, scaler.get_scale(), scheduler.get_last_lr()[0])
    return noted.seen()


@fresh()
def lightning(
    rank: int, engine: str, kind: str, folder: str = "", *, plain: bool = False, mp_policy: Any = None
) -> Seen:
    """Lightning's Trainer, with an average of the weights under DDP; with a folder, resumed from half of the way.

    Args:
        rank: of this process.
        engine: "ddp", "fsdp2" or "tensor".
        kind: of optimizer.
        folder: for checkpoints, or "".
        plain: with Lightning's own plugin.
        mp_policy: of FSDP2's units; None for the one that follows from the policy.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision as Theirs
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from polyamp_torch.lightning import MixedPrecision

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(spare=engine == "ddp")
            self.noted = Noted(self.net)

        if engine == "tensor":

            def configure_model(self) -> None:
                plan = {
                    "0": ColwiseParallel(output_layouts=Replicate()),
                    "2": RowwiseParallel(input_layouts=Replicate()),
                }
                parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)

        if engine == "fsdp2":

            def configure_model(self) -> None:
                mesh = self.device_mesh["data_parallel"]
                if mp_policy is not None:
                    sharded(self.net, mesh=mesh, mp_policy=mp_policy)
                else:
                    polyamp_torch.fully_shard(self.net, policy_of(engine), mesh=mesh, modules=nn.Linear)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return loss_of(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.parameters(), kind)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if index % 2:
                plugin: Any = self.trainer.precision_plugin
                before = self.noted.windows[-1][1] if self.noted.windows else SCALER.init_scale
                scale = plugin.scaler.get_scale()
                skipped = scale < before if plain else plugin.step_was_skipped
                self.noted.window(skipped, scale, self.trainer.optimizers[0].param_groups[0]["lr"])

    class Averaged(pl.Callback):
        """Runs after the averaging, whose steps it notes."""

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index % 2 and engine == "ddp":
                averaging = next(each for each in trainer.callbacks if isinstance(each, EMAWeightAveraging))
                model = averaging._average_model
                assert model is not None
                module.noted.more.setdefault("averaged", []).append(int(model.n_averaged))

    def trained(rows: list[Any], epochs: int = 1, *, saved: str | None = None, checkpoint: str | None = None) -> Seen:
        plugin: Any = MixedPrecision(policy_of(engine), SCALER, device="cpu")
        if plain:
            plugin = Theirs("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2))
        strategy: Any = DDPStrategy(find_unused_parameters=True)
        if engine == "fsdp2":
            strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        elif engine == "tensor":
            strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
        callbacks: list[Any] = [EMAWeightAveraging(decay=0.5), Averaged()] if engine == "ddp" else []
        callbacks += [ModelCheckpoint(saved, "half")] if saved else []
        trainer = pl.Trainer(
            plugins=plugin, strategy=strategy, accelerator="cpu", devices=2, callbacks=callbacks, logger=False,
            max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=CLIP, use_distributed_sampler=False,
            enable_checkpointing=bool(saved), enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Module()
        loader = torch.utils.data.DataLoader(rows, batch_size=None)  # type: ignore[arg-type]  # a list of rows
        trainer.fit(module, loader, ckpt_path=checkpoint)
        assert "should_update" not in {name for each in trainer.callbacks for name in vars(each)}
        seen: Seen = module.noted.seen()
        return seen

    rows = batches(rank, engine)
    seen = trained(rows)
    if folder:
        trained(rows[:WINDOWS], saved=folder)
        seen.more["resumed"] = trained(rows[WINDOWS:], 2, checkpoint=str(Path(folder) / "half.ckpt"))
    return seen


@fresh()
def fabric(rank: int, engine: str, kind: str) -> Seen:
    """Fabric's loop."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    from polyamp_torch.lightning import FabricPrecision

    def sharded_over(net: Any, mesh: Any) -> Any:
        return polyamp_torch.fully_shard(net, policy_of(engine), mesh=mesh["data_parallel"], modules=nn.Linear)

    plugin = FabricPrecision(policy_of(engine), SCALER, device="cpu")
    strategy: Any = DDPStrategy(find_unused_parameters=True)
    if engine == "fsdp2":
        strategy = ModelParallelStrategy(sharded_over, data_parallel_size=2, tensor_parallel_size=1)
    made = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugin)
    made.launch()
    net = Net(spare=engine == "ddp")
    model = made.setup_module(net)
    optimizer = made.setup_optimizers(optimizer_of(model.parameters(), kind))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    noted, rows = Noted(net), batches(rank, engine)
    for at in range(WINDOWS):
        for last in (False, True):
            x, gain = rows[2 * at + last]
            with made.no_backward_sync(model, enabled=not last):
                made.backward(loss_of(model(x), gain) / 2)
        made.clip_gradients(model, optimizer, max_norm=CLIP, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        if not plugin.step_was_skipped:
            scheduler.step()
        assert plugin.scaler is not None
        noted.window(plugin.step_was_skipped, plugin.scaler.get_scale(), scheduler.get_last_lr()[0])
    return noted.seen()


def accelerated(rank: int, engine: str, kind: str, folder: str = "", *, plain: bool = False) -> Seen:
    """The loop of Accelerate's documentation; with a folder, saved after the third window and loaded by another.

    Args:
        rank: of this process.
        engine: "ddp" or "fsdp2".
        kind: of optimizer.
        folder: for the saved state, or "".
        plain: with `accelerate.Accelerator`.
    """
    import accelerate
    from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

    from polyamp_torch.accelerate import Accelerator

    def begun() -> tuple[Any, Any, Any, Any, Noted]:
        options: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": 2, "step_scheduler_with_optimizer": True}
        if engine == "fsdp2":
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
                fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="size_based_wrap",
                min_num_params=10,
            )  # fmt: skip
        else:
            options["kwargs_handlers"] = [DistributedDataParallelKwargs(find_unused_parameters=True)]
        options["dataloader_config"] = accelerate.DataLoaderConfiguration(split_batches=True)  # one tick a window
        make = (
            functools.partial(accelerate.Accelerator, mixed_precision="fp16")
            if plain
            else functools.partial(Accelerator, policy_of(engine), SCALER)
        )
        made = make(**options)
        net = Net(spare=engine == "ddp")
        optimizer = optimizer_of(net.parameters(), kind)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return made, *made.prepare(net, optimizer, scheduler), Noted(net)

    def run(begun: tuple[Any, Any, Any, Any, Noted], first: int, end: int) -> Seen:
        made, model, optimizer, scheduler, noted = begun
        for x, gain in batches(rank, engine)[2 * first : 2 * end]:
            with made.accumulate(model):
                made.backward(loss_of(model(x), gain))
                if made.sync_gradients:
                    norm = made.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if made.sync_gradients:
                scale = made.scaler.get_scale() if made.scaler is not None else 1.0
                noted.window(made.optimizer_step_was_skipped, scale, scheduler.get_last_lr()[0])
                noted.more.setdefault("norms", []).append(float(norm))
        noted.more["engine"] = str(made.distributed_type)
        return noted.seen()

    with fresh():
        begin = begun()
        seen = run(begin, 0, 3)
        if folder:
            begin[0].save_state(folder)
        run(begin, 3, WINDOWS)
    if folder:
        with fresh():
            other = begun()
            other[0].load_state(folder)
            seen.more["resumed"] = run(other, 3, WINDOWS)
    return seen
