"""S8 in a compiled step: the last, smaller batch of every epoch costs one more program, compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import polyamp

TRACED: dict[str, Any] = {"backend": "aot_eager"}


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def trained(sizes: list[int], compile: Any, count: int = 2) -> tuple[np.ndarray[Any, Any], list[float]]:  # noqa: A002
    """Weights and losses after batches of these sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    recipe = polyamp.Recipe(
        policy="float32",
        optimizer=polyamp.adamw(1e-2),
        scaler=polyamp.LossScaler.static(64.0),
        clip_norm=0.5,
        accumulate_steps=count,
    )

    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])

    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe, compile=compile)
    rng, losses = np.random.default_rng(0), []
    for size in sizes:
        batch = {"x": rng.normal(size=(size, 4)).astype("f4"), "y": rng.normal(size=(size, 2)).astype("f4")}
        state, result = step(state, batch)
        losses.append(float(result.loss))
    return torch.cat([p.detach().ravel() for p in model.parameters()]).numpy(), losses


def test_s08_the_last_batch_of_every_epoch_is_one_more_program() -> None:
    sizes = [8, 8, 5, 8, 8, 5, 8, 5]
    weights, losses = trained(sizes, TRACED)
    assert counters["stats"]["unique_graphs"] == 2
    whole, expected = trained(sizes, compile=False, count=1)
    np.testing.assert_allclose(weights, whole, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(losses, expected, rtol=5e-6)
