"""timm: the loop of its train.py in small, float16 on the CPU, with its optimizers, schedule, average and scaler."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import create_model, model_parameters
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, NativeScaler

MODELS = ("test_vit", "test_resnet", "test_efficientnet")


class Training:
    """Model, optimizer, average and scaler of a run, with `step(times)`."""

    def __init__(self, name: str, optimizer: str = "adamw", clip_mode: str = "norm") -> None:
        torch.manual_seed(0)
        options = {"img_size": 32} if name == "test_vit" else {}
        self.model = create_model(name, num_classes=4, **options)
        self.optimizer = create_optimizer_v2(self.model, opt=optimizer, lr=2e-3, weight_decay=0.05)
        self.schedule = CosineLRScheduler(self.optimizer, t_initial=20, t_in_epochs=False)
        self.average = ModelEmaV3(self.model, decay=0.9)
        self.scaler = NativeScaler(device="cpu")
        self.autocast = functools.partial(torch.autocast, device_type="cpu", dtype=torch.float16)
        self.clip_mode = clip_mode
        self.count = 0
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(8, 3, 32, 32, generator=generator)
        self.y = torch.arange(8) % 4

    def step(self, times: int, accumulate: int = 1) -> list[float]:
        losses, loss_fn = [], LabelSmoothingCrossEntropy()
        for _ in range(times):
            for micro in range(accumulate):
                part = slice(micro, None, accumulate)
                with self.autocast():
                    loss = loss_fn(self.model(self.x[part]), self.y[part]) / accumulate
                clipped = model_parameters(self.model, exclude_head="agc" in self.clip_mode)
                last = micro == accumulate - 1
                self.scaler(loss, self.optimizer, 1.0, self.clip_mode, parameters=clipped, need_update=last)
            self.optimizer.zero_grad()
            self.count += 1
            self.average.update(self.model, step=self.count)
            self.schedule.step_update(self.count)
            losses.append(loss.item() * accumulate)
        return losses


@pytest.mark.parametrize("name", MODELS)
def test_loss_falls(name: str) -> None:
    losses = Training(name).step(20)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("optimizer", ["sgd", "lamb", "lion", "muon"])
def test_optimizers(optimizer: str) -> None:
    training = Training("test_vit", optimizer)
    losses = training.step(12)
    assert all(torch.isfinite(parameter).all() for parameter in training.model.parameters())
    assert min(losses) < losses[0]


@pytest.mark.parametrize("clip_mode", ["norm", "value", "agc"])
def test_clip_modes(clip_mode: str) -> None:
    losses = Training("test_vit", clip_mode=clip_mode).step(12)
    assert losses[-1] < losses[0]


def test_accumulation() -> None:
    losses = Training("test_vit").step(12, accumulate=2)
    assert losses[-1] < losses[0]


def test_overflow_leaves_the_model() -> None:
    training = Training("test_vit")
    training.step(2)
    before: Any = {name: value.clone() for name, value in training.model.state_dict().items()}
    scale = training.scaler.state_dict()["scale"]
    training.x[0, 0, 0, 0] = float("inf")
    training.step(1)
    assert training.scaler.state_dict()["scale"] == scale / 2
    assert all(torch.equal(value, before[name]) for name, value in training.model.state_dict().items())


def test_resume(tmp_path: Path) -> None:
    whole = Training("test_vit")
    expected = whole.step(8)[4:]
    first = Training("test_vit")
    first.step(4)
    parts = {"model": first.model, "optimizer": first.optimizer, "scaler": first.scaler, "schedule": first.schedule}
    torch.save({name: part.state_dict() for name, part in parts.items()}, tmp_path / "last.pth.tar")
    second = Training("test_vit")
    saved = torch.load(tmp_path / "last.pth.tar", weights_only=True)
    for name in ("model", "optimizer", "scaler", "schedule"):
        getattr(second, name).load_state_dict(saved[name])
    second.count = 4
    assert second.step(4) == expected
