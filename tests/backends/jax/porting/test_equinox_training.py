"""A training of an equinox model whose running statistics a checkpoint holds under numbers, on its way out and in."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import polyamp
from polyamp import porting


class Net(eqx.Module):
    head: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, mode: Any = "batch") -> None:
        self.head = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        self.norm = eqx.nn.BatchNorm(2, "batch", mode=mode)

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


@pytest.mark.parametrize("mode", ["batch", "ema"])
@pytest.mark.parametrize("is_native", [False, True])
def test_running_statistics_enter_a_state_by_their_names(mode: Any, is_native: bool) -> None:
    tx, recipe = optax.adam(0.1), polyamp.Recipe(scaler="off", optimizer=polyamp.adam(0.1))
    source = polyamp.init(eqx.nn.make_with_state(Net)(mode), recipe, axis_name="batch")
    step = polyamp.train_step(lambda model, x: (model(x) ** 2).mean(), recipe)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    for _ in range(3):
        source, _ = step(source, x)
    fresh = eqx.nn.make_with_state(Net)(mode)
    target: Any = polyamp.init(fresh, recipe, axis_name="batch")
    if is_native:
        target = porting.training(fresh, (tx, tx.init(eqx.filter(fresh[0], eqx.is_inexact_array))), step=0)
    before = jax.tree.map(np.array, jax.tree.leaves(eqx.filter(target.model, eqx.is_array)))
    moved, report = polyamp.port(source, target)
    assert report.clean
    one, other = (porting.training_state(each) for each in (source, moved))
    for mine, yours in ((one.parameters, other.parameters), *((one.slots[s], other.slots[s]) for s in one.slots)):
        assert mine.keys() == yours.keys()
        assert all(np.array_equal(mine[name].read(), yours[name].read()) for name in mine)
    assert {"norm/mean", "norm/variance"} <= one.parameters.keys()
    assert (one.counts, one.step) == (other.counts, other.step)
    call = [jax.vmap(eqx.nn.inference_mode(each.model[0]), (0, None))(x, each.model[1])[0] for each in (source, moved)]
    np.testing.assert_allclose(*call, rtol=1e-6)
    after = jax.tree.leaves(eqx.filter(target.model, eqx.is_array))
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))  # the given one is as it was
