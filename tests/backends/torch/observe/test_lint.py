"""`polyamp.lint` for torch: each planted fault is found, its clean counterpart is quiet, and nothing is touched."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from typer.testing import CliRunner

import polyamp
from polyamp.cli import app as cli
from polyamp.errors import ArgumentError
from polyamp.linter.lint_rules import RULES


class RMSNorm(nn.Module):
    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.wide = wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if self.wide else x
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def net(norm: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    parts = {"body": nn.Linear(8, 16), "norm": norm or nn.LayerNorm(16), "act": nn.ReLU(), "lm_head": nn.Linear(16, 4)}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


X, Y = torch.linspace(-1, 1, 64).reshape(8, 8), torch.arange(8) % 4


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return functional.cross_entropy(model(x.to(model.body.weight.dtype)).float(), y)


def autocast_loss(dtype: torch.dtype) -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            logits = model(batch[0])
        return functional.cross_entropy(logits.float(), batch[1])

    return loss


def rules(report: Any) -> list[str]:
    return [each.rule for each in report.findings]


def finding(report: Any, rule: str) -> Any:
    return next(each for each in report.findings if each.rule == rule)


def test_float32_is_clean() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report = polyamp.lint(model, optimizer=optimizer, loss_fn=loss_fn, batch=(X, Y))
    assert rules(report) == []
    assert report.unchecked == {"clip_before_unscale": "step"}
    assert str(report) == "0 findings (torch)\n\nnot checked: clip_before_unscale needs step"


def test_parameters_in_16_bits_do_not_move() -> None:
    model = net().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    found = finding(polyamp.lint(model, optimizer=optimizer, loss_fn=loss_fn, batch=(X, Y)), "parameters_in_16_bits")
    assert found.places == ["body/weight", "body/bias", "norm/weight", "norm/bias", "lm_head/weight", "lm_head/bias"]
    assert found.where == "body/weight, body/bias, norm/weight and 3 more"
    other = [p.detach().clone() for p in model.parameters()]  # the same step by hand
    loss_fn(model, (X, Y)).backward()
    optimizer.step()
    acts = [p.grad != 0 for p in model.parameters()]
    still = sum(int((a & (p == o)).sum()) for a, p, o in zip(acts, model.parameters(), other, strict=True))
    assert found.share == still / sum(int(a.sum()) for a in acts)
    assert 0.8 < found.share < 1.0
    assert found.figure.startswith("trained in bfloat16; ")


def test_a_large_learning_rate_moves_them_and_a_warmup_is_no_measurement() -> None:
    model = net().bfloat16()
    for rate, share in ((1.0, 0.0), (0.0, None)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        report = polyamp.lint(model, optimizer=optimizer, loss_fn=loss_fn, batch=(X, Y))
        assert finding(report, "parameters_in_16_bits").share == share


def test_frozen_parameters_in_16_bits_are_no_fault() -> None:
    model = net()
    model.body.bfloat16().requires_grad_(False)
    assert rules(polyamp.lint(model)) == []


def test_moments_in_16_bits() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False, foreach=False)
    loss_fn(model, (X, Y)).backward()
    optimizer.step()
    assert rules(polyamp.lint(model, optimizer=optimizer)) == []
    state = optimizer.state[model.body.weight]
    state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    found = finding(polyamp.lint(model, optimizer=optimizer), "moments_in_16_bits")
    assert found.places == ["exp_avg_sq of body/weight"]


@pytest.mark.parametrize(("norm", "named"), [(nn.LayerNorm(16), "native_layer_norm"), (RMSNorm(wide=False), "rsqrt")])
def test_a_norm_in_16_bits(norm: nn.Module, named: str) -> None:
    found = finding(polyamp.lint(net(norm).bfloat16(), loss_fn=loss_fn, batch=(X, Y)), "norm_in_16_bits")
    assert f"norm: {named}" in found.places
    assert found.figure == "ran in bfloat16"


def test_a_norm_in_float32_is_none() -> None:
    report = polyamp.lint(net(RMSNorm(wide=True)), loss_fn=autocast_loss(torch.bfloat16), batch=(X, Y))
    assert rules(report) == []


def test_a_softmax_in_16_bits_under_the_loss_functions_own_autocast() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # torch's list for the CPU has no softmax
            return model(batch[0]).softmax(-1)[:, 0].float().log().mean()

    found = finding(polyamp.lint(net(), loss_fn=loss, batch=(X, Y)), "softmax_in_16_bits")
    assert found.places == [".: softmax"]
    assert rules(polyamp.lint(net(), loss_fn=polyamp.Policy("mixed_bfloat16").autocast(loss), batch=(X, Y))) == []


def test_a_scaler_and_the_dtype_that_needs_one() -> None:
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)

    def found(dtype: torch.dtype, scaler: Any) -> list[str]:
        return rules(polyamp.lint(net(), scaler=scaler, loss_fn=autocast_loss(dtype), batch=(X, Y)))

    assert found(torch.bfloat16, scaler) == ["scaler_without_float16"]
    assert found(torch.bfloat16, off) == []
    assert found(torch.float16, off) == found(torch.float16, None) == ["float16_without_scaler"]
    assert found(torch.float16, scaler) == []


def test_a_head_in_16_bits() -> None:
    model = net()
    model.lm_head.half()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        hidden = model.act(model.norm(model.body(batch[0])))
        return functional.cross_entropy(model.lm_head(hidden.half()).float(), batch[1])

    report = polyamp.lint(model, loss_fn=loss, batch=(X, Y))
    assert finding(report, "head_in_16_bits").places == ["lm_head/weight"]
    model.lm_head.float()
    model.body.bfloat16()
    assert "head_in_16_bits" not in rules(polyamp.lint(model, loss_fn=loss_of_parts, batch=(X, Y)))


def test_a_head_without_a_module_is_not_guessed() -> None:
    model = net().half()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch.half()) @ torch.ones(4, 3).half()).float().sum()

    report = polyamp.lint(model, loss_fn=loss, batch=X)
    assert report.unchecked["head_in_16_bits"] == "logits that a module makes"


def loss_of_parts(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model.lm_head(model.body(batch[0].bfloat16()).float()), batch[1])


def test_a_glob_that_covers_the_head() -> None:
    policy = polyamp.Policy("float32", overrides={"**": "bfloat16", "norm": "float32"})
    report = polyamp.lint(net(), loss_fn=loss_fn, batch=(X, Y), policy=policy)
    assert rules(report) == ["head_by_glob"]
    assert report.findings[0].figure == "'**': 'bfloat16' of the policy's overrides covers it"
    named = policy.replace(overrides={**policy.overrides, "lm_head": "float32"})
    assert rules(polyamp.lint(net(), loss_fn=loss_fn, batch=(X, Y), policy=named)) == []
    assert polyamp.lint(net(), policy="float32").unchecked["head_by_glob"] == "loss_fn and batch"


def test_a_compiled_model_is_inspected_as_it_was() -> None:
    model = net().bfloat16()
    compiled = torch.compile(model, backend="eager")
    report = polyamp.lint(compiled, loss_fn=lambda m, batch: m(batch.bfloat16()).float().mean(), batch=X)
    assert finding(report, "norm_in_16_bits").places == ["norm: native_layer_norm"]
    assert finding(report, "head_in_16_bits").places == ["lm_head/weight"]


class Loop:
    """A user's own loop, with dropout, running statistics and a schedule."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.model = net(nn.BatchNorm1d(16))
        self.model.add_module("dropout", nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=enabled)
        self.unscales = True

    def step(self) -> None:
        self.optimizer.zero_grad()
        shift = random.random() + float(np.random.rand())  # noqa: NPY002  # the generator that is put back
        loss = autocast_loss(torch.float16)(self.model, (X + shift, Y))
        self.scaler.scale(loss).backward()
        if self.unscales:
            self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), 1.0)  # imported by name
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()

    def lint(self) -> Any:
        return polyamp.lint(
            self.model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            loss_fn=autocast_loss(torch.float16),
            batch=(X, Y),
            step=self.step,
        )

    def bits(self) -> bytes:
        gradients = [None if p.grad is None else p.grad.numpy().tobytes() for p in self.model.parameters()]
        held = (self.model.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict(), self.scaler._scale)
        array = np.random.get_state()  # noqa: NPY002  # the generator that is put back
        shown = [torch.random.get_rng_state().tolist(), random.getstate(), array[1].tolist()]
        with torch.no_grad():
            torch.set_printoptions(profile="full", precision=12)
            try:
                return repr((gradients, held, shown)).encode()
            finally:
                torch.set_printoptions(profile="default")


