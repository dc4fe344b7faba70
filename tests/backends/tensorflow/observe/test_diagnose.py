"""`polyamp.diagnose` on a planted layer whose arithmetic does not fit float16: exactly this one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import polyamp
import polyamp_tensorflow
from polyamp_tensorflow.observe.tensorflow_only import eager_trainings


class Hot(keras.layers.Layer):
    """Passes 65504 on the way to an output of usual size."""

    def call(self, x: Any) -> Any:
        return keras.ops.relu(x * 300 * 1000) / 1000 / 300


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize(
    ("device", "spelling", "updates", "slow", "eager"),
    [
        ("CPU:0", "mixed_float16", 30, False, True),
        ("CPU:0", "mixed_float16", 31, False, False),
        ("CPU:0", "mixed_float16", 30, True, False),  # where only XLA makes float16 fast
        ("CPU:0", "mixed_bfloat16", 30, True, True),
        ("GPU:0", "mixed_float16", 30, True, True),
    ],
)
def test_which_trainings_run_op_by_op(
    device: str, spelling: str, updates: int, slow: bool, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {tf.float16: 21.0 if slow else 2.0, tf.float32: 1.0}
    monkeypatch.setattr(eager_trainings, "_seconds", seconds.__getitem__)
    monkeypatch.setattr(eager_trainings, "_is_slow", eager_trainings._is_slow.__wrapped__)
    assert eager_trainings.runs_eagerly(device, polyamp.Policy(spelling), updates) is eager
    monkeypatch.undo()
    assert eager_trainings._seconds(tf.float32) > 0.0


@pytest.mark.parametrize("carries", [False, True])
def test_the_planted_layer_is_found(carries: bool) -> None:
    """Also where the model carries a policy of its own, which is taken off for the trials and put on again."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, "tanh", name=f"dense{number}") for number in range(5)]
    model = keras.Sequential([keras.Input((16,)), *layers[:3], Hot(name="hot"), *layers[3:], keras.layers.Dense(4)])
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(32, 16)).astype(np.float32) for _ in range(6)]
    batches = [{"x": x, "y": x[:, :4].argmax(-1)} for x in rows]
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.adamw(3e-3))
    if carries:
        polyamp_tensorflow.apply_policy(model, "mixed_float16")
    dtypes = [layer.compute_dtype for layer in model.layers]
    before = [np.array(value) for value in model.get_weights()]
    report = polyamp.diagnose(model, loss_fn, batches, recipe)
    assert report.sensitive == ["hot"], str(report)
    assert len(report.trials) <= 2 + 2 * np.log2(len(report.modules))
    assert all(np.array_equal(one, other) for one, other in zip(before, model.get_weights(), strict=True))
    assert [layer.compute_dtype for layer in model.layers] == dtypes
