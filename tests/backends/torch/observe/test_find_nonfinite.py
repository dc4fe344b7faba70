"""`polyamp.find_nonfinite` on planted faults: the module, the operation, the line, and precision or not."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp import losses
from polyamp.nonfinite.report import NonfiniteReport


class Plain(nn.Module):
    """Three layers, the middle one a function of the test."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.middle = Middle(middle)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.first(x)))


class Middle(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def masked(x: torch.Tensor) -> torch.Tensor:
    """A mask of -1e9 that is added in float16, with a row that has nothing else."""
    mask = torch.zeros_like(x)
    mask[0] = -1e9
    return torch.exp(x + mask - (x + mask).amax(-1, keepdim=True)).to(x.dtype)


PLANTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, bool]] = {
    "activations above 65504": (lambda x: (x * 300.0) * 3000.0, "mul", True),
    "a mask of -1e9": (masked, "lift_fresh", True),
    "a variance of zero": (lambda x: x / (x - x).std(-1, keepdim=True), "div", False),
    "exp of a large number": (lambda x: torch.exp(x * 0 + 1000.0), "exp", False),
}
BATCH = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), "y": torch.tensor([0, 1, 2, 0])}


def loss_fn(model: Any, batch: Any) -> Any:
    return losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def found(model: nn.Module, loss: Any = loss_fn, batch: Any = None, **options: Any) -> NonfiniteReport:
    return polyamp.find_nonfinite(loss, "mixed_float16", model, BATCH if batch is None else batch, **options)


@pytest.mark.parametrize("name", list(PLANTS))
def test_a_planted_fault_is_named_at_module_and_operation(name: str) -> None:
    function, operation, by_precision = PLANTS[name]
    model = Plain(function)
    before = [p.detach().clone() for p in model.parameters()]
    report = found(model)
    assert (report.origin, report.module, report.between) == ("forward", "middle", False), str(report)
    assert report.operation == operation, str(report)
    assert report.by_precision is by_precision
    assert report.place is not None
    assert report.place.file == __file__
    assert report.output is not None
    assert report.output.nonfinite > 0
    assert all(each.nonfinite == 0 for each in report.inputs)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_what_is_finite_and_what_is_not_finite_before_the_pass() -> None:
    model = Plain(torch.tanh)
    assert found(model).origin == "none"
    data = found(model, batch={**BATCH, "x": BATCH["x"].clone().index_fill_(0, torch.tensor([2]), float("nan"))})
    assert (data.origin, data.by_precision) == ("data", None)
    assert str(data) == "The batch is not finite: 8 elements of batch['x']. This is no matter of precision."
    with torch.no_grad():
        model.first.weight[0, 0] = float("inf")
    assert (found(model).origin, found(model).module) == ("parameters", "first/weight")


def test_a_mask_of_minus_infinity_before_a_softmax_is_no_fault() -> None:
    def softmax(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.masked_fill(x > 0.5, float("-inf")), -1)

    assert found(Plain(softmax)).origin == "none"
    both = found(Plain(lambda x: softmax(x) * 60000.0 * 60000.0))
    assert (both.module, both.operation) == ("head", "_to_copy"), "the mask before is none"


def test_gradients_that_overflow_at_a_loss_scale() -> None:
    report = found(Plain(torch.tanh), loss_scale=2.0**40)
    assert (report.origin, report.by_precision) == ("backward", True)
    assert report.module in ("head", "middle", "first")
    assert "The loss scale was 1.09951e+12" in str(report)


def test_a_loss_in_16_bits_and_a_rate_that_diverged() -> None:
    def narrow(model: Any, batch: Any) -> Any:
        return (model(batch["x"]).half() * 3000).square().sum()

    report = found(Plain(torch.tanh), narrow)
    assert (report.origin, report.module, report.by_precision, report.own_cast) == ("forward", "", None, "float16")
    assert "The program itself computes in float16 there, under any policy, so float32 was not tried" in str(report)
    model = Plain(torch.tanh)
    with torch.no_grad():
        model.head.weight.fill_(3e38)
    diverged = found(model)
    assert (diverged.origin, diverged.by_precision) == ("forward", False)


GUIDE = (Path(__file__).parents[4] / "docs" / "guides" / "when_something_is_wrong.md").read_text(encoding="utf-8")
PRINTS = re.compile(r"```python\n((?:(?!```).)*)```\n\n```text\n(.*?)```", re.DOTALL)


def test_the_guide_prints_what_stands_there(tmp_path: Path) -> None:
    """docs/guides/when_something_is_wrong.md, as a file of its own."""
    code, printed = PRINTS.findall(GUIDE.partition("## A loss of NaN")[2])[0]
    file = tmp_path / "train.py"
    file.write_text(code)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(file))
    assert output.getvalue().replace(f"{tmp_path}/", "") == printed


def test_the_other_blocks_of_the_guide_run_on_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "17").mkdir(parents=True)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    names: dict[str, Any] = {"polyamp": polyamp, "state": polyamp.init(nn.Linear(2, 2), recipe)}
    dry_run, override = re.findall(r"```python\n(.*?)```", PRINTS.sub("", GUIDE), re.DOTALL)
    exec(compile(dry_run, "docs/guides/when_something_is_wrong.md", "exec"), names)
    assert list((tmp_path / "runs" / "17").iterdir()) == []
    exec(compile(override, "docs/guides/when_something_is_wrong.md", "exec"), names)
    assert names["policy"].overrides["sampling"] == "float32"


class _Gate(nn.Module):
    """Finite forward; its unused branch has an infinite slope."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 1e9, x.sub(x).sqrt(), x)


def test_a_gradient_that_is_not_finite_stands_between_two_modules() -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), _Gate(), nn.Linear(8, 3))
    report = polyamp.find_nonfinite(lambda m, x: m(x).square().mean(), "float32", network, torch.randn(4, 8))
    assert (report.origin, report.module, report.finite_until) == ("backward", "1", "2")
    assert report.operation == "sqrt"
    assert report.place is not None
    assert "x.sub(x).sqrt()" in report.place.code
    assert "between 1 and 2: the gradient that enters 2 is finite" in str(report)
    assert "  operation: sqrt, whose derivative is not finite there\n    given float32 from 0 to 0" in str(report)


def test_a_gradient_that_overflows_has_no_operation() -> None:
    """Nothing in the forward pass is steep: a root of positive numbers, and a square at 0, are not."""
    network = Plain(lambda x: x.relu().square().add(1.0).sqrt())
    report = polyamp.find_nonfinite(
        lambda m, x: m(x).square().mean(), "mixed_float16", network, torch.randn(4, 8), loss_scale=2.0**40
    )
    assert (report.origin, report.operation, report.place) == ("backward", "", None)
