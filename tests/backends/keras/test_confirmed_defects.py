"""Defects of Keras's own `LossScaleOptimizer`: each is shown on Keras, and its absence here, on this Keras backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import polyamp
import polyamp_keras

SGD = keras.optimizers.SGD
_UNSCALED = polyamp.LossScaler(init_scale=1.0, min_scale=1.0)


def keras_scaler(**options: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(SGD(0.1), **options)


def polyamp_scaler(**options: Any) -> Any:
    return polyamp_keras.LossScaleOptimizer(SGD(0.1), polyamp.LossScaler(**options))


def values(variables: Any) -> list[Any]:
    return [keras.ops.convert_to_numpy(variable.value) for variable in variables]


def fit(model: Any, optimizer: Any, x: Any, y: Any, *, guarded: bool, batch_size: int = 8) -> None:
    model.compile(optimizer, "mse", auto_scale_loss=False)
    if guarded:
        polyamp_keras.guard(model)
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)


@pytest.mark.parametrize("ours", [False, True])
def test_s12_a_skipped_step_leaves_running_statistics(model: Any, batches: Any, ours: bool) -> None:
    x = np.full((8, 4), np.inf, "float32")
    before = values(model.layers[1].non_trainable_variables)
    fit(model, polyamp_scaler() if ours else keras_scaler(), x, batches[1][:8], guarded=ours)
    after = values(model.layers[1].non_trainable_variables)
    assert all(map(np.array_equal, before, after)) is ours
    assert np.isfinite(after[0]).all() == ours


def apply(optimizer: Any, variable: Any, gradient: float) -> None:
    optimizer.scale_loss(keras.ops.ones(()))
    gradients = [keras.ops.full((2,), gradient)]
    if keras.config.backend() != "jax":
        optimizer.apply(gradients, [variable])
        return
    if not optimizer.built:
        optimizer.build([variable])
    state = [each.value for each in optimizer.variables]
    found = optimizer.stateless_apply(state, gradients, [variable.value])
    for each, value in zip([variable, *optimizer.variables], [*found[0], *found[1]], strict=True):
        each.assign(value)


@pytest.mark.parametrize("ours", [False, True])
def test_s15_many_overflows_leave_a_scale_that_the_next_good_step_can_divide_by(ours: bool) -> None:
    variable = keras.Variable([1.0, 1.0])
    least = 2.0**-124
    ours_from = polyamp_scaler(init_scale=4.0, min_scale=1.0, patience=100)
    optimizer = ours_from if ours else keras_scaler(initial_scale=least)
    for _ in range(30):
        apply(optimizer, variable, np.inf)
    assert float(optimizer.dynamic_scale) == (1.0 if ours else 0.0)
    apply(optimizer, variable, 0.0)
    assert np.isfinite(values([variable])[0]).all() == ours


@pytest.mark.parametrize("ours", [False, True])
def test_s15_the_scale_does_not_grow_to_infinity(ours: bool) -> None:
    variable = keras.Variable([1.0, 1.0])
    most = polyamp.LossScaler().max_scale
    optimizer = (
        polyamp_scaler(init_scale=most, growth_interval=1)
        if ours
        else keras_scaler(initial_scale=2.0**127, dynamic_growth_steps=1)
    )
    apply(optimizer, variable, 0.0)
    assert float(optimizer.dynamic_scale) == (most if ours else np.inf)


@pytest.mark.parametrize("ours", [False, True])
def test_s08_an_overflow_drops_the_window_and_no_micro_batch_alone(ours: bool) -> None:
    """Keras's accumulation goes on without the micro-batch, so that an update is of two different windows."""
    variable = keras.Variable([1.0, 1.0])
    if ours:
        optimizer = polyamp_keras.LossScaleOptimizer(SGD(0.1), _UNSCALED, accumulate_steps=2)
    else:
        inner = SGD(0.1, gradient_accumulation_steps=2)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1.0)
    for gradient in (1.0, np.inf, 3.0):
        apply(optimizer, variable, gradient)
    moved = not np.array_equal(values([variable])[0], [1.0, 1.0])
    assert moved is not ours  # the third begins a window here, and ends the first one in Keras
    if ours:
        apply(optimizer, variable, 5.0)
        np.testing.assert_allclose(values([variable])[0], 1.0 - 0.1 * (3.0 + 5.0) / 2)
        assert (optimizer.skipped_steps, int(optimizer.micro_step)) == (1, 0)
