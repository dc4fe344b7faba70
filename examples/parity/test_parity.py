"""Tests of a project's own models in two frameworks; `pytest examples/parity` runs them."""

from typing import Any

import numpy as np
import pytest
from models import CLASSES, WIDTH, jax_net, torch_net

import polyamp

BUILD = {"torch": torch_net, "jax": jax_net}
RECIPE = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-2, weight_decay=0.01), clip_norm=1.0)


def batches(step: int) -> dict[str, Any]:
    """The batch of a step, the same in every process."""
    rng = np.random.default_rng(step)
    return {"x": 0.1 * rng.standard_normal((16, WIDTH), np.float32), "y": rng.integers(0, CLASSES, 16)}


def loss_fn(model: Any, batch: dict[str, Any]) -> Any:
    """The loss, in either framework."""
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.backends("torch", "jax")
def test_learns_a_batch(polyamp_backend: Any) -> None:
    """Once for each framework, in a process of its own."""
    state, step = polyamp.init(BUILD[polyamp_backend](), RECIPE), polyamp.train_step(loss_fn, RECIPE)
    losses = []
    for _ in range(10):
        state, result = step(state, batches(0))
        losses.append(float(result.loss))
    assert losses[-1] < losses[0] / 2


@pytest.mark.backends("torch", "jax")
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_trains_alike(assert_parity: Any, policy: str) -> None:
    """Outputs, gradients and updates of three steps, module by module."""
    assert_parity(build=BUILD, data=batches, loss_fn=loss_fn, recipe=RECIPE.replace(policy=policy), steps=3)
