"""`EarlyStopping` in `fit` on torch and JAX, where the rows of a NumPy array may change between epochs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import polyamp
import polyamp_keras

SCALER = polyamp.LossScaler(init_scale=64.0)


def test_early_stopping_brings_back_the_best_weights(model: Any, batches: Any) -> None:
    """The epochs after the first skip everything, so that the first stays the best."""
    x, y = batches
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.adamw(1e-2), scaler=SCALER)
    polyamp_keras.compile(model, recipe, loss="mse")

    class Break(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            x[:] = x if epoch == 0 else np.inf

    good = (x[16:].copy(), y[16:])
    stops = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True, min_delta=1e-6)
    history = model.fit(
        x, y, batch_size=8, epochs=6, shuffle=False, verbose=0, validation_data=good, callbacks=[Break(), stops]
    )
    assert len(history.history["loss"]) == 3
    assert len(set(history.history["val_loss"])) == 1
    assert int(model.optimizer.iterations) == 3
