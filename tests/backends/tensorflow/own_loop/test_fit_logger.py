"""`LossScaleLogger`: scale and skipped steps in the progress bar, in `history`, in TensorBoard and in CSV files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import polyamp
from polyamp.errors import LossScaleError
from polyamp_keras.own_loop.loss_scale_logger import LossScaleLogger
from polyamp_tensorflow import compile as compile_model


def fit(callbacks: list[Any], *, verbose: int = 0) -> Any:
    """Two epochs of three batches; the second batch overflows in each."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    recipe = polyamp.Recipe(optimizer=polyamp.sgd(0.01), scaler=polyamp.LossScaler(init_scale=64.0, growth_interval=2))
    compile_model(model, recipe, loss="mse", jit_compile=False)
    x = np.ones((6, 2), np.float32)
    x[2] = np.inf
    return model.fit(
        x, np.zeros((6, 1)), batch_size=2, epochs=2, shuffle=False, callbacks=callbacks, verbose=verbose
    ).history


def test_history_and_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    history = fit([LossScaleLogger()], verbose=2)
    # good, overflow: 32, good | good: 64, overflow: 32, good
    assert history["loss_scale"] == [32.0, 32.0]
    assert history["skipped_steps"] == [1, 2]
    lines = [line for line in capsys.readouterr().out.splitlines() if "loss_scale: 32.0000" in line]
    assert len(lines) == 2
    assert "skipped_steps: 2.0000" in lines[1]


def test_the_progress_bar_shows_every_batch(capsys: pytest.CaptureFixture[str]) -> None:
    fit([LossScaleLogger()], verbose=1)
    printed = capsys.readouterr().out
    for scale in ("64.0000", "32.0000"):
        assert f"loss_scale: {scale}" in printed


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")  # Keras's files
def test_tensorboard_and_csv(tmp_path: Path) -> None:
    board = keras.callbacks.TensorBoard(str(tmp_path), update_freq="batch")
    fit([LossScaleLogger(), board, keras.callbacks.CSVLogger(str(tmp_path / "log"))])
    written = events(tmp_path / "train")
    assert written["epoch_loss_scale"] == [32.0, 32.0]
    assert written["epoch_skipped_steps"] == [1, 2]
    assert written["batch_loss_scale"] == [64.0, 32.0, 32.0, 64.0, 32.0, 32.0]
    with (tmp_path / "log").open() as file:
        assert [row["skipped_steps"] for row in csv.DictReader(file)] == ["1", "2"]


def events(folder: Path) -> dict[str, list[float]]:
    """The scalars in a folder of TensorBoard's files, by name."""
    files = EventAccumulator(str(folder))
    files.Reload()
    return {
        name: [float(make_ndarray(event.tensor_proto)) for event in files.Tensors(name)]
        for name in files.Tags()["tensors"]
        if name.startswith(("epoch_", "batch_"))
    }


def test_it_needs_a_loss_scale() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    with pytest.raises(LossScaleError, match=r"Received: keras\..*SGD"):
        model.fit(np.ones((2, 2)), np.ones((2, 1)), callbacks=[LossScaleLogger()], verbose=0)
