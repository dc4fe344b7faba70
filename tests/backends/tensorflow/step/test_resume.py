"""S22 on TensorFlow beyond the conformance suite: learning rates that are variables of a Keras optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
from polyamp.errors import CheckpointError
from polyamp_keras.arrays import native_variable


def made(optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    return polyamp.init(model, polyamp.Recipe(optimizer=optimizer))


def rate(state: Any) -> float:
    return float(np.asarray(state.optimizer.learning_rate))


@pytest.mark.parametrize("make", [keras.optimizers.Adam, polyamp.adam], ids=["native", "spec"])
def test_s22_a_rate_that_was_moved_is_resumed_and_a_changed_one_is_the_codes(tmp_path: Path, make: Any) -> None:
    """`ReduceLROnPlateau` and its like move the variable: state. Another number in the code: another recipe."""
    state = made(make(0.125))
    state.optimizer.learning_rate.assign(0.03125)
    polyamp.save(state, tmp_path / "checkpoint")
    assert rate(polyamp.restore(made(make(0.125)), tmp_path / "checkpoint")) == 0.03125
    other = made(make(0.5))
    with pytest.raises(CheckpointError, match=r"\n  optimizer\.learning_rate: 0\.125 -> 0\.5\n"):
        polyamp.restore(other, tmp_path / "checkpoint")
    assert rate(polyamp.restore(other, tmp_path / "checkpoint", on_change="accept")) == 0.5


def test_s22_every_setting_of_a_native_optimizer_is_said(tmp_path: Path) -> None:
    polyamp.save(made(keras.optimizers.Adam(1e-3, beta_1=0.75)), tmp_path / "checkpoint")
    with pytest.raises(CheckpointError) as caught:
        polyamp.restore(made(keras.optimizers.Adam(1e-3, beta_1=0.5, amsgrad=False)), tmp_path / "checkpoint")
    assert [line for line in str(caught.value).splitlines() if line.startswith("  ")] == [
        "  optimizer.beta_1: 0.75 -> 0.5"
    ]


def test_s22_a_negative_count_of_a_native_optimizer_changes_nothing(tmp_path: Path) -> None:
    state = made(keras.optimizers.Adam(1e-3))
    polyamp.save(state, tmp_path / "checkpoint")
    state.optimizer.iterations.assign(-5)
    polyamp.save(state, tmp_path / "forged")
    state.optimizer.iterations.assign(3)
    with pytest.raises(CheckpointError, match=r"optimizer/0000 is -5, and a count is never negative"):
        polyamp.restore(state, tmp_path / "forged")
    assert int(state.optimizer.iterations) == 3


def everywhere(state: Any, strategy: Any) -> list[list[bytes]]:
    """The bytes of every variable, a list for each replica."""
    held = [
        strategy.experimental_local_results(native_variable(variable)) for variable in state._named_variables().values()
    ]
    return [[np.asarray(copies[replica]).tobytes() for copies in held] for replica in range(len(held[0]))]


def test_s33_two_replicas_save_and_four_or_one_go_on(two_cpus: Any, four_cpus: Any, tmp_path: Path) -> None:
    def fresh(strategy: Any, seed: int) -> Any:
        recipe = polyamp.Recipe(optimizer=polyamp.adamw(1e-2), scaler=polyamp.LossScaler(init_scale=64.0))
        with strategy.scope():
            keras.utils.set_random_seed(seed)
            layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
            return polyamp.init(keras.Sequential([keras.Input((4,)), *layers]), recipe)

    def step(state: Any) -> Any:
        x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
        return polyamp.train_step(lambda model, batch: tf.reduce_mean(model(batch) ** 2), state.recipe)(state, x)[0]

    state = step(fresh(two_cpus, 0))
    polyamp.save(state, tmp_path / "file")
    polyamp.save(state, tmp_path / "folder", sharded=True)
    assert (tmp_path / "file").is_file()
    (saved, *others) = everywhere(state, two_cpus)
    assert others == [saved]
    for strategy, count in ((two_cpus, 2), (four_cpus, 4), (tf.distribute.get_strategy(), 1)):
        for name in ("file", "folder"):
            restored = polyamp.restore(fresh(strategy, 1), tmp_path / name)
            assert everywhere(restored, strategy) == [saved] * count
    step(restored)
