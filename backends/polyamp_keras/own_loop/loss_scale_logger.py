"""`LossScaleLogger`, which adds the loss scale to the logs of `fit`."""

from __future__ import annotations

from typing import Any

import keras

from polyamp_keras.engine import ENGINE
from polyamp_keras.own_loop.fit_checks import scaling_optimizer


class LossScaleLogger(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Callback that adds `loss_scale` and `skipped_steps` to the logs: progress bar, `history`, TensorBoard, CSV files.

    Callbacks get the logs in order, so list it before `TensorBoard` and `CSVLogger`. Reading the two numbers waits for
    the device after each batch, as the progress bar does.

    Raises (when `fit` starts):
        LossScaleError: the model's optimizer is not polyamp's `LossScaleOptimizer`.

    Example:
        >>> import keras, polyamp
        >>> import polyamp_keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> recipe = polyamp.Recipe(scaler=polyamp.LossScaler(init_scale=64.0), optimizer=polyamp.sgd(0.1))
        >>> polyamp_keras.compile(model, recipe, loss="mse")
        >>> x, y = keras.ops.ones((8, 4)), keras.ops.full((8, 2), float("nan"))
        >>> history = model.fit(x, y, verbose=0, callbacks=[polyamp_keras.LossScaleLogger()])
        >>> history.history["loss_scale"], history.history["skipped_steps"]
        ([32.0], [1])
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise for a model without a loss scale."""
        scaling_optimizer(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add both numbers to the batch's logs."""
        self._add(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add both numbers to the epoch's logs."""
        self._add(logs)

    def _add(self, logs: dict[str, Any] | None) -> None:
        if logs is not None:
            ENGINE.write_fit_state(self.model)
            optimizer = scaling_optimizer(self.model)
            logs["loss_scale"] = float(optimizer.scale_state.scale)
            logs["skipped_steps"] = optimizer.skipped_steps
