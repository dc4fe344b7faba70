"""Figures of modules' outputs in torch: checkpointing, compiled steps and parts, dtypes (S35)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp.errors import UnsupportedError
from polyamp.monitor.records import OutputStats
from tests.backends.torch.step.test_monitor import COMPILED, batches, loss_fn, native, network

RECIPE = polyamp.Recipe(
    policy="mixed_float16", optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler(init_scale=2.0**10)
)


class Net(nn.Module):
    """A body that is checkpointed or not, and a head that is called twice."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            hidden = self.body(x)
        else:
            hidden = checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)
        return (self.head(hidden) + self.head(2.0 * hidden)) / 2.0


def outputs(
    model: nn.Module, recipe: polyamp.Recipe = RECIPE, activations: Any = True, **options: Any
) -> dict[str, OutputStats]:
    """The figures of the second step."""
    monitor = polyamp.Monitor(every=2, gradients=False, updates=False, activations=activations)
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe, monitor=monitor, **options)
    for batch in batches(3):
        state, _ = step(state, batch)
    (record,) = monitor.records
    return {each.module: each.activations for each in record.modules if each.activations is not None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_s35_a_checkpointed_module_is_counted_once(reentrant: bool) -> None:
    found = outputs(Net(reentrant))
    assert found == outputs(Net(None))
    assert {path: stats.elements for path, stats in found.items()} == {
        "": 24,
        "body": 64,
        "body/0": 64,
        "body/1": 64,
        "body/2": 64,
        "head": 48,
    }
    assert found["body/2"].zero == pytest.approx(0.5, abs=0.15)
    assert found["body/1"].zero == 0.0


@pytest.mark.parametrize(("kind", "accumulate"), [("spec", 2), ("native", 1)])
def test_s35_a_compiled_step_has_the_outputs_of_the_eager_one(kind: str, accumulate: int) -> None:
    found = []
    for options in ({}, {"compile": COMPILED}):
        model = network()
        optimizer: Any = polyamp.sgd(0.1) if kind == "spec" else native(model)
        recipe = RECIPE.replace(optimizer=optimizer, accumulate_steps=accumulate)
        found.append(outputs(model, recipe, **options))
    eager, compiled = found
    assert list(eager) == list(compiled) == ["0", "2", "", "1"]
    for path, stats in eager.items():
        assert stats.elements == compiled[path].elements == (64 if path in ("0", "1") else 24)
        assert stats.rms == pytest.approx(compiled[path].rms, rel=1e-3)
        assert stats.largest == pytest.approx(compiled[path].largest, rel=1e-3)


def test_s35_of_a_compiled_part_the_whole_is_seen() -> None:
    expected = outputs(Net(None))
    for wraps in (True, False):
        model = Net(None)
        if wraps:
            model.body = torch.compile(model.body, backend="eager", fullgraph=True)
        else:
            model.body.compile(backend="eager")
        found = outputs(model)
        assert set(found) == {"", "body", "head"}
        assert found["body"].elements == 64
        assert found["body"].rms == pytest.approx(expected["body"].rms, rel=1e-2)
        assert not any(part._forward_hooks for part in model.modules())


def test_s35_values_are_judged_in_the_compute_dtype() -> None:
    """A float32 module's outputs that float16 cannot hold are counted where they are, before the cast."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float() * torch.tensor([0.0, 1e-9, 1e-6, 1.0, 65519.0, 65520.0, 1e9, torch.nan])

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled, self.head = Scaled(), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scaled(torch.ones(2, 8))
            return self.head(x)

    stats = outputs(Whole(), activations="scaled")["scaled"]
    assert (stats.elements, stats.zero, stats.underflow, stats.subnormal) == (16, 0.125, 0.125, 0.125)
    assert stats.overflow == 3 / 8
    assert stats.largest == torch.inf


def test_s35_a_loop_of_another_library_refuses_activations() -> None:
    from polyamp_torch import GradScaler

    with pytest.raises(UnsupportedError, match=r"Monitor\(activations=\['\*'\]\) is read by polyamp.train_step"):
        GradScaler("cpu").watch(network(), polyamp.Monitor(activations=True), policy="mixed_float16")
