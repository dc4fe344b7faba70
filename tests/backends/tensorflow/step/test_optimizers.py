"""Optimizers: PyTorch's formulas on Keras variables, native ones beside them, and what is refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from polyamp.conformance.problems import batch, flat_weights, layers, loss_fn, recipe, train
from polyamp.errors import LossScaleError, PolyampError, RecipeError
from polyamp_tensorflow import SpecOptimizer

HARNESS = polyamp_tensorflow.BACKEND.testing()


def test_adam_at_a_large_epsilon_is_pytorchs() -> None:
    """Keras's Adam is 3e-2 away at eps=1e-3: it folds the bias correction into the step before epsilon."""
    spec = polyamp.adam(1e-2, eps=1e-3)
    optimizer = SpecOptimizer(spec)
    variable = keras.Variable(np.array([1.0, -2.0], np.float32))
    optimizer.build([variable])
    rng = np.random.default_rng(0)
    parameter = np.array([1.0, -2.0])
    mean = square = np.zeros(2)
    for count in range(1, 6):
        gradient = rng.normal(size=2) * 1e-2
        optimizer.apply([keras.ops.convert_to_tensor(gradient.astype(np.float32))], [variable])
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        root = np.sqrt(square) / np.sqrt(1 - 0.999**count) + 1e-3
        parameter = parameter - 1e-2 / (1 - 0.9**count) * mean / root
        np.testing.assert_allclose(variable.numpy(), parameter, rtol=1e-6)


def test_slots_of_16_bit_parameters_are_float32() -> None:
    optimizer = SpecOptimizer(polyamp.adam(1e-3))
    variable = keras.Variable(np.ones(2, np.float32), dtype="bfloat16")
    optimizer.build([variable])
    optimizer.apply([keras.ops.ones(2, dtype="bfloat16")], [variable])
    assert {slot.dtype for slot in optimizer.named_slots(["w"]).values()} == {"float32"}
    assert variable.dtype == "bfloat16"


def test_a_native_optimizer_equals_the_spec_with_its_formula() -> None:
    batches = [batch(i, gain=np.inf if i == 1 else 1.0) for i in range(4)]
    settings: dict[str, Any] = {"scaler": polyamp.LossScaler(init_scale=16.0), "clip_norm": 0.5}
    ours, _ = train(HARNESS, recipe(optimizer=polyamp.sgd(0.1), **settings), batches)
    native = keras.optimizers.SGD(0.1)
    theirs, results = train(HARNESS, recipe(optimizer=native, **settings), batches)
    np.testing.assert_allclose(flat_weights(HARNESS, ours), flat_weights(HARNESS, theirs), rtol=1e-6)
    assert int(native.iterations) == int(results[-1].step) == 3
    assert theirs.optimizer is native


def test_a_native_schedule_counts_applied_updates_only() -> None:
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.0])
    made = recipe(optimizer=keras.optimizers.SGD(rate), scaler=polyamp.LossScaler(init_scale=16.0))
    start = flat_weights(HARNESS, polyamp.init(HARNESS.mlp(layers()), recipe()))
    state = polyamp.init(HARNESS.mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made)
    step(state, batch(gain=np.inf))
    step(state, batch())
    moved = flat_weights(HARNESS, state)
    assert not np.array_equal(moved, start), "the skipped step must not use up the first rate"
    step(state, batch())
    assert np.array_equal(flat_weights(HARNESS, state), moved)


def test_a_constant_learning_rate_can_be_changed_between_steps() -> None:
    made = recipe()
    state = polyamp.init(HARNESS.mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made)
    step(state, batch())
    before = flat_weights(HARNESS, state)
    state.optimizer.learning_rate = 0.0
    step(state, batch())
    assert np.array_equal(flat_weights(HARNESS, state), before)


def test_constraints_of_variables_hold() -> None:
    dense = keras.layers.Dense(3, kernel_constraint=keras.constraints.NonNeg(), name="dense")
    state = polyamp.init(keras.Sequential([keras.Input((4,)), dense]), recipe(optimizer=polyamp.sgd(10.0)))
    polyamp.train_step(loss_fn, state.recipe)(state, batch())
    assert dense.kernel.numpy().min() == 0.0


@pytest.mark.parametrize(
    ("optimizer", "kind", "message"),
    [
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), LossScaleError, "a scaler wrapped twice"),
        (
            lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
            RecipeError,
            r"gradient_accumulation_steps=2.*Recipe\(accumulate_steps=",
        ),
        (lambda: keras.optimizers.SGD(loss_scale_factor=2.0), RecipeError, r"loss_scale_factor=2.0.*LossScaler.static"),
        (object, RecipeError, r"keras\.optimizers\.Optimizer. Received: builtins\.object"),
    ],
)
def test_optimizers_that_are_refused(optimizer: Any, kind: type[PolyampError], message: str) -> None:
    with pytest.raises(kind, match=message):
        polyamp.init(HARNESS.mlp(layers()), recipe(optimizer=optimizer()))


def test_an_optimizer_of_another_model_is_refused() -> None:
    made = recipe(optimizer=keras.optimizers.SGD(0.1))
    polyamp.init(HARNESS.mlp(layers()), made)
    with pytest.raises(RecipeError, match="this SGD is already built for other variables: another model's"):
        polyamp.init(HARNESS.mlp(layers()), made)


def test_sparse_gradients_are_the_dense_ones_they_stand_for() -> None:
    """Keras's own Adam squares each row before it adds up rows that occur twice."""
    table = keras.Variable(np.zeros((3, 2), np.float32))
    dense = keras.Variable(np.zeros((3, 2), np.float32))
    rows = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([1, 1]), tf.constant([3, 2]))
    for variable, gradient in ((table, rows), (dense, tf.constant([[0.0, 0.0], [4.0, 6.0], [0.0, 0.0]]))):
        optimizer = SpecOptimizer(polyamp.adam(0.1, eps=1.0))
        optimizer.apply([gradient], [variable])
    assert np.array_equal(table.numpy(), dense.numpy())
    assert not np.array_equal(table.numpy(), np.zeros((3, 2)))
