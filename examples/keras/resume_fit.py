"""`fit` with Keras's callbacks: stop early, keep the best model, and go on after an interruption bit for bit.

    KERAS_BACKEND=torch python examples/keras/resume_fit.py FOLDER        # or tensorflow, or jax

The model's file holds polyamp's policy, scale and guard beside Keras's own. A file that one Keras backend wrote opens
on the others, with the same arrays. The files of `BackupAndRestore` are of weights alone, in which Keras keeps no state
of dropout: a model with dropout draws other numbers after an interruption.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import polyamp
import polyamp_keras

RECIPE = polyamp.Recipe(
    policy="mixed_bfloat16", scaler=polyamp.LossScaler(init_scale=64.0), optimizer=polyamp.adamw(1e-2)
)


def network() -> Any:
    """Dense layers with BatchNorm, (batch, 4) -> (batch, 3), compiled by the recipe."""
    seeded = [keras.initializers.GlorotUniform(seed) for seed in range(2)]
    layers = [
        keras.layers.Dense(16, "gelu", kernel_initializer=seeded[0], name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(3, kernel_initializer=seeded[1], name="out"),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    polyamp_keras.compile(model, RECIPE, loss="mse")
    return model


def data() -> tuple[Any, Any]:
    """Four batches of 16 rows, of which the second overflows."""
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    y = np.sin(x[:, :3])
    x[16] = np.inf
    return x, y


def fit(model: Any, epochs: int, *callbacks: Any) -> Any:
    """Train up to this number of epochs."""
    x, y = data()
    good = (x[32:], y[32:])  # the loss of the first half is infinite
    return model.fit(
        x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0, validation_data=good, callbacks=list(callbacks)
    )


class Interruption(keras.callbacks.Callback):
    """Callback that raises at the end of an epoch, as a machine that is taken away."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Raise once the epoch is over."""
        if epoch == self.epoch:
            raise KeyboardInterrupt


def arrays(model: Any) -> list[Any]:
    """Return every array of the model and of its optimizer."""
    variables = [*model.variables, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(variable.value) for variable in variables]


def main(folder: Path) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the arrays after four epochs, after four with an interruption, and those of the best model's file."""
    whole, broken, again = network(), network(), network()
    stops = keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=False)
    best = keras.callbacks.ModelCheckpoint(folder / "best.keras", "val_loss", save_best_only=True)
    fit(whole, 4, stops, best)

    backup = keras.callbacks.BackupAndRestore(folder / "backup")
    with contextlib.suppress(KeyboardInterrupt):
        fit(broken, 4, backup, Interruption(1))
    fit(again, 4, keras.callbacks.BackupAndRestore(folder / "backup"))

    loaded = keras.models.load_model(folder / "best.keras")
    same = all(map(np.array_equal, arrays(whole), arrays(again)))
    scales = [float(model.optimizer.dynamic_scale) for model in (again, loaded)]
    print(f"bit identical after the interruption: {same}; scale {scales[0]:g}, of the best model {scales[1]:g}")
    return arrays(whole), arrays(again), arrays(loaded)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