def test_a_clip_before_unscaling() -> None:
    loop = Loop()
    assert rules(loop.lint()) == []
    loop.unscales = False
    found = finding(loop.lint(), "clip_before_unscale")
    (place,) = found.places
    line = int(place.rpartition(":")[2])
    assert "clip_grad_norm_(self" in Path(__file__).read_text().splitlines()[line - 1]
    loop.step()  # so that there are gradients
    loop.step = lambda: nn.utils.clip_grad_value_(loop.model.parameters(), 1.0)  # type: ignore[method-assign]  # alone
    assert finding(loop.lint(), "clip_before_unscale").figure.startswith("clip_grad_value_ clips gradients")
    loop = Loop(enabled=False)
    loop.unscales = False
    assert "clip_before_unscale" not in rules(loop.lint())


def test_two_steps_in_one_are_told_apart() -> None:
    loop = Loop()
    one = loop.step

    def both() -> None:
        one()
        loop.unscales = False
        one()

    loop.step = both  # type: ignore[method-assign]  # a step of two updates
    assert rules(loop.lint()) == ["clip_before_unscale"]


@pytest.mark.parametrize("warm", [False, True])
def test_nothing_is_touched(*, warm: bool) -> None:
    loop = Loop()
    if warm:
        loop.step()
    objects = [p.grad for p in loop.model.parameters()]
    before = loop.bits()
    loop.lint()
    assert loop.bits() == before
    assert all(p.grad is grad for p, grad in zip(loop.model.parameters(), objects, strict=True))


