"""Optimizers that run polyamp's formula in TensorFlow, against Keras's classes with the same formula."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import polyamp
import polyamp_tensorflow
from polyamp.errors import RecipeError
from polyamp_tensorflow import SpecOptimizer

STEPS = 20

PAIRS: dict[str, tuple[Any, Any]] = {
    "lamb": (polyamp.lamb(0.01, weight_decay=0.0), lambda: keras.optimizers.Lamb(0.01, epsilon=1e-6)),
    "muon": (
        polyamp.muon(0.01, scale="moonlight", weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8),
        lambda: keras.optimizers.Muon(0.01, weight_decay=None, adam_weight_decay=None, epsilon=1e-8),
    ),
    "adam": (
        polyamp.adam(0.01, amsgrad=True, eps=1e-8),
        lambda: keras.optimizers.Adam(0.01, amsgrad=True, epsilon=1e-8),
    ),
}
"""Name -> polyamp's and Keras's; the latter's Adam has its epsilon elsewhere, which 1e-8 hides."""


def model() -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(7, activation="tanh", name="hidden"), keras.layers.Dense(3, name="head")]
    return keras.Sequential([keras.Input((5,)), *layers])


def batch(number: int) -> dict[str, Any]:
    x = np.random.default_rng(number).normal(size=(8, 5)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :3])}


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("name", PAIRS)
def test_s21_twenty_steps_agree_with_keras(name: str) -> None:
    ends = []
    for optimizer in (PAIRS[name][0], PAIRS[name][1]()):
        recipe = polyamp.Recipe(policy="float32", optimizer=optimizer)
        state, step = polyamp.init(model(), recipe), polyamp.train_step(loss_fn, recipe)
        for number in range(STEPS):
            state, _ = step(state, batch(number))
        ends.append([variable.numpy() for variable in state.model.trainable_variables])
    for mine, theirs in zip(*ends, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=2e-4)


def test_an_optimizer_by_kinds_of_parameters_needs_the_model() -> None:
    with pytest.raises(RecipeError, match=r"spec is muon, which treats the kinds of a model's parameters differently"):
        SpecOptimizer(polyamp.muon(0.01))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, in save()
@pytest.mark.parametrize("optimizer", [polyamp.muon(0.01), polyamp.adafactor(0.01)])
def test_a_compiled_model_is_saved_and_goes_on(optimizer: Any, tmp_path: Any) -> None:
    made, data = model(), batch(0)
    polyamp_tensorflow.compile(
        made, polyamp.Recipe(policy="float32", optimizer=optimizer), loss="mse", jit_compile=False
    )
    made.fit(data["x"], data["y"], epochs=2, verbose=0)
    made.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    for one in (made, again):
        one.fit(data["x"], data["y"], epochs=2, verbose=0)
    for mine, theirs in zip(made.trainable_variables, again.trainable_variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-6)
