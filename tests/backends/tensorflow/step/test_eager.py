"""A step under `tf.config.run_functions_eagerly`, where what is selected counts as in a graph (S8)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp


@pytest.fixture(params=[False, True], ids=["graph", "eager"])
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    tf.config.run_functions_eagerly(request.param)
    yield
    tf.config.run_functions_eagerly(False)


def selecting(model: Any, batch: Any) -> Any:
    outputs, targets = (tf.boolean_mask(values, batch["mask"]) for values in (model(batch["x"]), batch["y"]))
    return polyamp.losses.mean_squared_error(outputs, targets)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("count", [1, 3])
def test_s08_a_step_counts_what_is_selected(count: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 3)).astype("f4"), rng.normal(size=(6, 2)).astype("f4")
    mask = np.array([True, True, False, True, False, False])
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    kernel, bias = (variable.numpy() for variable in model.weights)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(1.0), accumulate_steps=count)
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(selecting, recipe)
    state, result = step(state, {"x": x, "y": y, "mask": mask})
    error = x[mask] @ kernel + bias - y[mask]
    assert float(result.loss) == pytest.approx(np.mean(error**2), rel=2e-6)
    np.testing.assert_allclose(model.weights[0].numpy(), kernel - x[mask].T @ error / 3, rtol=2e-6, atol=1e-6)
    after = model.weights[0].numpy()
    state, result = step(state, {"x": x, "y": y, "mask": np.zeros(6, bool)})
    assert [float(result.loss), float(result.weight), bool(result.skipped), int(result.step)] == [0.0, 0.0, True, 1]
    np.testing.assert_array_equal(model.weights[0].numpy(), after)
