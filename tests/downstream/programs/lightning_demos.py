"""lightning: the demos that the package ships, by `Trainer` and `Fabric`, in bfloat16 and float16 on the CPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.demos import boring_classes as demos
from lightning.pytorch.demos.transformer import LightningTransformer
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader


class LossCallback(pl.Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def trainer(folder: Path, precision: str, **options: Any) -> pl.Trainer:
    pl.seed_everything(0, verbose=False)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options = {
        "max_epochs": 2,
        "limit_train_batches": 8,
        "limit_val_batches": 2,
        "accelerator": "cpu",
        **quiet,
        **options,
    }
    if precision == "16-mixed":  # by its name the Trainer turns it into bfloat16 on the CPU
        return pl.Trainer(default_root_dir=folder, plugins=MixedPrecision("16-mixed", "cpu"), **options)
    return pl.Trainer(default_root_dir=folder, precision=precision, **options)


PRECISIONS = pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])


@PRECISIONS
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BoringModel", {}),
        ("BoringModel", {"gradient_clip_val": 0.5}),
        ("BoringModel", {"accumulate_grad_batches": 2}),
        ("ManualOptimBoringModel", {}),  # the Trainer neither clips nor accumulates for manual optimization
    ],
    ids=["plain", "clipping", "accumulation", "manual"],
)
def test_demo_trains(name: str, precision: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, kept = getattr(demos, name)(), LossCallback()
    run = trainer(tmp_path, precision, callbacks=[kept], **options)
    run.fit(model)
    assert run.global_step == (8 if "accumulate_grad_batches" in options else 16)
    assert len(kept.losses) == 16
    assert all(math.isfinite(loss) for loss in kept.losses)  # the demo's loss is arbitrary, and may rise
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@PRECISIONS
def test_fit_validate_test_predict(precision: str, tmp_path: Path) -> None:
    model, module = demos.BoringModel(), demos.BoringDataModule()
    run = trainer(tmp_path, precision, limit_test_batches=2, limit_predict_batches=2)
    run.fit(model, module)
    assert run.validate(model, module, verbose=False)
    assert run.test(model, module, verbose=False)
    assert len(run.predict(model, module) or []) == 2


@PRECISIONS
def test_transformer(precision: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (16, 9), generator=generator)
    loader = DataLoader([(row[:-1], row[1:]) for row in tokens], batch_size=8)
    model, kept = LightningTransformer(vocab_size=50), LossCallback()
    model.prepare_data = lambda: None  # type: ignore[method-assign]  # it would download WikiText
    trainer(tmp_path, precision, max_epochs=8, callbacks=[kept]).fit(model, loader)
    assert kept.losses[-1] < kept.losses[0]


@PRECISIONS
def test_resume(precision: str, tmp_path: Path) -> None:
    whole, kept = demos.BoringModel(), LossCallback()
    trainer(tmp_path, precision, callbacks=[kept]).fit(whole)
    first = demos.BoringModel()
    run = trainer(tmp_path, precision, max_epochs=1)
    run.fit(first)
    run.save_checkpoint(tmp_path / "last.ckpt")
    second, resumed = demos.BoringModel(), LossCallback()
    run = trainer(tmp_path, precision, callbacks=[resumed])
    run.fit(second, ckpt_path=tmp_path / "last.ckpt")
    assert run.global_step == 16
    assert len(resumed.losses) == 8


def test_overflow_leaves_the_model(tmp_path: Path) -> None:
    class Overflow(demos.BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            step: Any = super().training_step(batch, batch_idx)
            return {"loss": step["loss"] * float("inf")}

    pl.seed_everything(0, verbose=False)
    model = Overflow()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer(tmp_path, "16-mixed", max_epochs=1, limit_train_batches=2).fit(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_fabric() -> None:
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    fabric.seed_everything(0, verbose=False)
    network = demos.Net()
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), 0.1))
    x, y, losses = torch.randn(8, 1, 28, 28), torch.arange(8), []
    model.eval()
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.nll_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
