"""What `compile` and `guard` put around `fit`, `evaluate` and `predict`: new traces, TF32, a stuck scale looked for."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp_tensorflow import LossScaleOptimizer, guard
from polyamp_tensorflow import compile as compile_model


def make_model(*, norm: bool = True) -> Any:
    keras.utils.set_random_seed(0)
    middle = [keras.layers.BatchNormalization()] if norm else []
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), *middle, keras.layers.Dense(3)])


def rows(count: int = 24) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 4)).astype(np.float32), rng.integers(0, 3, size=count)


def cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def test_a_model_that_runs_eagerly_is_not_compiled_with_xla() -> None:
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))
    model = make_model(norm=False)
    compile_model(model, recipe, loss=cross_entropy(), run_eagerly=True)
    assert model.jit_compile is False


def test_guard_watches_over_functions_that_were_traced_before() -> None:
    model = make_model()
    model.compile(
        LossScaleOptimizer(keras.optimizers.SGD(0.1), polyamp.LossScaler(init_scale=16.0)),
        cross_entropy(),
        jit_compile=False,
    )
    model.fit(*rows(), verbose=0)
    before = model.layers[1].moving_mean.numpy()
    x, y = rows(4)
    guard(model)
    model.fit(np.full_like(x, np.nan), y, verbose=0)
    assert np.array_equal(model.layers[1].moving_mean.numpy(), before)


def test_float32_matmul_holds_for_evaluate_and_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = tf.config.experimental.tensor_float_32_execution_enabled
    before, seen = enabled(), []
    model = make_model(norm=False)
    policy = polyamp.Policy("float32", float32_matmul="highest" if before else "high")
    made = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    compile_model(model, made, loss=cross_entropy(), run_eagerly=True)
    call = type(model).call

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(enabled())
        return call(self, *args, **options)

    monkeypatch.setattr(type(model), "call", watched)
    model.evaluate(*rows(), verbose=0)
    model.predict(rows()[0], verbose=0)
    assert set(seen) == {not before}
    assert enabled() == before


@pytest.mark.parametrize("batches", [3, 4])
def test_a_stuck_scale_is_looked_for_once_every_patience_updates(batches: int) -> None:
    """Windows of two batches, three of which are executed at a time, so that no count meets the period exactly."""
    recipe = polyamp.Recipe(
        optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler(init_scale=2.0**-14, patience=4), accumulate_steps=2
    )
    model = make_model(norm=False)
    compile_model(model, recipe, loss=cross_entropy(), steps_per_execution=batches, jit_compile=False)
    x, y = rows(36)
    looked: list[int] = []
    model.optimizer.raise_if_stuck = lambda: looked.append(model.optimizer.skipped_steps)
    model.fit(np.full_like(x, np.nan), y, batch_size=1, verbose=0, shuffle=False)
    assert looked == ([4, 9, 12, 16] if batches == 3 else [4, 8, 12, 16])
    model.evaluate(x, y, batch_size=1, verbose=0)
    assert len(looked) == 4
