"""S21 for one Keras model and one recipe on two Keras backends: this process has torch, and starts JAX and TensorFlow.

Two batches of 24 overflow, and the scale grows in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import polyamp
from tests.backends.keras.other_process import start

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
OVERFLOWS = (5, 15)
PROGRAM = """
import sys
import numpy as np
from tests.backends.keras.test_backend_curves import curves
np.savez(sys.argv[1], **curves())
"""
Curves = Mapping[str, Any]


def network() -> Any:
    """A network whose initial weights are those of every backend."""
    random = np.random.default_rng(0)
    built = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu", name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.Flatten(name="rows"),
            layers.Dense(32, "gelu", name="hidden"),
            layers.LayerNormalization(name="hidden_norm"),
            layers.Dense(10, name="head"),
        ]
    )
    for variable in built.trainable_variables:
        if len(variable.shape) > 1:
            variable.assign(random.normal(size=variable.shape, scale=variable.shape[-2] ** -0.5).astype("float32"))
    return built


def curves() -> Curves:
    """Losses (float), scales (float) and skipped steps (bool) of a training under each policy on this backend."""
    found = {}
    for policy in POLICIES:
        scaler = polyamp.LossScaler(init_scale=2.0**15, growth_interval=8)
        recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.adamw(1e-3), clip_norm=1.0, scaler=scaler)
        state = polyamp.init(network(), recipe)
        step = polyamp.train_step(
            lambda model, batch: polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"]), recipe
        )
        random, results = np.random.default_rng(0), []
        for number in range(24):
            x = random.normal(size=(16, 8, 8, 1)).astype("float32")
            x[0] = np.inf if number in OVERFLOWS else x[0]
            state, result = step(state, {"x": x, "y": random.integers(0, 10, 16)})
            results.append([float(result.loss), float(result.scale), bool(result.skipped)])
        found[policy] = np.array(results)
    return found


def relative_distance(one: Any, other: Any) -> float:
    """Largest relative distance between the losses of the steps that were taken."""
    taken = one[:, 2] == 0
    return float(np.max(np.abs(one[taken, 0] - other[taken, 0]) / np.abs(other[taken, 0])))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Curves]:
    """The curves of each Keras backend."""
    folder = tmp_path_factory.mktemp("curves")
    running = {backend: start(PROGRAM, backend, folder, f"{backend}.npz") for backend in ("jax", "tensorflow")}
    found = {"torch": curves()}
    for backend, process in running.items():
        assert process.wait(timeout=600) == 0
        found[backend] = read(folder / f"{backend}.npz")
    return found


def read(path: Path) -> Curves:
    with np.load(path) as file:
        return dict(file)


@pytest.mark.parametrize("policy", POLICIES)
def test_s21_scales_and_skipped_steps_are_equal(trained: Mapping[str, Curves], policy: str) -> None:
    for each in trained.values():
        np.testing.assert_array_equal(each[policy][:, 1:], trained["torch"][policy][:, 1:])
        assert np.flatnonzero(each[policy][:, 2]).tolist() == list(OVERFLOWS)
    moves = np.diff(trained["torch"]["mixed_float16"][:, 1])
    assert np.sign(moves[moves != 0]).tolist() == [-1, 1, -1, 1]  # it fell and grew


@pytest.mark.parametrize("pair", [("torch", "jax"), ("torch", "tensorflow"), ("jax", "tensorflow")])
def test_s21_curves_of_two_backends(trained: Mapping[str, Curves], pair: tuple[str, str]) -> None:
    one, other = (trained[backend] for backend in pair)
    assert relative_distance(one["float32"], other["float32"]) < 5e-5
    for policy in POLICIES[1:]:
        own = max(relative_distance(each[policy], each["float32"]) for each in (one, other))
        assert relative_distance(one[policy], other[policy]) <= 2 * own
