"""The policy's settings hold in every part of a step: forward pass, loss and backward pass, in each way to make one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import polyamp


class Noted(torch.autograd.Function):
    """Notes torch's settings where it runs, forward and backward."""

    seen: list[tuple[str, str, bool]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        note(where)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        note(f"{ctx.where}, backward")
        return gradient.clone(), None


def note(where: str) -> None:
    Noted.seen.append((where, torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Noted.apply(self.layer(x), "checkpoint")  # type: ignore[no-untyped-call]  # torch's
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.part, x, use_reentrant=False)
        out: torch.Tensor = Noted.apply(hidden, "forward")
        return out


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = Noted.apply(model(x).float(), "loss").square().mean()  # type: ignore[no-untyped-call]  # torch's
    return loss


@pytest.mark.parametrize("around", ["highest", "medium"])
@pytest.mark.parametrize("way", ["step", "window", "halves"])
@pytest.mark.parametrize("spelled", ["float32", "mixed_bfloat16"])
def test_s03_the_policys_settings_hold_in_forward_loss_and_backward(spelled: str, way: str, around: str) -> None:
    policy = polyamp.Policy(spelled, float32_matmul="high")  # type: ignore[arg-type]  # a spelling
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1), accumulate_steps=2 if way == "window" else 1)
    state = polyamp.init(Net(), recipe)
    Noted.seen.clear()
    torch.set_float32_matmul_precision(around)
    run: Any = polyamp.value_and_grad(loss_fn) if way == "halves" else polyamp.train_step(loss_fn, recipe)
    try:
        with set_checkpoint_early_stop(False):
            run(state, torch.ones(4, 3))
        assert torch.get_float32_matmul_precision() == around
    finally:
        torch.set_float32_matmul_precision("highest")
    on = spelled != "float32"
    one = [
        ("checkpoint", "high", on), ("forward", "high", on), ("loss", "high", on), ("loss, backward", "high", False),
        ("forward, backward", "high", False), ("checkpoint, backward", "high", False), ("checkpoint", "high", on),
    ]  # fmt: skip
    assert Noted.seen == one * (2 if way == "window" else 1)
