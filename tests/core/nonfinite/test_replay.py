"""`polyamp.replay`: the same bits twice, or which arrays differ; the state stays as it was."""

from __future__ import annotations

from typing import Any

import numpy as np

import polyamp
from polyamp.reference import MLP

RECIPE = polyamp.Recipe(policy="float32", optimizer=polyamp.adam(0.1))
BATCH = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def test_a_step_that_is_the_same_twice() -> None:
    state = polyamp.init(MLP.random([4, 8, 1], seed=0), RECIPE)
    step = polyamp.train_step(lambda model, x: polyamp.losses.mean_squared_error(model(x), x[:, :1]), RECIPE)
    before = state.backend.export_state(state)
    report = polyamp.replay(step, state, BATCH)
    assert report.equal
    assert str(report) == "Both runs of the step gave the same bits."
    after = state.backend.export_state(state)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_step_with_a_state_of_its_own_is_named() -> None:
    calls: list[int] = []

    def loss_fn(model: Any, x: Any) -> Any:
        calls.append(1)
        return polyamp.losses.mean_squared_error(model(x) * float(len(calls)), x[:, :1])

    state = polyamp.init(MLP.random([4, 8, 1], seed=0), RECIPE)
    report = polyamp.replay(polyamp.train_step(loss_fn, RECIPE), state, BATCH)
    assert not report.equal
    assert report.losses[0] != report.losses[1]
    assert any(each.name.startswith("model/") and each.elements > 0 for each in report.differences)
    assert str(report).startswith("Two runs of the step differ: losses ")
