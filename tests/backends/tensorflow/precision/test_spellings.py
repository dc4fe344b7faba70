"""A policy's spelling is taken wherever polyamp_tensorflow takes a policy: one row for each public function."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import polyamp
import polyamp_tensorflow
from polyamp.errors import PolicyError
from tests.fixtures.spellings import taking_a_policy


def _dtypes(policy: Any) -> list[str]:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, "relu"), keras.layers.Dense(2)])
    with polyamp_tensorflow.apply_policy(model, policy):
        return [layer.compute_dtype for layer in model.layers]


def _guarded(policy: Any) -> bool:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile(polyamp_tensorflow.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
    polyamp_tensorflow.guard(model, policy)
    return model.train_function is None


ROWS: dict[str, Any] = {
    "MonitorCallback": lambda policy: polyamp_tensorflow.MonitorCallback(polyamp.Monitor(), policy)._policy,
    "apply_policy": _dtypes,
    "dtype_policy": lambda policy: polyamp_tensorflow.dtype_policy(policy).name,
    "guard": _guarded,
}


def test_every_function_has_a_row() -> None:
    assert taking_a_policy(polyamp_tensorflow) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_spelling_is_taken_and_a_slip_is_named(name: str) -> None:
    assert ROWS[name]("fp16") == ROWS[name](polyamp.Policy("fp16"))
    with pytest.raises(PolicyError, match="mixed_float16"):
        ROWS[name]("mixed_flaot16")
