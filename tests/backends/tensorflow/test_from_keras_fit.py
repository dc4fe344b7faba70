"""docs/guides/from_keras_fit.md: both sides of its diffs train alike, and files of either side load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from polyamp_tensorflow import LossScaleOptimizer
from polyamp_tensorflow.own_loop.tensorflow_only import train_step_guard
from tests.page_diffs import run_side

PAGE = "from_keras_fit"
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
"""From Keras, as it writes files."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder with `before.keras`, a file of a model that Keras trained under `mixed_float16`. XLA is off:
    compiling takes most of the time, and so few products are quick in float16 without it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_step_guard, "needs_xla", lambda *args, **kwargs: False)
    monkeypatch.setattr("keras.src.trainers.trainer.model_supports_jit", lambda model: False)
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(np.ones((16, 8), "float32"), np.zeros(16, "int32"), verbose=0)
    model.save("before.keras")
    keras.mixed_precision.set_global_policy("float32")
    yield
    keras.mixed_precision.set_global_policy("float32")


def furthest(one: keras.Model, other: keras.Model) -> float:
    """The largest difference of two models' weights."""
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)


def test_both_sides_of_the_diffs_train_alike() -> None:
    before: dict[str, Any] = run_side(PAGE, "-")
    keras.mixed_precision.set_global_policy("float32")
    after: dict[str, Any] = run_side(PAGE, "+")
    for metric, values in before["history"].history.items():
        np.testing.assert_allclose(after["history"].history[metric], values, rtol=1e-3)
    assert furthest(before["loaded"], after["loaded"]) < 1e-3
    assert furthest(before["model"], after["model"]) < 1e-3
    assert furthest(before["old"], after["old"]) < 1e-6
    for name, updates in {"loaded": 16, "model": 4, "old": 5}.items():
        optimizer = after[name].optimizer
        assert isinstance(optimizer, LossScaleOptimizer)
        assert int(optimizer.iterations) == int(before[name].optimizer.iterations) == updates
    assert after["loaded"].layers[0].compute_dtype == "float16"
    assert after["loaded"](after["x"]).dtype == after["model"](after["x"]).dtype == "float32"


def test_keras_drops_the_scale_of_a_file_that_is_loaded_without_the_global_policy() -> None:
    """What the page warns of: once this fails, the page can forget the line."""
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        model = keras.models.load_model("before.keras")
    assert type(model.optimizer) is keras.optimizers.Adam
