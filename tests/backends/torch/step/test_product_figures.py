"""Figures of products in 8 bits in torch: checkpointing, compiled parts, tied parameters (S35, S36)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp.monitor.records import ProductStats
from tests.backends.torch.precision.test_float8 import BATCH, POLICY, Net, loss_fn

RECIPE = polyamp.Recipe(policy=POLICY, optimizer=polyamp.sgd(0.5))


def products(model: nn.Module) -> dict[str, ProductStats]:
    """The figures of the second step."""
    monitor = polyamp.Monitor(every=2, gradients=False, updates=False, products=True)
    state, step = polyamp.init(model, RECIPE), polyamp.train_step(loss_fn, RECIPE, monitor=monitor)
    for _ in range(3):
        state, _ = step(state, BATCH)
    return {each.module: each.products for each in monitor.records[0].modules if each.products is not None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_s36_a_checkpointed_product_is_counted_once(reentrant: bool) -> None:
    found = products(Net(reentrant=reentrant))
    assert found == products(Net())
    assert {path: stats.inputs.elements for path, stats in found.items()} == {"first": 8 * 16, "body": 8 * 32}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
def test_s36_a_compiled_model_is_measured_too() -> None:
    model = Net()
    model.compile(backend="aot_eager", fullgraph=True)
    assert products(model) == products(Net())
    torch.compiler.reset()


def test_s36_all_products_with_a_parameter_are_added_up() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dense(self.dense(x))

    found = products(Twice())["dense"]
    assert (found.inputs.elements, found.weights.elements, found.gradients.elements) == (256, 512, 256)


def test_s36_a_parameter_on_the_left_has_its_operands_names() -> None:
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 256).reshape(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight @ x.t()).t()

    found = products(Left())[""]
    assert (found.inputs.elements, found.weights.elements, found.gradients.elements) == (128, 256, 128)


def test_s36_a_monitor_of_products_changes_no_step() -> None:
    ends = []
    for monitor in (None, polyamp.Monitor(every=1, products=True)):
        torch.manual_seed(0)
        model: Any = Net()
        state, step = polyamp.init(model, RECIPE), polyamp.train_step(loss_fn, RECIPE, monitor=monitor)
        for _ in range(2):
            state, _ = step(state, BATCH)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)