def test_a_step_that_raises_is_undone() -> None:
    loop = Loop()
    loop.step()
    before, update = loop.bits(), loop.scaler.update

    def broken() -> None:
        raise ZeroDivisionError

    loop.scaler.update = broken  # type: ignore[method-assign, assignment]  # a loop that fails after its update
    with pytest.raises(ZeroDivisionError):
        loop.lint()
    loop.scaler.update = update  # type: ignore[method-assign]  # as it was
    assert loop.bits() == before


def test_refused_arguments() -> None:
    loop = Loop()
    for arguments, message in (
        ({"loss_fn": loss_fn}, "loss_fn and batch belong together. Received: loss_fn alone"),
        ({"step": 3}, "step must be a function. Received: 3"),
        ({"step": loop.step}, "Pass optimizer= too"),
        ({"step": loop.step, "optimizer": loop.optimizer}, "step uses a GradScaler that was not passed"),
        ({"optimizer": "adam"}, "optimizer must be a torch.optim.Optimizer. Received: 'adam'"),
        ({"scaler": 2.0}, "scaler must be a torch.amp.GradScaler"),
        ({"opt_state": {}}, "opt_state is for JAX"),
        ({"loss_fn": lambda model, batch: X.sum(), "batch": X}, "must use the model that it is given"),
        ({"loss_fn": lambda model, batch: loop.model(X).sum(), "batch": X}, "must use the model that it is given"),
    ):
        with pytest.raises(ArgumentError, match=message):
            polyamp.lint(loop.model, **arguments)


FILE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.ones(5, 4), torch.zeros(5, dtype=torch.int64)


def loss_fn(model, batch):
    with torch.autocast("cpu", torch.float16):
        logits = model(batch[0])
    return nn.functional.cross_entropy(logits.float(), batch[1])
"""


def test_the_command(tmp_path: Path) -> None:
    file, page = tmp_path / "train.py", tmp_path / "lint.html"
    file.write_text(FILE)
    shown = CliRunner().invoke(cli.app, ["lint", str(file), "--save", str(page)])
    assert shown.exit_code == 1, shown.output
    assert shown.stdout.startswith("1 finding (torch)\n\nfloat16_without_scaler: scaler\n")
    assert "float16_without_scaler" in page.read_text()
    data = json.loads(CliRunner().invoke(cli.app, ["lint", str(file), "--json"]).stdout)
    assert [each["rule"] for each in data["findings"]] == ["float16_without_scaler"]
    file.write_text(FILE.replace("float16", "bfloat16"))
    assert CliRunner().invoke(cli.app, ["lint", str(file)]).exit_code == 0
    file.write_text("loss_fn = 1")
    assert CliRunner().invoke(cli.app, ["lint", str(file)]).exit_code == 2


def test_the_guide_prints_what_it_says_and_names_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "lint.md").read_text(encoding="utf-8")
    ((code, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", guide, re.DOTALL)
    exec(compile(code, "docs/guides/lint.md", "exec"), {})
    assert re.sub(r"[\d.]+ %", "x %", capsys.readouterr().out) == re.sub(r"[\d.]+ %", "x %", printed)
    assert re.findall(r"^\| (\w+) \|", guide, re.MULTILINE)[1:] == [rule.name for rule in RULES]
