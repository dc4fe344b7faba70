"""`schedules.like` gives the rates of Keras's own schedules, update for update (S13)."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import pytest
import tensorflow as tf

from polyamp import schedules
from polyamp.schedules.library_schedules import LIBRARY_SCHEDULES
from polyamp_keras.engines.tensorflow import XP

CASES: list[tuple[str, dict[str, Any]]] = [
    ("CosineDecay", {"initial_learning_rate": 0.3, "decay_steps": 12, "alpha": 0.1}),
    ("CosineDecay", {"initial_learning_rate": 0.1, "decay_steps": 12, "alpha": 0.1, "warmup_target": 0.3,
     "warmup_steps": 5}),
    ("CosineDecayRestarts", {"initial_learning_rate": 0.3, "first_decay_steps": 4, "m_mul": 0.5, "alpha": 0.1}),
    ("CosineDecayRestarts", {"initial_learning_rate": 0.3, "first_decay_steps": 5, "t_mul": 1.0}),
    ("ExponentialDecay", {"initial_learning_rate": 0.3, "decay_steps": 5, "decay_rate": 0.5}),
    ("ExponentialDecay", {"initial_learning_rate": 0.3, "decay_steps": 5, "decay_rate": 0.5, "staircase": True}),
    ("PolynomialDecay", {"initial_learning_rate": 0.3, "decay_steps": 9, "power": 2.0}),
    ("PiecewiseConstantDecay", {"boundaries": [4, 9], "values": [0.3, 0.1, 0.05]}),
]  # fmt: skip
BETWEEN_CYCLES = {4, 12}
"""Keras finds the cycle by a logarithm in float32, which gives the last rate of one or the first of the next."""


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_s13_the_rates_are_keras(name: str, arguments: dict[str, Any]) -> None:
    schedule = schedules.like(f"keras.{name}", **arguments)
    theirs = getattr(keras.optimizers.schedules, name)(**arguments)
    for count in range(25):
        on_device = schedule(tf.constant(float(count)), XP)
        assert on_device.dtype == tf.float32
        assert float(on_device) == pytest.approx(schedule(count), rel=2e-5, abs=1e-7)
        if not ("m_mul" in arguments and count in BETWEEN_CYCLES):
            assert schedule(count) == pytest.approx(float(theirs(count)), rel=1e-5, abs=1e-7), count


def test_every_schedule_of_keras_is_compared_with_its_arguments_and_defaults() -> None:
    names = {name.removeprefix("keras.") for name in LIBRARY_SCHEDULES if name.startswith("keras.")}
    assert {name for name, _ in CASES} == names
    for name in names:
        theirs = dict(inspect.signature(getattr(keras.optimizers.schedules, name)).parameters)
        del theirs["name"]
        own = inspect.signature(LIBRARY_SCHEDULES[f"keras.{name}"]).parameters
        assert {key: value.default for key, value in own.items()} == {
            key: value.default for key, value in theirs.items()
        }, name
