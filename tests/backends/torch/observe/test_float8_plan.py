"""`polyamp.float8_plan` in torch: which products it finds, what it leaves alone, and that its overrides act."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp import Float8, Policy, Recipe, UnsupportedError
from polyamp.doctor.float8_plan_data import decide_layers
from polyamp.doctor.float8_probe import ModelProduct, ProductShape
from polyamp.doctor.float8_times import ProductTime
from polyamp_torch.observe import float8_probe
from polyamp_torch.observe.float8_probe import FLOAT8_PROBE
from polyamp_torch.precision.torch_only import float8_products

GUIDE = (Path(__file__).parents[4] / "docs" / "guides" / "float8_plan.md").read_text(encoding="utf-8")
POLICY = Policy("mixed_float8", float8=Float8(emulate=True))
NATIVE = Recipe(policy="mixed_float8", optimizer=polyamp.sgd(0.1))


class Block(nn.Module):
    """A parameter of its own beside a layer, which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(32, 32) / 6)
        self.mlp = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(torch.relu(self.mlp(x @ self.mix)))


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList([Block(), Block()])
        self.narrow = nn.Linear(32, 10)
        self.lm_head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.narrow(x).sum() + self.lm_head(x).square().mean()


def loss_fn(model: Any, batch: Any) -> Any:
    return model(batch)


X = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
BLOCK = ProductShape(8, 32, 32)


@pytest.fixture(autouse=True)
def no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure nothing: the times of a CPU are no part of these tests."""

    def measure(probe: Any, shape: ProductShape, *_: Any, **__: Any) -> ProductTime:
        return ProductTime(**shape._asdict(), bfloat16_ms=1.0, float8_ms=2.0)

    monkeypatch.setattr("polyamp.doctor.float8_plan.measure_product", measure)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_products_are_those_that_explain_lists(checkpointed: bool) -> None:
    model = Net(checkpointed=checkpointed)
    found = polyamp.float8_plan(loss_fn, POLICY, model, X)
    assert [(row.module, row.shape, row.count) for row in found.layers] == [
        ("blocks/0", BLOCK, 1),
        ("blocks/0/mlp", BLOCK, 2),
        ("blocks/1", BLOCK, 1),
        ("blocks/1/mlp", BLOCK, 2),
    ]
    assert (found.backend, found.device, found.emulated) == ("torch", "cpu", True)
    rows = polyamp.explain(loss_fn, POLICY, model, X).operations
    products = {
        row.module: row.count for row in rows if (row.rule, row.name, row.direction) == ("float8", "mm", "forward")
    }
    assert products == {row.module: row.count for row in found.layers}


def test_overrides_add_a_head_and_the_model_is_left_alone() -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    policy = POLICY.replace(overrides={"lm_head": "float8", "blocks": "bfloat16"})
    state = torch.get_rng_state()
    found = polyamp.float8_plan(model, policy, X)
    assert [(row.module, row.shape) for row in found.layers] == [("lm_head", ProductShape(8, 32, 64))]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_overrides_take_out_exactly_the_slower_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products are native, which torch has on a CPU too; a block is slower, its layer is not, and the other way."""
    monkeypatch.setattr(float8_products, "multiplies_float8", lambda device_type: True)

    def measured(products: Any, times: Any, **options: Any) -> Any:
        slower = {"blocks/0", "blocks/1/mlp"}
        fast, slow = (ProductTime(**BLOCK._asdict(), bfloat16_ms=1.0, float8_ms=each) for each in (0.5, 2.0))
        rows = [decide_layers([each], {BLOCK: slow if each.module in slower else fast}, **options) for each in products]
        return [row for some in rows for row in some]

    monkeypatch.setattr("polyamp.doctor.float8_plan.decide_layers", measured)
    model = Net()
    plan = polyamp.float8_plan(loss_fn, "mixed_float8", model, X)
    assert plan.overrides == {"blocks/0": "bfloat16", "blocks/0/mlp": "float8", "blocks/1/mlp": "bfloat16"}
    recipe = plan.recipe(NATIVE)
    again = polyamp.float8_plan(loss_fn, recipe.policy, model, X)
    assert [(row.module, row.count) for row in again.layers] == [("blocks/0/mlp", 2), ("blocks/1", 1)]
    step = polyamp.train_step(loss_fn, recipe)
    _, result = step(polyamp.init(model, recipe), X)
    assert np.isfinite(float(result.loss))


@pytest.mark.parametrize("emulate", [True, False])
def test_the_measured_programs_are_the_products_of_a_step(emulate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(
        torch.autograd, "grad", lambda out, inputs, cotangent: ran.append((out, *inputs, cotangent.dtype))
    )
    float8 = Float8(emulate=emulate)
    programs = FLOAT8_PROBE.programs(ProductShape(32, 64, 16), float8, "cpu", compiled=False)
    programs.bfloat16(1)
    programs.float8(2)
    assert len(ran) == 3
    (wide, x, w, cotangent), (narrow, *_) = ran[:2]
    assert (x.shape, x.dtype, w.shape, w.dtype, cotangent) == (
        (32, 64),
        torch.bfloat16,
        (16, 64),
        torch.float32,
        torch.bfloat16,
    )
    assert wide.dtype == narrow.dtype == torch.bfloat16
    distance = float((wide.detach().double() - narrow.detach()).norm() / wide.detach().double().norm())
    assert 0.005 < distance < 0.06  # e4m3 rounds each operand by up to 2^-4
    assert narrow.grad_fn is not None
    assert narrow.grad_fn.name() != wide.grad_fn.name()


def test_compiled_programs_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(float8_probe, "_compiled", lambda function: compiled.append(function) or function)
    FLOAT8_PROBE.programs(BLOCK, Float8(emulate=True), "cpu", compiled=True).float8(1)
    FLOAT8_PROBE.programs(BLOCK, Float8(emulate=True), "cpu", compiled=False).float8(1)
    assert len(compiled) == 2


def test_a_cpu_is_refused_as_in_training() -> None:
    with pytest.raises(UnsupportedError, match=r"^float8: this device \('cpu'\) multiplies no 8-bit floats; "):
        polyamp.float8_plan(Net(), "mixed_float8", X)
    assert FLOAT8_PROBE.multiplies_float8("cpu") is False


def test_the_guides_block_prints_what_stands_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    block, printed = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)[0]
    exec(compile(block, "docs/guides/float8_plan.md", "exec"), {})
    assert capsys.readouterr().out == printed


def test_a_model_product_is_plain_data() -> None:
    assert FLOAT8_PROBE.products(nn.Linear(32, 16), POLICY, X).products == [
        ModelProduct("", ProductShape(8, 32, 16), 1)
    ]
