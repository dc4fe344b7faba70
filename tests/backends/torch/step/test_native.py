"""torch's own optimizers: parameter groups with `compile=True`, accumulation, skips and torch's schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import polyamp

TRACED: dict[str, Any] = {"backend": "aot_eager"}
GAINS = (1.0, float("inf"), 1.0, 1.0)


@pytest.fixture(autouse=True)
def compiled_once() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


class Network(nn.Module):
    """BatchNorm, a parameter that the loss does not use, and two biases with one gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.shift, self.other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.head(torch.tanh(self.norm(self.first(x))))
        return h + self.shift + self.other


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], batch["y"])


def item(seed: int, gain: float = 1.0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(8, 6)).astype(np.float32), rng.normal(size=(8, 2)).astype(np.float32)
    return {"x": x, "y": y, "gain": np.full((8, 2), gain, np.float32)}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    biases = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": biases, "lr": 0.02},
    ]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(groups(model), lr=0.1, momentum=0.9),
    "fused adamw": lambda model: torch.optim.AdamW(groups(model), lr=0.01, fused=True),
    "nadam": lambda model: torch.optim.NAdam(groups(model), lr=0.01),
}


def trained(name: str, compile: Any, **settings: Any) -> tuple[Any, list[tuple[float, ...]]]:  # noqa: A002
    model = Network()
    recipe = polyamp.Recipe(
        **{"policy": "float32", "scaler": polyamp.LossScaler(init_scale=64.0), "clip_norm": 0.5, **settings},
        optimizer=OPTIMIZERS[name](model),
    )
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe, compile=compile)
    trace = []
    for seed, gain in enumerate(GAINS):
        before = state.backend.export_state(state)
        state, result = step(state, item(seed, gain))
        trace.append((float(result.scale), float(result.skipped), float(result.step), float(result.grad_norm)))
        if gain != 1.0:
            after = state.backend.export_state(state)
            changed = [n for n in before if before[n].tobytes() != after[n].tobytes() and "loss_scale" not in n]
            assert changed == [], "S12"
    return state, trace


@pytest.mark.parametrize(
    ("name", "settings"),
    [("sgd", {}), ("fused adamw", {"accumulate_steps": 2}), ("nadam", {})],
    ids=["sgd", "fused adamw, accumulated", "nadam"],
)
def test_s12_parameter_groups_of_a_native_optimizer_compile(name: str, settings: dict[str, Any]) -> None:
    (eager, wanted), (compiled, found) = trained(name, False, **settings), trained(name, TRACED, **settings)
    assert counters["stats"]["unique_graphs"] == 1
    np.testing.assert_allclose(found, wanted, rtol=2e-5)
    one, other = (state.backend.export_state(state) for state in (eager, compiled))
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_allclose(other[key], one[key], rtol=2e-4, atol=1e-6, err_msg=key)


def test_s08_16_bit_parameters_with_a_native_optimizer_are_summed_in_float32() -> None:
    """In bfloat16 256 + 1 is 256."""
    model = nn.Linear(1, 1, dtype=torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    recipe = polyamp.Recipe(
        policy="bfloat16", optimizer=torch.optim.SGD(model.parameters(), 2.0**-8), accumulate_steps=4
    )
    state = polyamp.init(model, recipe)
    x = np.ones((4, 1), np.float32)
    x[0] = 256.0
    step = polyamp.train_step(lambda model, batch: model(batch["x"])[0][0], recipe, compile=TRACED)
    step(state, {"x": x})
    np.testing.assert_allclose(-float(model.weight.detach()), x.mean() * 2.0**-8, rtol=2.0**-8)


@pytest.mark.parametrize("compile", [False, TRACED], ids=["eager", "compiled"])
def test_s13_a_scheduler_of_torchs_is_the_users_to_step(compile: Any) -> None:  # noqa: A002
    """It is not told of a skip: stepped where `result.skipped` is False it counts applied updates, as a spec's does."""
    weights = []
    for native in (True, False):
        model = Network()
        halving = polyamp.schedules.step(0.1, every=1, factor=0.5)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if native else None
        recipe = polyamp.Recipe(
            policy="float32",
            optimizer=optimizer if native else polyamp.sgd(halving, momentum=0.9),
            scaler=polyamp.LossScaler(init_scale=64.0),
            accumulate_steps=2,
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if native else None
        state = polyamp.init(model, recipe)
        step = polyamp.train_step(loss_fn, recipe, compile=compile)
        for seed, gain in enumerate(GAINS):
            state, result = step(state, item(seed, gain))
            if scheduler is not None and not result.skipped:
                scheduler.step()
        weights.append(torch.cat([p.detach().ravel() for p in model.parameters()]).numpy())
    np.testing.assert_allclose(*weights, rtol=2e-5, atol=1e-7)
