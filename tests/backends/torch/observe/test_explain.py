"""`polyamp.explain` for torch: the dtype and the rule of each operation, forward, recomputed and backward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp.errors import UnsupportedError

GUIDE: Final = (Path(__file__).parents[4] / "docs" / "guides" / "explain.md").read_text(encoding="utf-8")
POLICY: Final = polyamp.Policy("mixed_bfloat16")


class Net(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        return self.head(self.norm(x))


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y)


BATCH = (torch.ones(5, 4), torch.zeros(5, dtype=torch.int64))


def rows(report: polyamp.CastingReport, direction: str = "forward") -> dict[tuple[str, str], tuple[str, str, int]]:
    return {
        (row.module, row.name): (row.dtype, row.rule, row.count)
        for row in report.operations
        if row.direction == direction
    }


def test_forward_and_backward_of_a_loss() -> None:
    report = polyamp.explain(loss_fn, POLICY, Net(), BATCH)
    forward, backward = rows(report), rows(report, "backward")
    assert forward["body/0", "addmm"] == ("bfloat16", "compute", 1)
    assert forward["head", "addmm"] == ("bfloat16", "compute", 1)
    assert forward["", "log_softmax"] == ("float32", "float32", 1)
    assert backward["head", "mm"] == ("bfloat16", "follow", 2)
    assert backward["body/0", "mm"][:2] == ("bfloat16", "follow")
    assert report.unknown == ()
    assert ("", "log_softmax") in {(row.module, row.name) for row in report.kept}
    assert "direction" in str(report)


def test_the_model_and_the_generators_are_as_before() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    polyamp.explain(loss_fn, POLICY, model, BATCH)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_what_checkpointing_runs_again_is_named() -> None:
    report = polyamp.explain(loss_fn, POLICY, Net(recompute=True), BATCH)
    assert rows(report)["body/0", "addmm"] == ("bfloat16", "compute", 1)
    assert rows(report, "recompute")["body/0", "addmm"] == ("bfloat16", "compute", 1)
    assert rows(report, "backward")["body/1", "threshold_backward"] == ("bfloat16", "follow", 1)


def test_an_override_and_what_it_keeps() -> None:
    report = polyamp.explain(loss_fn, POLICY.replace(overrides={"head": "float32"}), Net(), BATCH)
    assert rows(report)["head", "addmm"] == ("float32", "override", 1)
    assert ("head", "addmm", "override") in {(row.module, row.name, row.rule) for row in report.kept}


def test_a_softmax_left_in_16_bits_by_hand_is_seen() -> None:
    def by_hand(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.bfloat16().softmax(-1)

    report = polyamp.explain(by_hand, POLICY, torch.ones(2, 3))
    assert rows(report)["", "softmax"] == ("bfloat16", "float32 (uncast)", 1)


def test_a_fused_attention_has_the_dtype_of_its_queries() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum()

    report = polyamp.explain(attend, POLICY, torch.ones(1, 2, 4, 8, requires_grad=True))
    found = [(row.direction, row.dtype) for row in report.operations if report.families[row.name] == "attention"]
    assert found == [("forward", "bfloat16"), ("backward", "bfloat16")]


def test_a_custom_autograd_function() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x @ x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad @ x.t().to(grad.dtype) + x.t().to(grad.dtype) @ grad

    report = polyamp.explain(lambda x: Square.apply(x).sum(), POLICY, torch.ones(3, 3, requires_grad=True))
    assert rows(report)["", "mm"][2] == 1
    assert rows(report, "backward")["", "mm"][2] == 2


def test_strict_names_what_no_list_has_and_two_models_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no op list names i0"):
        polyamp.explain(torch.i0, POLICY, torch.ones(2), strict=True, backend="torch")
    with pytest.raises(UnsupportedError, match="Received: 2 models"):
        polyamp.explain(lambda a, b: a, POLICY, Net(), Net(), backend="torch")
    with pytest.raises(UnsupportedError, match=r"explain\(\) on the torch backend accepts no options.*axis_name="):
        polyamp.explain(lambda m, x: m(x).sum(), POLICY, nn.Linear(2, 2), torch.ones(1, 2), axis_name="batch")


def test_the_guide_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, *_ = re.findall(r"```(?:python|text)\n(.*?)```", GUIDE, re.DOTALL)
    exec(compile(code, "docs/guides/explain.md", "exec"), {})
    assert capsys.readouterr().out == printed
