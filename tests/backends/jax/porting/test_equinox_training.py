"""A training of an equinox model with running statistics, which a checkpoint holds under numbers, on its way out."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

import polyamp
from polyamp import porting
from polyamp.errors import PortError


class Net(eqx.Module):
    head: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self) -> None:
        self.head = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        self.norm = eqx.nn.BatchNorm(2, "batch", mode="batch")

    def __call__(self, x: Any, state: eqx.nn.State) -> tuple[Any, eqx.nn.State]:
        return self.norm(self.head(x), state)


def test_running_statistics_leave_a_state_by_their_names() -> None:
    made = eqx.nn.make_with_state(Net)()
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.1))
    state = polyamp.init(made, recipe, axis_name="batch")
    step = polyamp.train_step(lambda model, x: (model(x) ** 2).mean(), recipe)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    state, _ = step(state, x)
    found = porting.training_state(state).parameters
    want = {name: np.asarray(leaf) for name, leaf in porting.export(state.model)["norm"].arrays.items()}
    for name in ("mean", "variance"):
        np.testing.assert_array_equal(np.asarray(found[f"norm/{name}"]), want[name])
        assert np.ptp(want[name]) > 0
    with pytest.raises(PortError, match="equinox numbers what its State holds"):
        polyamp.port(state, polyamp.init(eqx.nn.make_with_state(Net)(), recipe, axis_name="batch"))
