"""A monitor of compiled steps has the figures of the eager step, and its switch compiles nothing again (S35)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp.monitor.records import MonitorRecord
from tests.fixtures.embedding_underflow import LOSS_FACTOR, ROWS, check_embedding_underflow

COMPILED: dict[str, Any] = {"backend": "aot_eager"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(count)]


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return ((model(batch[0]).float() - batch[1]) ** 2).mean()


def recorded(recipe: polyamp.Recipe, model: nn.Module, **options: Any) -> list[MonitorRecord]:
    monitor = polyamp.Monitor(every=2, weights=True)
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe, monitor=monitor, **options)
    for batch in batches():
        state, _ = step(state, batch)
    return monitor.records


def native(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@pytest.mark.parametrize("kind", ["spec", "native"])
def test_s35_a_compiled_step_has_the_figures_of_the_eager_one(kind: str) -> None:
    found = []
    for options in ({}, {"compile": COMPILED}):
        model = network()
        optimizer: Any = polyamp.sgd(0.1, momentum=0.9) if kind == "spec" else native(model)
        recipe = polyamp.Recipe(
            policy="mixed_float16", optimizer=optimizer, clip_norm=0.1, scaler=polyamp.LossScaler(init_scale=2.0**10)
        )
        found.append(recorded(recipe, model, **options))
    eager, compiled = found
    assert [record.call for record in compiled] == [2, 4, 6]
    for one, other in zip(compiled, eager, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
        for own, wanted in zip(one.modules, other.modules, strict=True):
            assert own.gradients is not None
            assert wanted.gradients is not None
            assert own.gradients.norm == pytest.approx(wanted.gradients.norm, rel=1e-3)
            assert own.gradients.elements == wanted.gradients.elements
            assert own.update_ratio == pytest.approx(wanted.update_ratio, rel=1e-3)


def test_s35_a_switch_compiles_nothing_again() -> None:
    recipe, monitor = polyamp.Recipe(optimizer=polyamp.sgd(0.1), policy="float32"), polyamp.Monitor(every=2)
    state, step = polyamp.init(network(), recipe), None
    traces: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        traces.append(1)
        return graph.forward

    step = polyamp.train_step(loss_fn, recipe, monitor=monitor, compile={"backend": backend})
    counts = []
    for number, batch in enumerate(batches(12)):
        monitor.enabled, monitor.every = number % 5 != 0, 2 + number % 3
        state, _ = step(state, batch)
        counts.append(len(traces))
    assert counts[-1] == counts[5]
    assert monitor.records


class Words(nn.Module):
    """The mean of 4,096 embeddings: each row has a 4,096th of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(ROWS, 8), nn.Linear(8, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(words).mean(1))


def small_loss(model: Any, words: Any) -> torch.Tensor:
    return (model(words).float() ** 2).mean() * LOSS_FACTOR


def test_s35_an_embedding_whose_gradient_underflows_is_named() -> None:
    check_embedding_underflow(Words, small_loss, torch.arange(ROWS)[None])
