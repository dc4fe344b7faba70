"""The call that the error of a stuck scale carries names the operation, run as it stands (S17)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.errors import LossScaleStuckError
from polyamp.reference import MLP

LARGE = 1e30


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], batch["y"])


@pytest.mark.parametrize(("gain", "origin"), [(LARGE, "forward"), (1e10, "backward")])
def test_s17_the_call_of_the_error_finds_where_it_breaks(gain: float, origin: str) -> None:
    recipe = polyamp.Recipe(
        policy="mixed_float16",
        optimizer=polyamp.sgd(0.1),
        scaler=polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=2),
    )
    batch = {"x": np.ones((2, 4), "f4"), "y": np.zeros((2, 1), "f4"), "gain": np.full((2, 1), gain, "f4")}
    state = polyamp.init(MLP.random([4, 8, 1], seed=0), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    state, _ = step(state, batch)
    with pytest.raises(LossScaleStuckError) as caught:
        step(state, batch)
    assert caught.value.loss_is_finite == (origin == "backward")
    report = eval(caught.value.call, {"polyamp": polyamp, "loss_fn": loss_fn, "state": state, "batch": batch})
    assert report.origin == origin
