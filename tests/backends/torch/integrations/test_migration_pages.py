"""The pages for those who come from another torch library: both sides of each diff train to the same weights.

Apex and DeepSpeed are not installed: small modules of their names do the documented arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from tests.page_diffs import run_side

# Lightning 2.6 asks torch's pytree in a way that torch 2.13 deprecates, and advises more workers for loaders.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning"),
]


def furthest(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of two models' weights."""
    others = list(other.parameters())
    pairs = zip(one.parameters(), others, strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def sides(page: str, **names: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The names of the script before, and of the one after."""
    before = run_side(page, "-", dict(names))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return before, run_side(page, "+", dict(names))


def test_from_accelerate() -> None:
    before, after = sides("from_accelerate")
    assert int(after["state"].step) == 4
    models = [before["trained"], before["accelerator"].unwrap_model(before["model"]), after["trained"]]
    assert [furthest(model, after["state"].model) < 1e-6 for model in models] == [True] * 3
    assert type(after["accelerator"]).__module__.startswith("polyamp_torch")


def test_from_lightning() -> None:
    before, after = sides("from_lightning")
    assert int(after["state"].step) == 4
    assert after["trainer"].precision == "bf16-mixed"
    for model in (before["module"].net, after["module"].net):
        assert furthest(model, after["net"]) < 1e-6
    assert furthest(before["net"], before["Classifier"]().net) > 1e-2


class DocumentedAmp:
    """`apex.amp` as its page documents it: O1 is autocast, O2 a float16 model with BatchNorm and masters in float32.

    The loss times 65536, gradients divided by it. Nothing overflows in these tests.
    """

    scale = 2.0**16

    def __init__(self) -> None:
        self.masters: list[tuple[torch.Tensor, torch.Tensor]] = []

    def initialize(self, model: Any, optimizer: Any, opt_level: str) -> tuple[Any, Any]:
        self.cast = opt_level == "O2"
        if self.cast:
            groups = [group["params"] for group in optimizer.param_groups]
            whole = [[p.detach().clone() for p in group] for group in groups]
            for module in model.modules():
                if not isinstance(module, nn.BatchNorm1d):
                    module._apply(torch.Tensor.half, recurse=False)
            for group, params, copies in zip(optimizer.param_groups, groups, whole, strict=True):
                self.masters += zip(copies, params, strict=True)
                group["params"] = copies
        forward = model.forward

        def patched(x: torch.Tensor) -> torch.Tensor:
            if self.cast:
                return forward(x.half()).float()
            with torch.autocast("cpu", torch.float16):
                return forward(x).float()

        model.forward = patched
        step = optimizer.step

        def step_and_copy() -> None:
            step()
            for master, param in self.masters:
                param.data.copy_(master)

        optimizer.step = step_and_copy
        return model, optimizer

    @contextmanager
    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
        yield loss * self.scale
        for master, param in self.masters or [(p, p) for p in self.master_params(optimizer)]:
            master.grad = param.grad.float() / self.scale
            if master is not param:
                param.grad = None

    def master_params(self, optimizer: Any) -> list[torch.Tensor]:
        return [param for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_from_apex(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    amp = DocumentedAmp()
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace(amp=amp))
    before, after = (run_side("from_apex", sign, replace={'"O1"': f'"{level}"'}) for sign in "-+")
    masters = nn.ParameterList([master for master, _ in amp.masters]) or before["model"]
    assert furthest(masters, after["state"].model) < 1e-6
    assert before["model"][0].weight.dtype == (torch.float16 if level == "O2" else torch.float32)
    assert (int(after["state"].step), float(after["result"].scale)) == (4, 65536.0)


class DocumentedEngine:
    """DeepSpeed's engine with its float16 optimizer: AdamW and the clip on float32 copies, a float16 model."""

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        self.masters = [p.detach().clone() for p in model.parameters()]
        self.model, self.config = model.half(), config
        self.scale, self.micro_steps = 2.0 ** config["fp16"]["initial_scale_power"], 0
        self.optimizer = torch.optim.AdamW(self.masters, **config["optimizer"]["params"])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.config["gradient_accumulation_steps"] * self.scale).backward()
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            grad = param.grad.float() / self.scale
            master.grad = grad if master.grad is None else master.grad + grad
            param.grad = None

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.config["gradient_accumulation_steps"]:
            return
        nn.utils.clip_grad_norm_(self.masters, self.config["gradient_clipping"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            param.data.copy_(master)


def test_from_deepspeed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def initialize(model: nn.Module, model_parameters: Any, config: dict[str, Any]) -> Any:
        return DocumentedEngine(model, config), None, None, None

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize))
    before, after = sides("from_deepspeed")
    assert "fp16.enabled: policy: True" in capsys.readouterr().out
    assert (int(after["state"].step), float(after["result"].scale)) == (4, 4096.0)
    assert furthest(nn.ParameterList(before["engine"].masters), after["state"].model) < 1e-6
